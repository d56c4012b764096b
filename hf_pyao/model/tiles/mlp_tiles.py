"""MLPs of a model that run in tiles of tokens: which, how, and what is said of it.

:class:`MLPTiles` exchanges the forwards of modules that are MLPs (see [Note: Lasting forwards] in
``lasting_forward``) for ones that run them in tiles, forward and backward, in training. What its
first batch shows not to treat each token by itself runs whole, and the reason is said.
"""

from __future__ import annotations

import logging

from torch import nn

from hf_pyao.engine.recompute.verification import TILES, SecondRuns
from hf_pyao.errors import warn
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import is_compiled_whole
from hf_pyao.model.patching.lasting_forward import Exchanged
from hf_pyao.model.tiles.mlp_search import FoundMLP, find_mlps, find_norms
from hf_pyao.model.tiles.spread_mlp import SpreadPart
from hf_pyao.model.tiles.tiled_mlp import Notes, Part, TiledMLP, reason_now
from hf_pyao.plan.options.tile_plan import TilePlan

logger = logging.getLogger(__name__)

KEY = "_pyao_mlp_tiles"

_MOST_REASONS = 3


class MLPTiles:
    """The tiled MLPs of a model. Holds it weakly.

    Args:
        name: of the model, for messages.
        tiles: a number of tiles, or ``"auto"`` (see ``plan_tiles``).
        second_runs: says in which forwards the tiles that run again are checked; None: in none.
    """

    def __init__(self, name: str, tiles: int | str, second_runs: SecondRuns | None = None) -> None:
        self.tiles = tiles
        self._name = name
        self._notes = Notes(name, second_runs or SecondRuns.unchecked(TILES))
        self._mlps: list[str] = []
        """Those whose forwards are exchanged."""
        self._norms: list[str] = []
        self._left: list[tuple[str, str]] = []
        """Names of others, and why they run whole."""
        self._exchanged: Exchanged[Part] = Exchanged(KEY)

    def install(self, model: nn.Module, found: FoundLayers) -> None:
        """Exchange the forwards of what may run in tiles. Called once.

        If it raises, :meth:`uninstall` takes back what was exchanged.

        Args:
            model: the model, wrapped or not.
            found: its layers.
        """
        is_whole, most_bytes = is_compiled_whole(model), 0
        for mlp in find_mlps(found):
            reason = mlp.reason or _reason_of(mlp)
            if is_whole and not mlp.reason:
                reason = "the model is compiled as a whole; compile its MLPs"
            if reason:
                self._left.append((mlp.path, reason))
            else:
                most_bytes = max(most_bytes, mlp.weight_bytes)
                self._mlps.append(mlp.path)
                self._put_on(mlp, mlp.weight_bytes)
        for norm in find_norms(found) if self._mlps else ():  # others need it not
            if not _reason_of(norm):
                self._norms.append(norm.path)
                self._put_on(norm, most_bytes)
        self._tell()

    def _put_on(self, mlp: FoundMLP, weight_bytes: int) -> None:
        tiled = TiledMLP(mlp, self.tiles, weight_bytes, self._notes)
        last = len(mlp.places) - 1
        for at, place in enumerate(mlp.places):
            part = SpreadPart(tiled, is_first=at == 0, is_last=at == last) if last else tiled
            if KEY not in place.__dict__ or at in (0, last):  # layers may share an activation
                self._exchanged.put(place, part)

    def set_tiles(self, tiles: int | str) -> None:
        """Cut into another number of tiles, from the next call of each MLP on.

        What answers for a module is exchanged, and not changed: a layer that runs again in
        backward finds what it had in forward (see [Note: State of modules] in
        ``rerun.module_state``).
        """
        if tiles != self.tiles:
            self.tiles = tiles
            self._notes.second_runs.begin_anew()  # the tiles are others from now on
            self._exchanged.replace(lambda part: part.with_tiles(tiles))

    def uninstall(self) -> None:
        """Give the modules their methods back. Harmless if done already, wholly or in part."""
        self._exchanged.take_back()

    @property
    def last_plan(self) -> TilePlan | None:
        """How the MLP that ran last in tiles was cut; None before, and where none is cut."""
        return self._notes.last_plan

    @property
    def num_tiled(self) -> int:
        """MLPs that run in tiles."""
        return sum(not self._notes.known_of(path).reason for path in self._mlps)

    @property
    def num_norms_tiled(self) -> int:
        """Norms that do, as far as they have run: those that are written out in steps."""
        known = map(self._notes.known_of, self._norms)
        return sum(each.is_wide and not each.reason for each in known)

    def _tell(self) -> None:
        """Log what does not run in tiles; as a warning if that is all and a number was given."""
        is_asked_for = not self.num_tiled and self.tiles != "auto"
        level = logging.WARNING if is_asked_for else logging.INFO
        if left := self._described_left():
            warn(logger, "mlp-not-tiled", "MLP tiles of %s: %s.", self._name, left, level=level)

    def describe(self) -> str:
        """Return one line about what runs in tiles and what does not, and why."""
        total = len(self._mlps) + len(self._left)
        how = "as many tiles as keep them small" if self.tiles == "auto" else f"{self.tiles} tiles"
        parts = [f"mlp_tiles={self.tiles}: {self.num_tiled} of {total} MLPs run in {how}"]
        if self.num_norms_tiled:
            parts.append(f"so do {self.num_norms_tiled} norms")
        if (plan := self.last_plan) is not None:
            parts.append(f"the last one {plan.num_tokens} tokens in {plan.num_tiles}")
        return "; ".join([*parts, *filter(None, [self._described_left()]), *self._notes.said])

    def metrics(self) -> dict[str, float]:
        """Return how many MLPs run in tiles, and how the last one was cut."""
        plan = self.last_plan
        return {
            "mlp_tiles_num_tiled": float(self.num_tiled),
            "mlp_tiles_num_norms_tiled": float(self.num_norms_tiled),
            "mlp_tiles_num_tiles": float(plan.num_tiles if plan else 0),
            "mlp_tiles_tile_tokens": float(plan.tile_tokens if plan else 0),
        }

    def _described_left(self) -> str:
        """Say which MLPs run whole, from the start or since their first batch, and why."""
        both = [(path, self._notes.known_of(path).reason) for path in self._mlps]
        left: dict[str, list[str]] = {}
        for path, reason in (*self._left, *both):
            left.setdefault(reason, []).append(path)
        left.pop("", None)
        said = [
            f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''} left alone: {reason}"
            for reason, paths in list(left.items())[:_MOST_REASONS]
        ]
        rest = len(left) - _MOST_REASONS
        return "; ".join([*said, f"and {rest} more reasons"] if rest > 0 else said)


def _reason_of(mlp: FoundMLP) -> str:
    """Return why *mlp* cannot run in tiles, whatever its first batch shows; or nothing."""
    reason = reason_now(mlp.places, is_spread=len(mlp.places) > 1, is_running=False)
    return reason or ("" if mlp.weight_bytes else "its weights are not known")
