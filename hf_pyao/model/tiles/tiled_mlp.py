"""One MLP that runs in tiles: what runs in place of its method."""

from __future__ import annotations

import abc
import inspect
import logging
from collections.abc import Iterator, Sequence
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
from hf_pyao.model.map.sharding import KnownSharding
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method
from hf_pyao.model.tiles import Rerun, TilePlan, plan_tiles, run_in_slices
from hf_pyao.model.tiles.comparison import LEAST_TOKENS, Verdict, agreed, compare_tokens
from hf_pyao.model.tiles.linears import Ending
from hf_pyao.model.tiles.mlp_kinds import KnownMLP
from hf_pyao.model.tiles.mlp_search import inside
from hf_pyao.training_engines import DTENSOR, FSDP2, ZERO_3, Feature, is_moved_by_accelerate

logger = logging.getLogger(__name__)

KEY = "_pyao_mlp_tiles"

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Notes:
    """What is said about calls, once each, what comparisons found, and how the last one was cut."""

    def __init__(self, name: str) -> None:
        self.said: dict[str, None] = {}
        self.verdicts: dict[str, Verdict] = {}
        """By kind of MLP; see [Note: Comparison] in ``comparison``."""
        self.last_plan: TilePlan | None = None
        self._name = name

    def say(self, path: str, reason: str) -> None:
        """Warn, once, that a call of *path* is not cut, and why."""
        message = f"{path} does not run in tiles: {reason}"
        if message not in self.said:
            self.said[message] = None
            warn(logger, "mlp-not-tiled", "MLP tiles of %s: %s.", self._name, message)


class TiledForwards:
    """Counts the forwards of a model by the calls of the MLP that runs first, for its checks.

    Args:
        second_runs: says which forwards are checked.
    """

    def __init__(self, second_runs: SecondRuns) -> None:
        self.second_runs = second_runs
        self._first = ""
        self._number = 0

    def begin_anew(self) -> None:
        """Check the next forwards as the first ones: the tiles are others from now on."""
        self.second_runs.begin_anew()

    def check_of(self, path: str) -> ForwardCheck | None:
        """Return the check of the forward in which the MLP *path* runs; None if there is none."""
        if current_graph_task() == NO_TASK:  # else a layer runs again in backward
            self._first = self._first or path
            self._number += path == self._first
        return self.second_runs.of_forward(self._number)


class Part(LeftBehind, abc.ABC):
    """Answers for a method of one module; holds no module."""

    @abc.abstractmethod
    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what a call of the method returns."""

    def with_tiles(self, tiles: int | str) -> Part:
        """Return the same with another number of tiles; itself if it does not know the number."""
        return self


class TiledMLP(Part):
    """Runs an MLP in tiles.

    Args:
        known: what was found out about it.
        tiles: a number of tiles, or ``"auto"``.
        path: its name, for messages.
        notes: where things are said.
        forwards: says which calls are checked.
        is_compiled: whether its module is compiled code.
        part_names: where the MLP is a method of a larger module, the modules that it calls there.
    """

    def __init__(
        self,
        known: KnownMLP,
        tiles: int | str,
        path: str,
        notes: Notes,
        forwards: TiledForwards,
        *,
        is_compiled: bool = False,
        part_names: Sequence[str] = (),
    ) -> None:
        self._known = known
        self._forwards = forwards
        self._tiles = tiles
        self._path = path
        self._notes = notes
        self._is_compiled = is_compiled
        self._part_names = part_names
        self._ending = Ending()
        self._state = ModuleState((), "")
        """Of the modules that it calls."""

    def with_tiles(self, tiles: int | str) -> TiledMLP:
        """Return the same with another number of tiles."""
        return TiledMLP(
            self._known,
            1 if tiles == "off" else tiles,
            self._path,
            self._notes,
            self._forwards,
            is_compiled=self._is_compiled,
            part_names=self._part_names,
        )

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Run the MLP, in tiles if that is worth it and may be."""
        if kwargs:
            args, kwargs = _positional(own, args, kwargs)
        parts = [getattr(module, name) for name in self._part_names] or [module]
        also_itself = bool(self._part_names)
        plan = None if kwargs else self.plan(module, parts, args, also_itself=also_itself)
        if plan is None:
            return own(*args, **kwargs)
        return self.tiled(own, parts, plan, args)

    def plan(
        self,
        module: nn.Module,
        parts: Sequence[nn.Module],
        inputs: Sequence[Any],
        *,
        also_itself: bool,
    ) -> TilePlan | None:
        """Return how a call with *inputs* is cut; None if it is not."""
        if not module.training or len(inputs) != self._known.num_inputs:
            return None
        if torch._C._are_functorch_transforms_active():
            return None  # they follow operations of torch's alone
        if any(type(tensor) not in _PLAIN for tensor in inputs):
            return None
        first: Tensor = inputs[0]
        lead = first.shape[:-1]
        if any(tensor.shape[:-1] != lead for tensor in inputs):
            return None
        plan = plan_tiles(
            lead.numel(), self._tiles, self._token_bytes(first), self._known.weight_bytes
        )
        if plan.num_tiles < 2 or lead.numel() < LEAST_TOKENS or self._verdict().reason:
            return None
        reason = reason_now(parts, also_itself=also_itself)
        if reason is None and self._verdict().draws and may_be_disturbed():
            reason = "it draws random numbers, from generators that other threads may draw from too"
        if reason is not None:
            self._notes.say(self._path, reason)
            return None
        return plan

    def tiled(
        self, function: Method, parts: Sequence[nn.Module], plan: TilePlan, inputs: Sequence[Tensor]
    ) -> Any:
        """Run *function*, whose modules are *parts*, as *plan* says; whole if it mixes tokens."""
        if self._refused(function, parts, plan, inputs):
            return function(*inputs)
        self._notes.last_plan = plan
        rerun = Rerun(
            state=partial(StateOfCall, self._state_of(parts)),
            is_compiled=self._is_compiled,
            ending=self._ending,
            name=self._path,
            check=self._forwards.check_of(self._path),
            watch=partial(self._forwards.second_runs.watch, self._path),
        )
        return run_in_slices(function, inputs, partial(weights_of, parts), plan, rerun)

    def _verdict(self) -> Verdict:
        return self._notes.verdicts.get(self._known.kind, Verdict())

    def _refused(
        self, function: Method, parts: Sequence[nn.Module], plan: TilePlan, inputs: Sequence[Tensor]
    ) -> bool:
        """Say whether it may not run in tiles; the first call of its kind is compared."""
        known = self._known.kind
        if known not in self._notes.verdicts and not isinstance(inputs[0], FakeTensor):
            plain = inside(parts[0]).forward if self._is_compiled else function
            verdict = compare_tokens(plain, parts, inputs, plan.tile_tokens)
            verdict = agreed(known, self._path, verdict)
            self._notes.verdicts[known] = verdict
            if verdict.reason:
                self._notes.say(self._path, verdict.reason)
            elif verdict.draws and may_be_disturbed():
                return True
        return bool(self._verdict().reason)

    def _state_of(self, parts: Sequence[nn.Module]) -> ModuleState:
        """Return the state of *parts*; nothing in them is written: see [Note: Comparison]."""
        if self._state.roots() != list(parts):
            self._state = ModuleState(parts, f"{self._path!r}, in tiles,")
        return self._state

    def say(self, reason: str) -> None:
        """Say, once, why a call is not cut."""
        self._notes.say(self._path, reason)

    def _token_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a token under the autocast that is on."""
        known, device_type = self._known, tensor.device.type
        if not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
            return known.token_bytes
        itemsize = torch.get_autocast_dtype(device_type).itemsize
        return -(-known.token_bytes * itemsize // known.itemsize)


def _positional(
    own: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same arguments, those by position that can be."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def reason_now(
    parts: Sequence[nn.Module], *, also_itself: bool, is_running: bool = True
) -> str | None:
    """Return why *parts*, as they are now, may not run on a part of the tokens; None if they may.

    Args:
        parts: what the MLP calls, with what is inside.
        also_itself: look at hooks of *parts* themselves too, and not only of what is inside.
        is_running: they are about to be called: what is gathered for their layer is whole.
    """
    if is_running and (of_modes := reason_of_modes_and_hooks()):
        return of_modes
    for part in parts:
        for module in part.modules():
            if (module is not part or also_itself) and (reason := _reason_of_hooks(module)):
                return reason
            for weight in module._parameters.values():
                if weight is None:
                    continue
                if ZERO_3.has(weight):
                    return ZERO_3.reason(Feature.MLP_TILES)
                if is_running and DTENSOR.has(weight):
                    return DTENSOR.reason(Feature.MLP_TILES)
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


def weights_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of *parts*, each once; the views that FSDP1 has in their place."""
    return list({id(weight): weight for weight in _weights(parts)}.values())


def _weights(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    sharding = KnownSharding()
    for part in parts:
        for module in part.modules():
            yield from sharding.weights_of(module)
