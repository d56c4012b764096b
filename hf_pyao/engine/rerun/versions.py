"""How often tensors were changed in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

_VERSION = operator.attrgetter("_version")


def version_of(tensor: Tensor) -> int:
    """Return how often *tensor* was changed in place; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each of *tensors* was changed in place."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors of inference have none
        return list(map(version_of, tensors))
