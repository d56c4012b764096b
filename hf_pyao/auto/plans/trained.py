"""Which of a model's parameters are trained. What autograd saves, and so the plan, depends on it.

Layers may be frozen and thawed in the middle of a run, one after the other or in turns. Before each
forward one parameter in eight is looked at, which takes some microseconds for 400 parameters. That
is enough to see a layer frozen at once, since a layer has more than eight parameters.
"""

from __future__ import annotations

import weakref
import zlib
from operator import attrgetter

from torch import nn

STRIDE = 8
"""Every how many parameters one is looked at: each is, once in so many times."""

_requires_grad = attrgetter("requires_grad")


class TrainedParameters:
    """Tells which parameters of a model are trained.

    It holds the parameters, so whoever holds it must go with the model.

    Args:
        model: what is trained; it is not held itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._parts: list[tuple[list[nn.Parameter], bytes]] = []
        self._next = 0
        self.flags = b""
        """A byte for each parameter, in the model's order, as it was when all were looked at."""
        self.look_again()

    @property
    def mark(self) -> int:
        """A number that differs where other parameters are trained, for a plan to hold."""
        return mark_of(self.flags)

    def have_changed(self) -> bool:
        """Say whether others are trained than when all were looked at.

        A run of :data:`STRIDE` parameters that were frozen or thawed is seen at once, a single one
        in as many calls. Parameters that came since, or are gone, are not seen by themselves:
        whoever adds adapters freezes others.
        """
        parameters, flags = self._parts[self._next]
        self._next = (self._next + 1) % STRIDE
        return bytes(map(_requires_grad, parameters)) != flags

    def look_again(self) -> None:
        """Look at all parameters, those that came since included."""
        model = self._model()
        parameters = [] if model is None else list(model.parameters())
        self.flags = bytes(map(_requires_grad, parameters))
        self._parts = [(parameters[n::STRIDE], self.flags[n::STRIDE]) for n in range(STRIDE)]


def mark_of(flags: bytes) -> int:
    """Return the number by which a plan tells for which parameters it was made."""
    return zlib.crc32(flags)
