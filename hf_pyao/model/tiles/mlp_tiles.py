"""MLPs of a model that run in tiles of tokens: which, how, and what is said of it.

:func:`install_mlp_tiles` exchanges the methods of modules that are MLPs (see [Note: Lasting
forwards] in ``lasting_forward``) for ones that run them through ``hf_pyao.model.tiles``. What its
first batch shows not to treat each token by itself runs whole, and the reason is said.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Sequence

from torch import nn

from hf_pyao.engine.recompute.verification import TILES, SecondRuns
from hf_pyao.errors import warn
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import class_name, is_compiled_whole
from hf_pyao.model.patching.lasting_forward import exchange, give_back
from hf_pyao.model.tiles.mlp_kinds import KnownMLP, known_mlp
from hf_pyao.model.tiles.mlp_search import FoundMLP, NotFound, find_mlps, find_norms
from hf_pyao.model.tiles.spread_mlp import ActPart, DownPart, UpPart
from hf_pyao.model.tiles.tiled_mlp import KEY, Notes, Part, TiledForwards, TiledMLP, reason_now
from hf_pyao.plan.options.tile_plan import TilePlan

logger = logging.getLogger(__name__)

_MOST_REASONS = 3


def install_mlp_tiles(
    model: nn.Module,
    found: FoundLayers,
    tiles: int | str,
    second_runs: SecondRuns | None = None,
) -> MLPTiles:
    """Let the MLPs of *model*'s layers run in tiles, forward and backward, in training.

    Args:
        model: the model, wrapped or not.
        found: its layers.
        tiles: a number of tiles, or ``"auto"`` (see ``tiling.plan_tiles``).
        second_runs: says in which forwards the tiles that run again are checked; None: in none.

    Returns:
        The handle; its ``uninstall`` gives the modules their methods back.
    """
    handle = MLPTiles(class_name(model), tiles, second_runs)
    try:
        handle.install(model, found)
    except BaseException:
        handle.uninstall()
        raise
    handle.tell()
    return handle


class MLPTiles:
    """The tiled MLPs of a model; made by :func:`install_mlp_tiles`. Holds the model weakly.

    Args:
        name: of the model, for messages.
        tiles: as in :func:`install_mlp_tiles`.
        second_runs: likewise.
    """

    def __init__(self, name: str, tiles: int | str, second_runs: SecondRuns | None = None) -> None:
        self.tiles = tiles
        self._forwards = TiledForwards(second_runs or SecondRuns.unchecked(TILES))
        self._kinds: list[tuple[str, KnownMLP]] = []
        """MLPs whose methods are exchanged, by name."""
        self._kinds_of_norms: list[tuple[str, KnownMLP]] = []
        self._name = name
        self._notes = Notes(name)
        self._notes_of_norms = Notes(name)
        self._left: dict[str, list[str]] = {}
        self._exchanged: list[tuple[weakref.ref[nn.Module], str, Part]] = []

    @property
    def num_tiled(self) -> int:
        """MLPs that run in tiles."""
        return len(self._kinds) - len(self._refused())

    @property
    def num_norms_tiled(self) -> int:
        """Norms that do."""
        return sum(not self._reason_of(known) for _, known in self._kinds_of_norms)

    def _refused(self) -> list[tuple[str, str]]:
        """Return the MLPs that run whole, as their first batch has shown, and why."""
        both = [(path, self._reason_of(known)) for path, known in self._kinds]
        return [(path, reason) for path, reason in both if reason]

    def _reason_of(self, known: KnownMLP) -> str:
        for notes in (self._notes, self._notes_of_norms):
            if (verdict := notes.verdicts.get(known.kind)) is not None:
                return verdict.reason
        return ""

    def install(self, model: nn.Module, found: FoundLayers) -> None:
        """Exchange the methods of what may run in tiles. Called once."""
        is_whole = is_compiled_whole(model)
        weight_bytes = 0
        for mlp in find_mlps(found):
            if isinstance(mlp, NotFound):
                self._leave(mlp.path, mlp.reason)
                continue
            reason = "the model is compiled as a whole; compile its MLPs" if is_whole else None
            also_itself = mlp.is_spread or mlp.parts != mlp.places
            reason = reason or reason_now(mlp.parts, also_itself=also_itself, is_running=False)
            known = known_mlp(mlp) if reason is None else reason
            if isinstance(known, str):
                self._leave(mlp.path, known)
            else:
                self._put_on(mlp, known)
                self._kinds.append((mlp.path, known))
                weight_bytes = max(weight_bytes, known.weight_bytes)
        if self._kinds and not is_whole:
            self._install_norms(found, weight_bytes)

    def _install_norms(self, found: FoundLayers, weight_bytes: int) -> None:
        """Let norms run in tiles where they are written out in steps; others need it not.

        Args:
            found: the layers.
            weight_bytes: bytes of an MLP's weights, which say how large tiles are.
        """
        for norm in find_norms(found):
            if reason_now(norm.parts, also_itself=False, is_running=False) is not None:
                continue
            known = known_mlp(norm)
            if isinstance(known, KnownMLP) and known.is_wide:
                self._put_on(norm, dataclasses.replace(known, weight_bytes=weight_bytes))
                self._kinds_of_norms.append((norm.path, known))

    def set_tiles(self, tiles: int | str) -> None:
        """Cut into another number of tiles, from the next call of each MLP on.

        What answers for a module is exchanged, and not changed: a layer that runs again in
        backward finds what it had in forward (see [Note: State of modules] in
        ``rerun.module_state``).
        """
        if tiles == self.tiles:
            return
        self.tiles = tiles
        self._forwards.begin_anew()
        for number, (ref, method, part) in enumerate(list(self._exchanged)):
            module, other = ref(), part.with_tiles(tiles)
            if module is None or other is part or module.__dict__.get(KEY) is not part:
                continue
            self._exchanged.append((ref, method, other))  # first: see [Note: Lasting forwards]
            module.__dict__[KEY] = other
            self._exchanged[number] = (ref, method, other)
            self._exchanged.pop()

    def uninstall(self) -> None:
        """Give the modules their methods back. Harmless if done already, wholly or in part."""
        for ref, method, part in self._exchanged:
            if (module := ref()) is not None:
                give_back(module, KEY, part, method)

    @property
    def last_plan(self) -> TilePlan | None:
        """How the MLP that ran last in tiles was cut; None before, and where none is cut."""
        return self._notes.last_plan

    def tell(self) -> None:
        """Log what does not run in tiles; as a warning if that is all and a number was given."""
        level = logging.INFO
        if not self.num_tiled and self.tiles != "auto":
            level = logging.WARNING
        if self._left:
            warn(
                logger,
                "mlp-not-tiled",
                "MLP tiles of %s: %s.",
                self._name,
                self._described_left(),
                level=level,
            )

    def describe(self) -> str:
        """Return one line about what runs in tiles and what does not, and why."""
        total = len(self._kinds) + sum(map(len, self._left.values()))
        how = "as many tiles as keep them small" if self.tiles == "auto" else f"{self.tiles} tiles"
        parts = [f"mlp_tiles={self.tiles}: {self.num_tiled} of {total} MLPs run in {how}"]
        if self.num_norms_tiled:
            parts.append(f"so do {self.num_norms_tiled} norms")
        plan = self._notes.last_plan
        if plan is not None:
            parts.append(f"the last one {plan.num_tokens} tokens in {plan.num_tiles}")
        if self._left or self._refused():
            parts.append(self._described_left())
        parts.extend([*self._notes.said, *self._notes_of_norms.said])
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return how many MLPs run in tiles, and how the last one was cut."""
        plan: TilePlan | None = self._notes.last_plan
        return {
            "mlp_tiles_num_tiled": float(self.num_tiled),
            "mlp_tiles_num_norms_tiled": float(self.num_norms_tiled),
            "mlp_tiles_num_tiles": float(plan.num_tiles if plan else 0),
            "mlp_tiles_tile_tokens": float(plan.tile_tokens if plan else 0),
        }

    def _put_on(self, mlp: FoundMLP, known: KnownMLP) -> None:
        tiled = TiledMLP(
            known,
            self.tiles,
            mlp.path,
            self._notes_of_norms if mlp.is_norm else self._notes,
            self._forwards,
            is_compiled=mlp.is_compiled,
            part_names=mlp.part_names,
        )
        parts: Sequence[Part] = [tiled]
        if mlp.is_spread:
            acts = [ActPart() for _ in mlp.places[1:-1]]
            parts = [UpPart(tiled), *acts, DownPart()]
        for place, part in zip(mlp.places, parts, strict=True):
            if KEY not in place.__dict__ or not isinstance(part, ActPart):
                self._exchanged.append((weakref.ref(place), mlp.method, part))
                exchange(place, KEY, part, mlp.method)

    def _leave(self, path: str, reason: str) -> None:
        self._left.setdefault(reason, []).append(path)

    def _described_left(self) -> str:
        said, left = [], {reason: list(paths) for reason, paths in self._left.items()}
        for path, reason in self._refused():
            left.setdefault(reason, []).append(path)
        for reason, paths in list(left.items())[:_MOST_REASONS]:
            named = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
            said.append(f"{named} left alone: {reason}")
        rest = len(left) - _MOST_REASONS
        return "; ".join(said) + (f"; and {rest} more reasons" if rest > 0 else "")
