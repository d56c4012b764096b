"""Changes segments and tiles of an attached model between forwards, as plans want them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hf_pyao.levers import Levers
from hf_pyao.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.runtime.lifecycle import Lifecycle

if TYPE_CHECKING:
    from hf_pyao.integrations.mlp_tiles import MLPTiles


class LeverSwitch:
    """Knows with which levers a model runs, and sets others. It holds neither hooks nor model.

    Args:
        levers: as configured.
    """

    def __init__(self, levers: Levers) -> None:
        self.configured = levers
        self.levers = levers
        """Those of the next forward."""
        self._lifecycle: weakref.ref[Lifecycle] | None = None
        self._tiles: weakref.ref[MLPTiles] | None = None

    def bind(self, lifecycle: Lifecycle, tiles: MLPTiles | None) -> None:
        """Have *lifecycle* and *tiles* do what :attr:`levers` say, now and after each change."""
        self._lifecycle = weakref.ref(lifecycle)
        self._tiles = None if tiles is None else weakref.ref(tiles)
        self.set(self.levers)

    def set(self, levers: Levers) -> None:
        """Have the next forward run with *levers*; the head loss stays as it is."""
        self.levers = levers
        lifecycle = None if self._lifecycle is None else self._lifecycle()
        if isinstance(lifecycle, SegmentLifecycle):
            now = lifecycle.length, lifecycle.is_nested, lifecycle.saves_attention
            length, is_nested = levers.checkpoint_every, levers.checkpoint_nested
            if now != (length, is_nested, levers.save_attention):
                lifecycle.set_segments(
                    length, is_nested=is_nested, saves_attention=levers.save_attention
                )
        tiles = None if self._tiles is None else self._tiles()
        if tiles is not None:
            tiles.set_tiles(levers.mlp_tiles)
