"""``InstalledParts``: what is put on one model, and taken off again in the right order."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.engine.recompute.verification import SecondRuns
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.levers import Levers
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import class_name

if TYPE_CHECKING:
    from hf_pyao.model.attention.attention_groups import AttentionGroups
    from hf_pyao.model.head.head_loss import HeadLoss
    from hf_pyao.model.tiles.mlp_tiles import MLPTiles


class InstalledParts:
    """The lifecycle with its hooks, head loss, tiles and groups of one model."""

    def __init__(self) -> None:
        self.head_loss: HeadLoss | None = None
        self.mlp_tiles: MLPTiles | None = None
        self.attention_groups: AttentionGroups | None = None
        self.weights: StreamedLayers | None = None
        self._lifecycle: weakref.ref[Lifecycle] | None = None

    @property
    def lifecycle(self) -> Lifecycle | None:
        """Drives the engine; None once it is taken off, or once the model is gone."""
        return None if self._lifecycle is None else self._lifecycle()

    @property
    def is_on(self) -> bool:
        """True from :meth:`put_on` until :meth:`take_off` has ended."""
        return self._lifecycle is not None

    def put_on(
        self,
        model: nn.Module,
        found: FoundLayers,
        lifecycle: Lifecycle,
        levers: Levers,
        *,
        second_runs: SecondRuns | None = None,
        may_come: frozenset[str] = frozenset(),
        streaming: StreamedLayers | None = None,
    ) -> None:
        """Exchange the forwards that *levers* ask for. The caller installs *lifecycle* afterwards.

        If it raises, :meth:`take_off` removes what was put on so far.

        Args:
            model: what is attached.
            found: its layers.
            lifecycle: held weakly, since the model's hooks own it.
            levers: head loss, tiles and groups that are asked for.
            second_runs: compares tiles that run again with their first run.
            may_come: levers that plans of policy ``auto`` may set later.
            streaming: streams the frozen weights; None: all are on the device.

        Raises:
            ConfigError: the model has no head, MLP or attention that can be exchanged.
        """
        self._lifecycle = weakref.ref(lifecycle)
        if levers.head_loss != "off":
            from hf_pyao.model.head.head_loss import install_head_loss  # imports transformers

            self.head_loss = install_head_loss(model, levers.head_loss)
        if levers.mlp_tiles != "off":
            from hf_pyao.model.tiles.mlp_tiles import MLPTiles

            self.mlp_tiles = MLPTiles(class_name(model), levers.mlp_tiles, second_runs)
            self.mlp_tiles.install(model, found)
        if levers.attention_groups != "off" or "attention_groups" in may_come:
            from hf_pyao.model.attention.attention_groups import AttentionGroups

            self.attention_groups = AttentionGroups(class_name(model), found)
            self.attention_groups.set_groups(levers.attention_groups)
        if streaming is not None:
            self.weights = streaming
            streaming.put_on(lifecycle.engine)

    def describe(self) -> Iterator[str]:
        """Yield a sentence for each of the parts that is there."""
        for part in (*self.of_levers(), self.weights):
            if part is not None:
                yield part.describe()

    def of_levers(self) -> tuple[HeadLoss | MLPTiles | AttentionGroups, ...]:
        """Return what is there of head loss, tiles and groups."""
        parts = self.head_loss, self.mlp_tiles, self.attention_groups
        return tuple(part for part in parts if part is not None)

    def take_off(self, engine: OffloadEngine) -> None:
        """Put the model's own forwards back, end *engine*, and remove the hooks.

        It may be called again, also where it was interrupted.
        """
        try:
            self.put_back_forwards()
        finally:
            if self._lifecycle is not None:
                lifecycle = self._lifecycle()
                if lifecycle is not None:
                    lifecycle.leave_all()
                engine.end()
                if self.weights is not None:
                    self.weights.take_off(engine)
                if lifecycle is not None:
                    lifecycle.remove()
                self._lifecycle = None

    def put_back_forwards(self) -> None:
        """Put the model's own forwards back: those of head, MLPs and attention."""
        for part in self.of_levers():
            part.uninstall()


def forget_compiled_code(model: nn.Module, found: FoundLayers) -> None:
    """Drop code that torch.compile made of *model* before hooks were there: it would ignore them.

    Compiled modules do not check for new hooks by default, not even on another instance of the
    same class. So all goes whose guards name a class of *model*; those of torch.nn, which others
    have too, only if they are layers. Other compiled code stays. torch promises nothing of how to
    ask for guards: where that fails, all compiled code is dropped.
    """
    if "torch._dynamo" not in sys.modules:
        return
    layers = {type(layer) for _, layer in found.layers}
    kinds = {type(each) for each in model.modules()}
    own = {each for each in kinds if each in layers or not each.__module__.startswith("torch.nn.")}
    addresses = {str(id(kind)) for kind in own}
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code

        for reference in list(torch._dynamo.convert_frame.input_codes.seen):
            if (code := reference()) is None:
                continue
            for entry in _debug_get_cache_entry_list(code):
                parts = entry.guard_manager.code_parts  # such as ___check_type_id(L['self'], 94...)
                if not parts or addresses.intersection(re.findall(r"\d+", " ".join(parts))):
                    reset_code(code)
                    break
    except (AttributeError, ImportError, TypeError):
        torch._dynamo.reset()
