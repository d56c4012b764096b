"""Notes what an operation's result depends on beside its inputs, and puts it back for a second run.

Autocast, settings of torch, which attention kernels are allowed, the default device, random states.
Modes and hooks on all modules are not put back: see ``modes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_pyao.engine.rerun.generators import RandomState, accelerators_in, may_be_disturbed
from hf_pyao.engine.rerun.modes import default_device, made_on, reason_of_modes, refuse_under
from hf_pyao.engine.rerun.settings import apply_settings, current_settings

_KERNELS = tuple(
    (getattr(torch._C, get), getattr(torch._C, put))
    for get, put in (
        ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        ("_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    )
    if hasattr(torch._C, get)
)
"""How torch is asked whether a kernel of attention is allowed, and told."""


class Autocast:
    """The state of autocast when this is made.

    Args:
        types: of the devices that count.
    """

    def __init__(self, types: Iterable[str]) -> None:
        self._types = tuple(dict.fromkeys(types))
        self._states = self._now()
        self.is_on = any(is_enabled for _, is_enabled, _, _ in self._states)
        """Whether it is on for any of them."""

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the state back inside of this context."""
        with contextlib.ExitStack() as stack:
            for each, now in zip(self._states, self._now(), strict=True):
                if each != now:
                    kind, is_enabled, dtype, is_caching = each
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching
                        )
                    )
            yield

    def _now(self) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
        is_caching = torch.is_autocast_cache_enabled()
        return tuple(
            [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), is_caching)
                for kind in self._types
            ]
        )


class Surroundings:
    """Those in which a call begins.

    Args:
        devices: those that its tensors are on; a CPU counts in any case.
        with_random: note random states too.
    """

    def __init__(self, devices: Iterable[torch.device], *, with_random: bool = True) -> None:
        devices = accelerators_in(devices)
        self.autocast = Autocast(("cpu", *(device.type for device in devices)))
        self._settings = current_settings()
        self._kernels = _kernels_now()
        self._device = default_device()
        self._random = RandomState(devices) if with_random else None

    def reason_not_again(self) -> str:
        """Return why random numbers that were drawn since cannot be drawn again, or nothing."""
        random = self._random
        if random is None or not may_be_disturbed() or random.is_equal(random.now()):
            return ""
        return "it draws random numbers, from generators that other threads may draw from too"

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put them back inside of this context. Random states stay as they are left in it.

        Raises:
            RecomputationError: a mode of another package is on.
        """
        settings, kernels = current_settings(), _kernels_now()
        refuse_under(reason_of_modes())
        with made_on(self._device), self.autocast.put_back():
            try:
                apply_settings(settings, self._settings)
                _allow_kernels(kernels, self._kernels)
                if self._random is not None:
                    self._random.restore()
                yield
            finally:
                _allow_kernels(_kernels_now(), kernels)
                apply_settings(current_settings(), settings)


def _kernels_now() -> tuple[Any, ...]:
    return tuple([get() for get, _ in _KERNELS])


def _allow_kernels(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for (_, put), before, after in zip(_KERNELS, now, wanted, strict=True):
        if before != after:
            put(after)
