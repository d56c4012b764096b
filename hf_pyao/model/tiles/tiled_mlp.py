"""One MLP that runs in tiles: what runs in place of its forward."""

from __future__ import annotations

import abc
import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.recompute.verification import ForwardCheck, SecondRuns
from hf_pyao.engine.rerun.generators import may_be_disturbed
from hf_pyao.engine.rerun.modes import reason_of_modes_and_hooks
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.errors import warn
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method
from hf_pyao.model.tiles.comparison import (
    LEAST_TOKENS,
    NOTHING_KNOWN,
    Known,
    agreed,
    compare_tokens,
    look_at,
    weights_of,
)
from hf_pyao.model.tiles.mlp_search import FoundMLP, inside
from hf_pyao.model.tiles.sliced import Rerun, run_in_slices
from hf_pyao.plan.options.tile_plan import TilePlan, plan_tiles
from hf_pyao.training_engines import DTENSOR, FSDP1, FSDP2, ZERO_3, Feature, is_moved_by_accelerate

logger = logging.getLogger(__name__)

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Notes:
    """What all tiled MLPs of a model note: what is said of them, and which forward runs.

    Args:
        name: of the model, for messages.
        second_runs: says which forwards are checked.
    """

    def __init__(self, name: str, second_runs: SecondRuns) -> None:
        self.second_runs = second_runs
        self.said: dict[str, None] = {}
        self.kinds: dict[str, str] = {}
        """By the names of MLPs that have run: words that are equal for equal ones, on all ranks."""
        self.known: dict[str, Known] = {}
        """By kind."""
        self.last_plan: TilePlan | None = None
        """How the MLP that ran last was cut; norms do not count."""
        self._name = name
        self._first = ""
        self._number = 0

    def say(self, path: str, reason: str) -> None:
        """Warn, once, that a call of *path* is not cut, and why."""
        message = f"{path} does not run in tiles: {reason}"
        if message not in self.said:
            self.said[message] = None
            warn(logger, "mlp-not-tiled", "MLP tiles of %s: %s.", self._name, message)

    def known_of(self, path: str) -> Known:
        """Return what is known of an MLP; that it may run in tiles, before its kind has run."""
        return self.known.get(self.kinds.get(path, ""), NOTHING_KNOWN)

    def check_of(self, path: str) -> ForwardCheck | None:
        """Return the check of the forward in which the MLP *path* runs; None if there is none.

        Forwards are counted by the calls of the MLP that runs first.
        """
        if current_graph_task() == NO_TASK:  # else a layer runs again in backward
            self._first = self._first or path
            self._number += path == self._first
        return self.second_runs.of_forward(self._number)


class Part(LeftBehind):
    """Answers for the forward of one module; holds no module."""

    @abc.abstractmethod
    def with_tiles(self, tiles: int | str) -> Part:
        """Return the same with another number of tiles."""


class TiledMLP(Part):
    """Runs an MLP in tiles.

    Args:
        mlp: which; its modules are not held.
        tiles: a number of tiles, or ``"auto"``.
        weight_bytes: bytes of an MLP's weights, which say how large tiles are.
        notes: of all MLPs of the model.
    """

    def __init__(self, mlp: FoundMLP, tiles: int | str, weight_bytes: int, notes: Notes) -> None:
        self._path = mlp.path
        self._is_norm = mlp.is_norm
        self._is_spread = len(mlp.places) > 1
        self._tiles = tiles
        self._weight_bytes = weight_bytes
        self._notes = notes
        self._state = ModuleState((), "")
        """Of the modules that it calls."""

    def with_tiles(self, tiles: int | str) -> TiledMLP:
        """Return the same with another number of tiles."""
        other = object.__new__(TiledMLP)  # a copy would be None
        vars(other).update(vars(self), _tiles=1 if tiles == "off" else tiles)
        return other

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Run the MLP, in tiles if that is worth it and may be."""
        if kwargs:
            bound = inspect.signature(own).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if kwargs or not self.takes(module, args):
            return own(*args, **kwargs)
        return self.tiled(own, (module,), args)

    def takes(self, module: nn.Module, inputs: Sequence[Any]) -> bool:
        """Say whether a call of *module* with *inputs* is one that can be cut."""
        return (
            module.training
            and not torch._C._are_functorch_transforms_active()  # they follow torch's operations
            and all(type(tensor) in _PLAIN for tensor in inputs)
            and len({tensor.shape[:-1] for tensor in inputs}) == 1
        )

    def tiled(self, own: Method, parts: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Any:
        """Run *own*, whose modules are *parts*, in tiles; whole if they are not worth it, or it
        mixes tokens, as the first call of its kind shows."""
        plan = self._plan(own, parts, inputs)
        if plan is None:
            return own(*inputs)
        if not self._is_norm:
            self._notes.last_plan = plan
        if self._state.roots() != list(parts):
            self._state = ModuleState(parts, f"{self._path!r}, in tiles,")
        rerun = Rerun(
            state=partial(StateOfCall, self._state),
            is_compiled=inside(parts[0]) is not parts[0],
            last_linear=self._notes.known_of(self._path).last_linear,
            name=self._path,
            check=self._notes.check_of(self._path),
            watch=partial(self._notes.second_runs.watch, self._path),
        )
        return run_in_slices(own, inputs, partial(weights_of, parts), plan, rerun)

    def _plan(
        self, own: Method, parts: Sequence[nn.Module], inputs: Sequence[Tensor]
    ) -> TilePlan | None:
        """Return how a call is cut; None if it is not."""
        num_tokens, notes, path = inputs[0].shape[:-1].numel(), self._notes, self._path
        if self._tiles == 1 or num_tokens < LEAST_TOKENS or notes.known_of(path).reason:
            return None
        plain = own if inside(parts[0]) is parts[0] else inside(parts[0]).forward
        if path not in notes.kinds:
            if not self._may_run(parts):
                return None
            shapes = [tuple(weight.shape) for weight in weights_of(parts)]
            kind = notes.kinds[path] = repr((getattr(own, "__qualname__", ""), *parts, shapes))
            if kind not in notes.known:
                notes.known[kind] = look_at(plain, parts, inputs)
                self.say(notes.known[kind].reason)
        known, kind = notes.known_of(path), notes.kinds[path]
        if known.reason:
            return None
        plan = plan_tiles(num_tokens, self._tiles, known.token_bytes, self._weight_bytes)
        if plan.num_tiles < 2 or (self._is_norm and not known.is_wide) or not self._may_run(parts):
            return None
        if known.is_compared or isinstance(inputs[0], FakeTensor):
            return plan
        known = compare_tokens(plain, parts, inputs, plan.tile_tokens, known)
        notes.known[kind] = known = known._replace(reason=agreed(kind, path, known.reason))
        self.say(known.reason)
        return plan if not known.reason and self._may_run(parts) else None

    def _may_run(self, parts: Sequence[nn.Module]) -> bool:
        """Return whether *parts*, as they are now, may run on a part of the tokens, or say why."""
        reason = reason_now(parts, is_spread=self._is_spread)
        if not reason and self._notes.known_of(self._path).draws and may_be_disturbed():
            reason = "it draws random numbers, from generators that other threads may draw from too"
        self.say(reason)
        return not reason

    def say(self, reason: str | None) -> None:
        """Say, once, why a call is not cut, if there is a reason."""
        if reason:
            self._notes.say(self._path, reason)


def reason_now(
    parts: Sequence[nn.Module], *, is_spread: bool, is_running: bool = True
) -> str | None:
    """Return why *parts*, as they are now, may not run on a part of the tokens; None if they may.

    Args:
        parts: what the MLP calls, with what is inside.
        is_spread: look at hooks of *parts* themselves too, and not only of what is inside.
        is_running: they are about to be called: what is gathered for their layer is whole.
    """
    if is_running and (of_modes := reason_of_modes_and_hooks()):
        return of_modes
    for part in parts:
        for module in part.modules():
            if (module is not part or is_spread) and (reason := _reason_of_hooks(module)):
                return reason
            for engine in (ZERO_3, DTENSOR if is_running else FSDP1):
                if any(map(engine.has, module.parameters(recurse=False))):
                    return engine.reason(Feature.MLP_TILES)
    return None


def _reason_of_hooks(module: nn.Module) -> str | None:
    name = type(module).__name__
    if FSDP2.wraps(module):
        return f"{name} inside it is sharded by itself; shard whole layers"
    if is_moved_by_accelerate(module):
        return f"accelerate moves the weights of {name} for each call"
    for table in _HOOKS:
        for hook in getattr(module, table).values():
            is_inert = getattr(hook, "__module__", "") == ModelHook.__module__
            if not isinstance(hook, ModelHook) and not is_inert:
                return f"{name} inside it has module hooks, which would see one tile at a time"
    return None
