"""How many tiles."""

from __future__ import annotations

import pytest

from hf_pyao.plan.options.tile_plan import MIB, MIN_TILE_TOKENS, TilePlan, plan_tiles


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 100, 4097, 123_457])
@pytest.mark.parametrize("tiles", [1, 2, 8, 100])
def test_tiles_cover_all_tokens_once(num_tokens: int, tiles: int) -> None:
    plan = plan_tiles(num_tokens, tiles, 0, 0)
    slices = list(plan.slices())
    assert [i for start, stop in slices for i in (start, stop)] == sorted(
        i for start, stop in slices for i in (start, stop)
    )
    assert sum(stop - start for start, stop in slices) == num_tokens
    assert len(slices) == plan.num_tiles <= tiles
    largest = max((stop - start for start, stop in slices), default=0)
    assert largest <= 1.05 * num_tokens / min(tiles, max(num_tokens, 1)) + 1


def test_few_tokens_are_not_cut() -> None:
    assert plan_tiles(MIN_TILE_TOKENS, "auto", 10**9, 0).num_tiles == 1
    assert plan_tiles(512, "auto", 200_000, 350 * MIB).num_tiles == 1


def test_a_tile_is_about_as_large_as_the_weights() -> None:
    """Llama-8B: 352 MiB of weights, 180 KB a token."""
    plan = plan_tiles(131_072, "auto", 180_000, 336 * MIB)
    assert 0.8 * 336 * MIB < plan.tile_tokens * 180_000 <= 1.05 * 336 * MIB
    assert plan.tile_tokens % 64 == 0


def test_small_weights_do_not_make_small_tiles() -> None:
    """As in a layer of many small experts."""
    plan = plan_tiles(65_536, "auto", 20_000, 2 * MIB)
    assert plan.tile_tokens * 20_000 > 0.9 * 64 * MIB
    assert plan_tiles(65_536, "auto", 10**8, 0).tile_tokens >= MIN_TILE_TOKENS


def test_an_empty_call_has_no_tiles() -> None:
    assert TilePlan(0, 1).num_tiles == 0
