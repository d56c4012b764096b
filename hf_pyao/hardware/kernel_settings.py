"""What of a device and a process decides which kernel runs, and what it allocates inside."""

from __future__ import annotations

from typing import NamedTuple

import torch

MOST_MULTIPROCESSORS = 192
"""Assumed where the number is not known; no card in ``presets`` has more, but MI300X (304)."""


class KernelSettings(NamedTuple):
    """What of a device and a process decides how kernels run."""

    num_multiprocessors: int = 0
    """Streaming multiprocessors of the device; 0: not known, and the most are assumed."""
    capability: int = 0
    """CUDA compute capability, 10 x major + minor; 0: not known, or no CUDA device."""
    is_deterministic: bool = False
    """``torch.use_deterministic_algorithms(True)``, without ``warn_only``."""
    flash_version: int = 2
    """Which FlashAttention runs as torch's flash attention: 2 is torch's own, 3 and 4 are those
    that ``torch.nn.attention.activate_flash_attention_impl`` puts in its place."""

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors that are reckoned with."""
        return self.num_multiprocessors or MOST_MULTIPROCESSORS


ANY_DEVICE = KernelSettings()
"""Settings where nothing is known of the device."""


def settings_of(device: torch.device) -> KernelSettings:
    """Return the settings of *device* in this process as they are now.

    Args:
        device: where a model trains. Of one that is not CUDA's only the process's settings are
            known.
    """
    is_deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    found = KernelSettings(is_deterministic=is_deterministic, flash_version=_flash_version())
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    return found._replace(
        num_multiprocessors=properties.multi_processor_count,
        capability=0 if torch.version.hip else 10 * properties.major + properties.minor,
    )


def _flash_version() -> int:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # torch 2.11
    name = current() if current is not None else None
    return {"FA3": 3, "FA4": 4}.get(name or "", 2)
