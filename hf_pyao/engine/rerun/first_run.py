"""Notes what a call found when it ran, and puts it back when the call runs again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from hf_pyao.engine.rerun.module_state import StateOfCall
from hf_pyao.engine.rerun.surroundings import Surroundings


class FirstRun:
    """What a call of a layer, or of a function in tiles, found when it began.

    Args:
        state: of modules and arguments.
        devices: those that its tensors are on.
        with_random: put random numbers back too.
    """

    def __init__(
        self,
        state: StateOfCall,
        devices: Iterable[torch.device],
        *,
        with_random: bool = True,
    ) -> None:
        self._state = state
        self._surroundings = Surroundings(devices, with_random=with_random)
        self.is_cast = self._surroundings.autocast.is_on
        """Whether autocast was on."""

    def reason_not_again(self) -> str:
        """Return why what it has changed cannot be put back, or an empty string."""
        return self._state.reason_not_again() or self._surroundings.reason_not_again()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put it back inside of this context; changes made inside do not outlast the context.

        Random numbers stay as they are left in it.

        Raises:
            RecomputationError: something of it is gone, or was changed in place.
        """
        with self._surroundings.put_back(), self._state.put_back():
            yield
