"""The storages of a model's buffers, which never move."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_pyao.engine.transfer.layout import reason_not_movable


class BufferKeys:
    """Finds the storages of a model's buffers; asked anew for each micro-batch.

    Modules exchange their buffers (rotary tables grow), so that the modules' dictionaries are kept
    and not what is in them. What is returned holds the storages: one that a forward lets go of must
    not give its key to a tensor that is saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [module._buffers for module in model.modules()]

    def __call__(self) -> Mapping[int, torch.UntypedStorage]:
        """Return the storages of all plain buffers by their keys."""
        storages = (
            buffer.untyped_storage()
            for buffers in self._buffers
            if buffers
            for buffer in buffers.values()
            if buffer is not None and reason_not_movable(buffer) is None
        )
        return {storage._cdata: storage for storage in storages}
