"""Inputs of a micro-batch that may be run several times."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hf_pyao.auto.retry.out_of_memory import OutOfDeviceMemoryError
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in


class RepeatableInputs:
    """Gives the same inputs to each try, even if a try removes entries from them.

    Args:
        inputs: a batch, mostly a mapping of names to tensors.
    """

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs
        values = dict(inputs) if isinstance(inputs, Mapping) else inputs
        self._versions = [(tensor, tensor._version) for tensor in tensors_in(values)]

    def __call__(self) -> Any:
        """Return the inputs, in a mapping of their own.

        Raises:
            OutOfDeviceMemoryError: a try has changed them in place, so that there is no other.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise OutOfDeviceMemoryError(
                "a micro-batch did not fit into device memory, and cannot run again: it changed "
                "its inputs in place. Have the model change a copy of them.",
                key="out-of-memory-not-repeatable",
            )
        return copy.copy(self._inputs) if isinstance(self._inputs, Mapping) else self._inputs
