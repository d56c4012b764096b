"""The storages of a model's buffers, which never move."""

from __future__ import annotations

from torch import nn

from hf_pyao.transfer.layout import reason_not_movable


class BufferKeys:
    """Finds the storages of a model's buffers; asked anew for each micro-batch.

    Modules exchange their buffers (rotary tables grow), so that the modules' dictionaries are kept
    and not what is in them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [module._buffers for module in model.modules()]

    def __call__(self) -> frozenset[int]:
        """Return the storage keys of all plain buffers."""
        return frozenset(
            buffer.untyped_storage()._cdata
            for buffers in self._buffers
            if buffers
            for buffer in buffers.values()
            if buffer is not None and reason_not_movable(buffer) is None
        )
