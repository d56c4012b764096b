"""How many tiles the tokens of one call are cut into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_pyao.plan.step.loops import slices_of

MIB = 2**20

TOKEN_MULTIPLE = 64
"""Large tiles are multiples of this: the matrix kernels' own tiles stay full."""

MIN_TILE_TOKENS = 1024
"""Fewer tokens than this leave the matrix products starved. Each tile reads all of the weights, and
reads and writes the sums of their gradients, so that arithmetic per byte moved is in proportion to
its tokens: 2 operations a token against 2 to 10 bytes, for each weight. Accelerators do 300 to 600
operations in the time of a byte."""

MIN_TARGET_BYTES = 64 * MIB
"""A tile's tensors need be no smaller than this: less memory than that is not worth a launch."""


@dataclass(frozen=True)
class TilePlan:
    """How the tokens of one call are cut."""

    num_tokens: int
    """Tokens of the call."""
    tile_tokens: int
    """Tokens in every tile but the last, which may have fewer."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles; 0 without tokens."""
        return -(-self.num_tokens // self.tile_tokens)

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` for each tile."""
        return slices_of(self.num_tokens, self.tile_tokens)


def plan_tiles(num_tokens: int, tiles: int | str, token_bytes: int, weight_bytes: int) -> TilePlan:
    """Cut *num_tokens* into *tiles* nearly equal tiles; one tile means that nothing is cut.

    Follows from its arguments alone, so that ranks and recordings agree.

    Args:
        num_tokens: tokens of the call.
        tiles: a number of tiles, or ``"auto"``: a tile's tensors are about as large as the weights,
            or 64 MiB where these are smaller, and a tile has 1,024 tokens at least.
        token_bytes: bytes that a token takes inside, forward and backward, at the peak.
        weight_bytes: bytes of the weights.
    """
    if isinstance(tiles, int):
        return TilePlan(num_tokens, _even(num_tokens, max(1, min(tiles, num_tokens))))
    target_bytes = max(MIN_TARGET_BYTES, weight_bytes)
    most = max(MIN_TILE_TOKENS, target_bytes // max(token_bytes, 1))
    return TilePlan(num_tokens, _even(num_tokens, max(1, -(-num_tokens // most))))


def _even(num_tokens: int, num_tiles: int) -> int:
    """Return the tokens of a tile: as many in each, rounded up where that is 5 % at most."""
    tokens = max(1, -(-num_tokens // num_tiles))
    if tokens >= 20 * TOKEN_MULTIPLE and num_tiles > 1:
        return -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    return tokens
