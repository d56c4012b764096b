"""How many rows of logits exist at once, by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class VocabularyRows(TorchDispatchMode):
    """While active, looks for new tensors as wide as the vocabulary.

    Args:
        num_vocab: a width that no other tensor of the model has.
    """

    only_watches = True

    def __init__(self, num_vocab: int) -> None:
        super().__init__()
        self._num_vocab = num_vocab
        self.most = 0
        """Most rows of a tensor that an operation has made."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and look at what it makes."""
        given = {storage_of(each) for each in tree_leaves((args, kwargs)) if is_plain(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if is_plain(each) and each.shape[-1:] == (self._num_vocab,):
                if storage_of(each) not in given:
                    self.most = max(self.most, each.numel() // self._num_vocab)
        return result


def is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
