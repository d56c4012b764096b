"""Changes what levers do on an attached model between forwards, as plans want it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from hf_pyao.engine.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.levers import Levers

if TYPE_CHECKING:
    from hf_pyao.model.attention.attention_groups import AttentionGroups
    from hf_pyao.model.tiles.mlp_tiles import MLPTiles


class LeverSwitch:
    """Knows with which levers a model runs, and sets others. It holds neither hooks nor model.

    Args:
        levers: as configured.
    """

    def __init__(self, levers: Levers) -> None:
        self.configured = levers
        self._wanted = levers
        self._refused = ""
        self._lifecycle: weakref.ref[Lifecycle] | None = None
        self._tiles: weakref.ref[MLPTiles] | None = None
        self._groups: weakref.ref[AttentionGroups] | None = None

    @property
    def levers(self) -> Levers:
        """Those of the next forward.

        Segments are those that the lifecycle makes, which gives way to the checkpointing of others.
        """
        lifecycle = self._segments()
        if lifecycle is None:
            return self._wanted
        return dataclasses.replace(
            self._wanted,
            checkpoint_every=lifecycle.length,
            checkpoint_nested=lifecycle.is_nested,
            save_attention=lifecycle.saves_attention,
        )

    @property
    def refused(self) -> str:
        """Why a layer did not run again, where it should have; empty if none was refused."""
        lifecycle = self._segments()
        return self._refused or ("" if lifecycle is None else lifecycle.refused)

    @property
    def run_once(self) -> str:
        """Say how many layers run once where they should run again, and why; empty if none do."""
        lifecycle = self._segments()
        reasons = [] if lifecycle is None else list(lifecycle.run_once)
        if not reasons:
            return ""
        why = "; ".join(sorted(set(reasons)))
        return f" ({len(reasons)} of them run once: {why})"

    def refuse_segments(self, reason: str) -> None:
        """Set :attr:`refused`: layers do not run again from now on, for *reason*."""
        self._refused = reason

    def _segments(self) -> SegmentLifecycle | None:
        lifecycle = None if self._lifecycle is None else self._lifecycle()
        return lifecycle if isinstance(lifecycle, SegmentLifecycle) else None

    def bind(
        self,
        lifecycle: Lifecycle,
        tiles: MLPTiles | None,
        groups: AttentionGroups | None = None,
    ) -> None:
        """Apply the levers to these parts, now and after each change."""
        self._lifecycle = weakref.ref(lifecycle)
        self._groups = None if groups is None else weakref.ref(groups)
        self._tiles = None if tiles is None else weakref.ref(tiles)
        self.set(self._wanted)

    def set(self, levers: Levers) -> None:
        """Run the next forward with *levers*; the head loss stays as it is."""
        self._wanted = levers
        lifecycle = self._segments()
        if lifecycle is not None:
            now = lifecycle.length, lifecycle.is_nested, lifecycle.saves_attention
            length, is_nested = levers.checkpoint_every, levers.checkpoint_nested
            if now != (length, is_nested, levers.save_attention):
                lifecycle.set_segments(
                    length, is_nested=is_nested, saves_attention=levers.save_attention
                )
        tiles = None if self._tiles is None else self._tiles()
        if tiles is not None:
            tiles.set_tiles(levers.mlp_tiles)
        groups = None if self._groups is None else self._groups()
        if groups is not None:
            groups.set_groups(levers.attention_groups)
