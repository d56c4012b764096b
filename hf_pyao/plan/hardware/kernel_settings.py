"""What of a device and a process decides which kernel runs, and what it allocates inside."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MOST_MULTIPROCESSORS = 192
"""Assumed where the number is not known; of the cards in ``presets`` MI300X alone has more."""


CUDNN_CAPABILITIES = (90, 100, 103)
"""Compute capabilities on which torch tries cuDNN's attention first."""


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
    prefers_cudnn: bool = False
    """Whether ``scaled_dot_product_attention`` tries cuDNN's kernel before flash attention."""

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors that are assumed."""
        return self.num_multiprocessors or MOST_MULTIPROCESSORS


ANY_DEVICE = KernelSettings()
"""Settings where nothing is known of the device."""


def settings_of(device: torch.device) -> KernelSettings:
    """Return the settings of *device* in this process as they are now.

    Args:
        device: where a model trains. Of one that is not CUDA's only the process's settings are
            known.
    """
    import torch

    is_deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    found = KernelSettings(is_deterministic=is_deterministic, flash_version=_flash_version())
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return found._replace(
        num_multiprocessors=properties.multi_processor_count,
        capability=capability,
        prefers_cudnn=_prefers_cudnn(capability),
    )


def _prefers_cudnn(capability: int) -> bool:
    """Say whether torch tries cuDNN's attention first.

    As ``check_prefer_cudnn_attention`` in pytorch/pytorch,
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (commit 001f694a).
    """
    import torch

    is_off = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return (
        not is_off
        and bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        and version > 91500
        and capability in CUDNN_CAPABILITIES
    )


def _flash_version() -> int:
    import torch

    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # torch 2.11
    name = current() if current is not None else None
    return {"FA3": 3, "FA4": 4}.get(name or "", 2)
