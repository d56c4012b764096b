"""The copy of a model that FSDP2 has sharded: whole first, then sharded anew over ranks of no one.

A module that ``fully_shard`` was applied to refuses ``copy.deepcopy``. So its copy is made of its
original class, with fake parameters of the whole shapes. Then ``fully_shard`` is applied to the
copy, unit by unit, with the policies that the model's own units have. Its collectives run on
process groups of backend ``fake``: they have the ranks of the real ones, send nothing and wait for
nobody, so that one process alone runs the step (``torch/csrc/distributed/c10d/
FakeProcessGroup.hpp``). A group belongs to this process only, and is there only while the copy is.

``fully_shard`` has no public way to ask a unit for its policies. They are read from its state and
its parameter groups (``torch/distributed/fsdp/_fully_shard/_fsdp_state.py`` and
``_fsdp_param_group.py``). What of them cannot be carried over is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.errors import PyAOError
from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import FSDP2

_STATE_KEYS = "__composable_api_state_key"
"""How the attributes begin in which ``fully_shard`` keeps its state on a module."""

_SWITCHES = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward"),
    *("unshard_async_op", "gradient_divide_factor", "reduce_scatter_unused_params"),
    *("force_sum_reduction_for_comms", "reduce_scatter_max_input_buffers"),
)
"""Attributes of a parameter group that methods of ``FSDPModule`` set."""


class CopyError(PyAOError, RuntimeError):
    """The model cannot be run on fake tensors; says why."""

    key = "step-not-recorded"


@dataclass(frozen=True)
class Unit:
    """One call of ``fully_shard``."""

    modules: tuple[nn.Module, ...]
    """Of the model; more than one if it was given a list."""
    state: Any
    """``FSDPState``, which all of them share."""

    @property
    def group(self) -> Any:
        """The unit's ``FSDPParamGroup``; None if it has no parameters of its own.

        Raises:
            CopyError: it has several.
        """
        groups = getattr(self.state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            return self.state._fsdp_param_group
        if len(groups) > 1:
            raise CopyError("a unit of FSDP2 has parameters that are sharded over several meshes.")
        return groups[0] if groups else None

    @property
    def parameters(self) -> Sequence[Any]:
        """``FSDPParam`` of each of its parameters."""
        return () if self.group is None else self.group.fsdp_params


class ShardedUnits:
    """The units of FSDP2 in a model, and their copies.

    Args:
        model: with units of FSDP2, or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.units: tuple[Unit, ...] = tuple(_units_of(model))
        """Those inside of others come first, as ``fully_shard`` wants them."""
        self._memo: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Return True if there are any."""
        return bool(self.units)

    @property
    def device(self) -> torch.device:
        """Where the units compute, wherever their shards are."""
        device: torch.device = self.units[0].state._device
        return device

    @property
    def has_gloo(self) -> bool:
        """True if gradients are reduced over gloo."""
        groups = [each.group.mesh_info.shard_process_group for each in self.units if each.group]
        return any(group._get_backend(self.device).name() == "gloo" for group in groups)

    @property
    def accumulates(self) -> bool:
        """True if gradients stay whole from one micro-batch to the next, which are not reduced."""
        return any(
            unit.group is not None and (not unit.group.reduce_grads or _held_gradients(unit))
            for unit in self.units
        )

    @property
    def prefetches(self) -> bool:
        """True if units name others that are gathered ahead of their turn."""
        return any(
            each.state._states_to_forward_prefetch or each.state._states_to_backward_prefetch
            for each in self.units
        )

    def unshard_into(self, memo: dict[int, Any], fake_mode: FakeTensorMode) -> None:
        """Put whole copies of all units into *memo*, where ``copy.deepcopy`` looks.

        To be called where tensors are copied to fake ones.

        Raises:
            CopyError: units, or parameters of theirs, are of a kind that is not copied.
        """
        self._memo = memo
        for unit in self.units:
            _check(unit)
            memo[id(unit.state)] = object()
            for parameter in unit.parameters:
                whole = _whole(parameter, self.device, fake_mode)
                for place in _PLACES:
                    placed = getattr(parameter, place, None)
                    if placed is not None:
                        memo[id(placed)] = whole
            for module in unit.modules:
                kind = _class_before(module)
                memo[id(module)] = kind.__new__(kind)
        for unit in self.units:
            for module in unit.modules:
                own = {k: v for k, v in vars(module).items() if not k.startswith(_STATE_KEYS)}
                memo[id(module)].__setstate__(copy.deepcopy(own, memo))

    @contextmanager
    def meshes(self) -> Iterator[dict[int, Any]]:
        """Make the meshes of fake groups; yield the one for each unit's state, by id.

        To be called outside of any fake mode.

        Raises:
            CopyError: there can be no such groups.
        """
        if not self.units:
            yield {}
            return
        made: dict[tuple[Any, ...], Any] = {}
        found: dict[int, Any] = {}
        with ExitStack() as stack:
            for unit in self.units:
                if unit.group is not None:
                    key, names = _layout(unit.group.mesh_info)
                    if key not in made:
                        made[key] = stack.enter_context(_mesh(key, names, self.device.type))
                    found[id(unit.state)] = made[key]
            anyone = next(iter(made.values()), None)
            if anyone is None:
                raise CopyError("no unit of FSDP2 has a parameter.")
            yield {id(unit.state): found.get(id(unit.state), anyone) for unit in self.units}

    def shard_anew(self, meshes: dict[int, Any]) -> None:
        """Apply ``fully_shard`` to the copies; under the fake mode."""
        if not self.units:
            return
        from torch.distributed.fsdp import fully_shard

        managed = {
            id(self._memo[id(each.sharded_param)])
            for unit in self.units
            for each in unit.parameters
        }
        whole = self._memo[id(self._model)]
        ignored = {each for each in whole.parameters() if id(each) not in managed}
        for unit in self.units:
            copies = [self._memo[id(module)] for module in unit.modules]
            fully_shard(
                copies[0] if len(copies) == 1 else copies,
                mesh=meshes[id(unit.state)],
                ignored_params=ignored,
                **self._arguments(unit),
            )
            state = copies[0]._get_fsdp_state()
            copied = Unit(tuple(copies), state)
            if unit.group is not None:
                for name in _SWITCHES:
                    if hasattr(unit.group, name):
                        setattr(copied.group, name, getattr(unit.group, name))
        self._prefetch_alike()

    def accumulate(self, run: Callable[[], None]) -> list[Tensor]:
        """Run a micro-batch of the copy that reduces nothing; return what is there since then.

        What comes next is the last micro-batch before the optimizer steps, which takes the most:
        all gradients are whole when its backward begins, and are reduced in it.
        """
        root = self._memo[id(self._model)]
        units = [Unit(each.modules, each.state) for each in _units_of(root)]
        groups = [each.group for each in units if each.group is not None]
        for group in groups:
            group.reduce_grads = False
        run()
        held: list[Tensor] = []
        for unit in units:
            held += _held_gradients(unit)
        for group in groups:
            group.reduce_grads = True
            for each in group.fsdp_params:
                held += [part for part in each.all_gather_outputs if _has_memory(part)]
        return held

    def _arguments(self, unit: Unit) -> dict[str, Any]:
        """Return what ``fully_shard`` was called with for *unit*."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        group = unit.group
        if group is None:
            return {"mp_policy": unit.state._mp_policy}
        offload = group.offload_policy
        if isinstance(offload, CPUOffloadPolicy):
            offload = CPUOffloadPolicy(pin_memory=False)  # there is nothing to pin
        placements = {
            id(self._memo[id(each.sharded_param)]): each.fsdp_placement for each in unit.parameters
        }
        return {
            "mp_policy": group.mp_policy,
            "offload_policy": offload,
            "reshard_after_forward": group.post_forward_mesh_info is not None,
            "shard_placement_fn": lambda parameter: placements[id(parameter)],
        }

    def _prefetch_alike(self) -> None:
        copies = {id(unit.state): self._memo[id(unit.modules[0])] for unit in self.units}
        for unit in self.units:
            module = copies[id(unit.state)]
            for direction in ("forward", "backward"):
                targets = getattr(unit.state, f"_states_to_{direction}_prefetch")
                if targets:
                    name = f"set_modules_to_{direction}_prefetch"
                    getattr(module, name)([copies[id(each)] for each in targets])


_PLACES = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
"""Attributes of an ``FSDPParam``: what its module may have as its parameter just now."""


def _units_of(model: nn.Module) -> Iterator[Unit]:
    states: dict[int, tuple[Any, list[nn.Module]]] = {}
    for module in model.modules():
        if FSDP2.wraps(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
            states.setdefault(id(state), (state, []))[1].append(module)
    for state, modules in reversed(states.values()):
        yield Unit(tuple(modules), state)


def _class_before(module: nn.Module) -> Any:
    """Return the class that *module* had before ``fully_shard``, which puts its own in front."""
    return next(
        cls
        for cls in type(module).__mro__
        if not any(base.__name__ in FSDP2.classes for base in cls.__mro__)
    )


def _check(unit: Unit) -> None:
    """Check that *unit* is one whose copy runs as it does.

    Raises:
        CopyError: it is not; says why.
    """
    if unit.group is None:
        return
    info, after = unit.group.mesh_info, unit.group.post_forward_mesh_info
    why = ""
    if getattr(info, "is_spmd_mesh", False):
        why = "is sharded over dimensions of a larger mesh"
    elif info.shard_mesh_dim is None:
        why = "is replicated, and not sharded"
    elif after is not None and after.shard_mesh_size != info.shard_mesh_size:
        why = f"is resharded to {after.shard_mesh_size} ranks after its forward"
    for each in unit.parameters:
        local = each.sharded_param.to_local()
        if each.is_dtensor:
            why = "has parameters of tensor parallelism"
        elif type(local) not in (Tensor, nn.Parameter) or hasattr(each, "_extensions_data"):
            why = f"has parameters of its own kind ({type(local).__name__})"
    if why:
        raise CopyError(f"a unit of FSDP2 {why}.")


def _held_gradients(unit: Unit) -> list[Tensor]:
    """Return the gradients of a unit that no one has reduced yet."""
    found = []
    for each in unit.parameters:
        held = each.unsharded_accumulated_grad
        if held is None:
            held = getattr(getattr(each, "_unsharded_param", None), "grad", None)
        found += [] if held is None else [held]
    return found


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _whole(parameter: Any, device: torch.device, fake_mode: FakeTensorMode) -> nn.Parameter:
    """Return a fake parameter of the shape that *parameter* has on no rank alone."""
    sharded = parameter.sharded_param
    with fake_mode:
        data = torch.empty(parameter._orig_size, dtype=sharded.dtype, device=device)
        return nn.Parameter(data, requires_grad=sharded.requires_grad)


def _layout(info: Any) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
    """Return the ranks of a mesh, by dimension, and the names of its dimensions."""
    ranks = info.mesh.mesh.tolist()
    return (_frozen(ranks), info.mesh.mesh_dim_names), info.mesh.mesh_dim_names


def _frozen(ranks: Any) -> Any:
    return tuple(map(_frozen, ranks)) if isinstance(ranks, list) else ranks


@contextmanager
def _mesh(key: tuple[Any, ...], names: tuple[str, ...] | None, device_type: str) -> Iterator[Any]:
    """Make a mesh of fake groups with the ranks *key*, seen from this rank."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers the backend
    from torch.distributed.device_mesh import DeviceMesh

    if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        raise CopyError("TORCH_DIST_INIT_BARRIER has each new process group wait for all ranks.")
    ranks, own = torch.tensor(key[0]), process_rank().rank
    place = (ranks == own).nonzero()[0].tolist()
    groups: list[Any] = []
    try:
        for dimension in range(ranks.dim()):
            index: list[Any] = list(place)
            index[dimension] = slice(None)
            # Without its own rank's name in it: other ranks make no such group.
            groups.append(
                dist.new_group(
                    ranks[tuple(index)].tolist(), backend="fake", use_local_synchronization=True
                )
            )
        if len(groups) == 1:
            yield DeviceMesh.from_group(groups[0], device_type)
        else:
            yield DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    finally:
        for group in groups:
            dist.destroy_process_group(group)
