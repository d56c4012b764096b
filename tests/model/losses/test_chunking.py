"""How tokens are cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_pyao.errors import ConfigError
from hf_pyao.model.losses.chunking import choose_chunk_tokens, plan_chunks

F32, BF16 = torch.float32, torch.bfloat16


@given(
    num_tokens=st.integers(0, 5000),
    max_chunk_tokens=st.integers(1, 1500),
)
def test_chunks_cover_every_token_once_and_none_is_too_large(
    num_tokens: int, max_chunk_tokens: int
) -> None:
    plan = plan_chunks(num_tokens, 100, 8, F32, (), max_chunk_tokens)
    covered = [token for start, stop in plan.slices() for token in range(start, stop)]
    assert covered == list(range(num_tokens))
    assert plan.num_chunks == len(list(plan.slices()))
    assert all(0 < stop - start <= max_chunk_tokens for start, stop in plan.slices())
    # Evening out the chunks costs no extra one.
    assert plan.num_chunks <= -(-num_tokens // max_chunk_tokens)


@pytest.mark.parametrize(
    ("num_vocab", "budget_mib", "expected"),
    [(50_257, 512, 1280), (128_256, 512, 512), (128_256, 64, 256), (4_096, 64, 1984)],
)
def test_chunk_tokens_fill_the_budget(num_vocab: int, budget_mib: int, expected: int) -> None:
    tokens = choose_chunk_tokens(num_vocab, 1, F32, budget_mib * 2**20)
    assert tokens % 64 == 0
    bytes_per_token = num_vocab * 8 + 2 * 8
    fits = tokens * bytes_per_token <= budget_mib * 2**20
    assert fits or tokens == 256
    assert (tokens + 64) * bytes_per_token > budget_mib * 2**20
    assert tokens == expected


def test_a_budget_of_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="positive number of bytes"):
        choose_chunk_tokens(10, 10, F32, 0)
