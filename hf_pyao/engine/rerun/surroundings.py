"""Notes what an operation's result depends on beside its inputs, and puts it back for a second run.

Autocast, settings of torch, the default device, random states.
Modes and hooks on all modules are not put back: see ``modes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from hf_pyao.engine.rerun.generators import RandomState, accelerators_in, may_be_disturbed
from hf_pyao.engine.rerun.modes import reason_of_modes, refuse_under
from hf_pyao.engine.rerun.settings import apply_settings, current_settings

Autocast = tuple[str, bool, torch.dtype, bool]
"""Of a type of devices whether it is on, its dtype, and whether casts are kept."""


class Surroundings:
    """Those in which a call begins.

    Args:
        devices: those that its tensors are on; a CPU counts in any case.
        with_random: note random states too.
    """

    def __init__(self, devices: Iterable[torch.device], *, with_random: bool = True) -> None:
        devices = accelerators_in(devices)
        self._autocast = _autocast_of(("cpu", *dict.fromkeys(device.type for device in devices)))
        self.is_cast = any(is_on for _, is_on, _, _ in self._autocast)
        """Whether autocast is on for any of them."""
        self._settings = current_settings()
        self._device = torch.get_default_device()
        self._random = RandomState(devices) if with_random else None

    def reason_not_again(self) -> str:
        """Return why random numbers that were drawn since cannot be drawn again, or nothing."""
        random = self._random
        if random is None or not may_be_disturbed() or random.is_equal(random.now()):
            return ""
        return "it draws random numbers, from generators that other threads may draw from too"

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put them back inside of this context.

        Raises:
            RecomputationError: a mode of another package is on.
        """
        settings = current_settings()
        refuse_under(reason_of_modes())
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            now = _autocast_of(each[0] for each in self._autocast)
            for kind, is_on, dtype, keeps in (each for each in self._autocast if each not in now):
                autocast = torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=keeps)
                stack.enter_context(autocast)
            if self._random is not None:
                stack.enter_context(self._random.now().kept())
                self._random.restore()
            try:
                apply_settings(settings, self._settings)
                yield
            finally:
                apply_settings(current_settings(), settings)


def _autocast_of(kinds: Iterable[str]) -> list[Autocast]:
    keeps = torch.is_autocast_cache_enabled()
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), keeps) for k in kinds]
