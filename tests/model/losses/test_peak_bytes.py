"""Bytes of head and loss, counted by the allocator: no term is tokens x vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_pyao.model import gradient_buffer
from hf_pyao.model.losses.chunking import plan_chunks
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.transforms import Cast, LogitTransform, softcap
from tests.helpers.ledger import AllocationLedger

HIDDEN = 16
CHUNK = 64
UPCAST: tuple[LogitTransform, ...] = (Cast(torch.float32),)
BYTES_PER_TOKEN = 64
"""Labels, masks, weights and losses: a dozen vectors of one number per token."""


def stated_bound(
    num_tokens: int, num_vocab: int, dtype: torch.dtype, steps: tuple[LogitTransform, ...]
) -> int:
    """The bound of HEAD_LOSS.md for one loss, forward and backward."""
    plan = plan_chunks(num_tokens, num_vocab, HIDDEN, dtype, steps, CHUNK)
    gradients = 4 * HIDDEN * (num_vocab + num_tokens)
    return plan.chunk_bytes + gradients + BYTES_PER_TOKEN * num_tokens + 16 * num_vocab


def peak(
    num_tokens: int, num_vocab: int, dtype: torch.dtype, steps: tuple[LogitTransform, ...] = UPCAST,
    *, own: bool = False, autocast: bool = False,
) -> int:  # fmt: skip
    """Peak bytes of one loss and its backward."""
    hidden = torch.randn(num_tokens, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(num_vocab, HIDDEN, dtype=dtype))
    labels = torch.randint(0, num_vocab, (num_tokens,))
    with AllocationLedger() as ledger:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if own:
                loss = F.cross_entropy(F.linear(hidden, weight).float(), labels)
            else:
                loss = chunked_linear_cross_entropy(
                    hidden, weight, labels, transforms=steps, chunk_tokens=CHUNK
                )
        loss.backward()
    return ledger.peak_bytes


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buffer, "_BLOCK_ELEMENTS", 512)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [UPCAST, (*softcap(5.0), *UPCAST)], ids=["plain", "cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_peak_stays_below_the_stated_bound(
    dtype: torch.dtype, steps: tuple[LogitTransform, ...]
) -> None:
    for num_tokens, num_vocab in ((64, 1000), (512, 1000), (512, 4000), (2048, 1000)):
        measured = peak(num_tokens, num_vocab, dtype, steps)
        assert measured <= stated_bound(num_tokens, num_vocab, dtype, steps)


def test_autocast_adds_one_cast_weight() -> None:
    num_tokens, num_vocab = 512, 2000
    bound = stated_bound(num_tokens, num_vocab, torch.bfloat16, UPCAST)
    measured = peak(num_tokens, num_vocab, torch.float32, autocast=True)
    assert measured <= bound + 2 * HIDDEN * num_vocab


def test_head_gradient_is_handed_over_without_a_copy() -> None:
    weight = torch.nn.Parameter(torch.randn(4000, HIDDEN))
    hidden, labels = torch.randn(64, HIDDEN), torch.randint(0, 4000, (64,))
    with AllocationLedger() as ledger:
        loss = chunked_linear_cross_entropy(hidden, weight, labels, chunk_tokens=8)
        loss.backward()
    gradient_bytes = 4000 * HIDDEN * 4
    assert ledger.peak_bytes < 1.5 * gradient_bytes + 8 * 4000 * 8
    assert ledger.live_bytes - gradient_bytes < 4096
