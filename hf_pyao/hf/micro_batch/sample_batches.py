"""Batches of any size from a DataLoader's samples, without taking any from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from hf_pyao.errors import ConfigError

NUM_LOOKED_AT = 64
"""Samples among which the longest is looked for."""


class SampleBatches:
    """Batches of the longest of some samples, put together as a DataLoader does.

    The loader is not iterated. What reading a sample draws of random numbers is the caller's to
    undo.

    Args:
        loader: a ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: its samples can only be iterated, which would take them from training, or
            there are none.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        is_indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
        if not is_indexed or isinstance(dataset, IterableDataset):
            raise ConfigError(
                "auto_micro_batch (--activation_offload_auto_micro_batch) looks at some of the "
                f"training samples, and a {type(dataset).__name__} can only be iterated, which "
                "would take them from training. Give a dataset with a length and indices, or "
                "choose with `pyao estimate --find`.",
                key="micro-batch-data",
            )
        num_samples = len(dataset)  # type: ignore[arg-type]
        if num_samples == 0:
            raise ConfigError(
                "auto_micro_batch (--activation_offload_auto_micro_batch) looks at some of the "
                "training samples, and the training dataset is empty.",
                key="micro-batch-data",
            )
        self.num_looked_at = min(NUM_LOOKED_AT, num_samples)
        spread = {number * num_samples // self.num_looked_at for number in range(num_samples)}
        indices = sorted(index for index in spread if index < num_samples)
        samples = [dataset[index] for index in indices]  # type: ignore[index]
        self._sample = max(samples, key=_length)
        self._collate = loader.collate_fn
        self.length = _length(self._sample)
        """Tokens of the longest, or elements of its largest part."""

    def batch(self, size: int) -> Any:
        """Return *size* samples put together; collators may change the samples that they get."""
        return self._collate([copy.deepcopy(self._sample) for _ in range(size)])


def _length(sample: Any) -> int:
    """Return the elements of the largest part of a sample."""
    parts = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((_num_elements(part) for part in parts), default=0)


def _num_elements(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.numel()
    if isinstance(part, Mapping):
        return _length(part)
    if isinstance(part, str | bytes):
        return 0
    return len(part) if isinstance(part, Sequence) or hasattr(part, "__len__") else 0
