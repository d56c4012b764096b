"""How many tokens go through the head at once, and what that costs in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_pyao.errors import ConfigError
from hf_pyao.model.losses.transforms import LogitTransform, bytes_per_logit
from hf_pyao.plan.hardware.device_limit import allocator_cap_bytes
from hf_pyao.plan.step.loops import even_rows, slices_of

MIB = 2**20

TOKEN_MULTIPLE = 64
"""Chunks are multiples of this: tiles of the matrix kernels stay full."""

MIN_CHUNK_TOKENS = 256
"""Fewer tokens than this leave the matrix products starved: every chunk reads the whole head, and
reads and writes its whole gradient, so that arithmetic per byte moved is in proportion to it."""

MIN_BUDGET_BYTES = 256 * MIB
MAX_BUDGET_BYTES = 2048 * MIB


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """How a batch of tokens is cut, and the bytes that live only while the loss is computed."""

    num_tokens: int
    """Tokens in the batch, ignored ones included."""
    chunk_tokens: int
    """Tokens in every chunk but the last, which may have fewer."""
    chunk_bytes: int
    """Bytes of one chunk's buffers: everything that is tokens x vocabulary."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 for an empty batch."""
        return -(-self.num_tokens // self.chunk_tokens)

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` for each chunk."""
        return slices_of(self.num_tokens, self.chunk_tokens)


def default_budget_bytes(device: torch.device) -> int:
    """Return the bytes that one chunk may take: 1/24 of the device's memory, 256 MiB to 2 GiB.

    512 MiB on a card of 12 GiB and on a CPU. Of a device that the process may use in part
    (``torch.cuda.set_per_process_memory_fraction``) that part counts.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return max(MIN_BUDGET_BYTES, min(allocator_cap_bytes(device) // 24, MAX_BUDGET_BYTES))
    return 512 * MIB


def choose_chunk_tokens(
    num_vocab: int,
    num_hidden: int,
    dtype: torch.dtype,
    budget_bytes: int,
    transforms: Sequence[LogitTransform] = (),
) -> int:
    """Return the largest chunk, in tokens, whose buffers fit *budget_bytes*.

    A multiple of 64, and 256 at least even where that exceeds the budget: smaller chunks spend
    their time reading the head's weight and updating its gradient.

    Args:
        num_vocab: columns of the logits.
        num_hidden: columns of the hidden states.
        dtype: what the head computes in.
        budget_bytes: bytes that one chunk may take.
        transforms: what happens to the logits before the loss.

    Raises:
        ConfigError: *budget_bytes* is not positive.
    """
    if budget_bytes <= 0:
        raise ConfigError(
            f"the chunk budget is {budget_bytes} bytes; expected a positive number of bytes, "
            f"such as {512 * MIB} (512 MiB).",
            key="wrong-argument",
        )
    per_token = token_bytes(num_vocab, num_hidden, dtype, transforms)
    fitting = budget_bytes // per_token // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    return max(MIN_CHUNK_TOKENS, fitting)


def token_bytes(
    num_vocab: int, num_hidden: int, dtype: torch.dtype, transforms: Sequence[LogitTransform]
) -> int:
    """Return the bytes of a chunk's buffers per token: its logits, and its rows of hidden states.

    Four rows: the hidden states cast to what the head computes in and widened for the product with
    the gradient of the logits, their gradient, and that gradient widened.
    """
    wide = torch.promote_types(dtype, torch.float32)
    row_bytes = 2 * num_hidden * (dtype.itemsize + wide.itemsize)
    return num_vocab * bytes_per_logit(transforms, dtype) + row_bytes


def plan_chunks(
    num_tokens: int,
    num_vocab: int,
    num_hidden: int,
    dtype: torch.dtype,
    transforms: Sequence[LogitTransform],
    max_chunk_tokens: int,
) -> ChunkPlan:
    """Cut *num_tokens* into chunks of nearly equal size, none above *max_chunk_tokens*.

    Equal chunks, because a short last one costs a full pass over the head and its gradient.
    """
    chunk_tokens = even_rows(num_tokens, max_chunk_tokens, TOKEN_MULTIPLE)
    chunk_bytes = chunk_tokens * token_bytes(num_vocab, num_hidden, dtype, transforms)
    return ChunkPlan(
        num_tokens=num_tokens,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
    )
