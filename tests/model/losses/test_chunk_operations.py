"""Which operations one chunk takes: none casts logits or a weight for a product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.model.fake_cuda.cuda_choices import choices_of_cuda
from hf_pyao.model.fake_cuda.cuda_operations import can_trace_wide_products, operations_of_cuda
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.transforms import Cast

NUM_VOCAB, HIDDEN, CHUNK = 704, 24, 64


class LargeOperations(TorchDispatchMode):
    """Counts operations with a tensor of tokens x vocabulary or of the weight's size."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        large = (CHUNK * NUM_VOCAB, NUM_VOCAB * HIDDEN)
        if isinstance(result, Tensor) and result.numel() in large and not func.is_view:
            self.counts[func._overloadpacket.__name__] += 1
        return result


def per_chunk(dtype: torch.dtype) -> Counter[str]:
    """Return the large operations of one chunk: what three chunks take more than two."""
    found = []
    for num_chunks in (2, 3):
        hidden = torch.randn(num_chunks * CHUNK, HIDDEN, dtype=dtype, requires_grad=True)
        weight = torch.randn(NUM_VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
        labels = torch.zeros(num_chunks * CHUNK, dtype=torch.int64)
        with LargeOperations() as operations:
            steps = (Cast(torch.float32),)
            chunked_linear_cross_entropy(
                hidden, weight, labels, transforms=steps, chunk_tokens=CHUNK
            )
        found.append(operations.counts)
    found[1].subtract(found[0])
    return +found[1]


def test_in_float32_nothing_is_copied() -> None:
    counts = per_chunk(torch.float32)
    assert counts.pop("mm") == 1, "the projection; hidden states have a gradient of another size"
    assert not {name for name in counts if "copy" in name or name == "clone"}, counts
    assert sum(counts.values()) <= 6, counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_cast_once_each_way_and_for_no_product(dtype: torch.dtype) -> None:
    """The model's own cast of its logits, and its gradient; products take the halves."""
    with FakeTensorMode():
        if not can_trace_wide_products():
            pytest.skip("this torch cannot trace products with sums in float32")
        with operations_of_cuda(*choices_of_cuda()):
            counts = per_chunk(dtype)
    assert counts["_to_copy"] == 2, counts
    assert counts["mm"] == 1 and not counts["copy_"] and not counts["clone"], counts
