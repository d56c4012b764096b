"""The state of the random number generators that a forward may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class RandomState:
    """Where the generators of torch, Python and numpy are.

    Args:
        devices: those whose generators count, beside the CPU's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._torch = torch.get_rng_state()
        self._devices = [
            (device, torch.get_device_module(device).get_rng_state(device)) for device in devices
        ]
        self._python = random.getstate()
        numpy = _numpy_random()
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        numpy = _numpy_random()
        if numpy is not None and self._numpy is not None:
            numpy.set_state(self._numpy)


def _numpy_random() -> Any:
    """Return numpy's module of random numbers, if anyone has imported it."""
    return sys.modules.get("numpy.random")
