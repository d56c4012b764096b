"""The copy of a model that FSDP2 has sharded: whole, its weights gathered unit by unit.

A module that ``fully_shard`` was applied to refuses ``copy.deepcopy``. So its copy is made without
what FSDP2 keeps on it, with fake parameters of the whole shapes in the type that they are gathered
in; :mod:`gathers` gathers them. ``fully_shard`` has no public way to ask a unit for its policies.
They are read from its state and its parameter groups
(``torch/distributed/fsdp/_fully_shard/_fsdp_state.py`` and ``_fsdp_param_group.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from hf_pyao.auto.recording.gathers import Unit
from hf_pyao.errors import PyAOError
from hf_pyao.training_engines import FSDP2

_STATE_KEYS = "__composable_api_state_key"
"""How the attributes begin in which ``fully_shard`` keeps its state on a module."""

_PLACES = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
"""Attributes of an ``FSDPParam``: what its module may have as its parameter just now."""


class CopyError(PyAOError, RuntimeError):
    """The model cannot be run on fake tensors; says why."""

    key = "step-not-recorded"


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters that a unit of FSDP2 has, by its state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@dataclass(frozen=True)
class _Call:
    """One call of ``fully_shard``."""

    modules: tuple[nn.Module, ...]
    """Of the model; more than one if it was given a list."""
    state: Any
    """``FSDPState``, which all of them share."""

    @property
    def group(self) -> Any:
        """The ``FSDPParamGroup``; None if it has no parameters of its own.

        Raises:
            CopyError: it has several.
        """
        groups = groups_of(self.state)
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
        self._calls: tuple[_Call, ...] = tuple(_calls_of(model))
        """Those inside of others come first."""

    def __bool__(self) -> bool:
        """Return True if there are any."""
        return bool(self._calls)

    @property
    def device(self) -> torch.device:
        """Where the units compute, wherever their shards are."""
        device: torch.device = self._calls[0].state._device
        return device

    def make_whole(self, memo: dict[int, Any], fake_mode: FakeTensorMode) -> None:
        """Put whole copies of all units into *memo*, where ``copy.deepcopy`` looks.

        To be called where tensors are copied to fake ones.

        Raises:
            CopyError: units, or parameters of theirs, are of a kind that is not copied.
        """
        for call in self._calls:
            _check(call)
            memo[id(call.state)] = object()
            for parameter in call.parameters:
                whole = _whole(parameter, self.device, fake_mode)
                for place in _PLACES:
                    placed = getattr(parameter, place, None)
                    if placed is not None:
                        memo[id(placed)] = whole
            for module in call.modules:
                memo[id(module)] = object.__new__(type(module))
        for call in self._calls:
            for module in call.modules:
                own = {k: v for k, v in vars(module).items() if not k.startswith(_STATE_KEYS)}
                memo[id(module)].__setstate__(copy.deepcopy(own, memo))

    def units(self, memo: dict[int, Any]) -> Iterator[Unit]:
        """Yield the units of the copy, and cast inputs and outputs as the model does; by *memo*."""
        for call in self._calls:
            modules = tuple(memo[id(module)] for module in call.modules)
            policy = call.state._mp_policy
            for module in modules:
                if policy.cast_forward_inputs and policy.param_dtype is not None:
                    module.register_forward_pre_hook(
                        partial(_cast_inputs, policy.param_dtype), with_kwargs=True
                    )
                if policy.output_dtype is not None:
                    module.register_forward_hook(partial(_cast_output, policy.output_dtype))
            group = call.group
            if group is not None:
                trained = [
                    p.sharded_param for p in call.parameters if p.sharded_param.requires_grad
                ]
                is_kept = trained and trained[0].to_local().device.type == self.device.type
                yield Unit(
                    modules=modules,
                    parameters=tuple(memo[id(each.sharded_param)] for each in call.parameters),
                    num_ranks=group.mesh_info.shard_mesh_size,
                    is_gathered=group.reshard_after_backward,
                    stays=group.post_forward_mesh_info is None,
                    is_reduced=group.reduce_grads,
                    is_buffered=True,
                    sent_dtype=policy.reduce_dtype,
                    kept_dtype=trained[0].dtype if is_kept else None,
                )


def _calls_of(model: nn.Module) -> Iterator[_Call]:
    states: dict[int, tuple[Any, list[nn.Module]]] = {}
    for module in model.modules():
        if FSDP2.wraps(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
            states.setdefault(id(state), (state, []))[1].append(module)
    for state, modules in reversed(states.values()):
        yield _Call(tuple(modules), state)


def _check(call: _Call) -> None:
    """Check that *call* has made a unit whose copy runs as it does.

    Raises:
        CopyError: it has not; says why.
    """
    if call.group is None:
        return
    info, after = call.group.mesh_info, call.group.post_forward_mesh_info
    why = ""
    if getattr(info, "is_spmd_mesh", False):
        why = "is sharded over dimensions of a larger mesh"
    elif info.shard_mesh_dim is None:
        why = "is replicated, and not sharded"
    elif after is not None and after.shard_mesh_size != info.shard_mesh_size:
        why = f"is resharded to {after.shard_mesh_size} ranks after its forward"
    for each in call.parameters:
        local = each.sharded_param.to_local()
        if each.is_dtensor:
            why = "has parameters of tensor parallelism"
        elif type(local) not in (Tensor, nn.Parameter) or hasattr(each, "_extensions_data"):
            why = f"has parameters of its own kind ({type(local).__name__})"
    if why:
        raise CopyError(f"a unit of FSDP2 {why}.")


def _whole(parameter: Any, device: torch.device, fake_mode: FakeTensorMode) -> nn.Parameter:
    """Return a fake parameter of the shape that *parameter* has on no rank alone."""
    sharded = parameter.sharded_param
    own = sharded.to_local()
    with fake_mode:
        dtype = parameter.param_dtype or sharded.dtype
        data = torch.empty(parameter._orig_size, dtype=dtype, device=device)
        whole = nn.Parameter(data, requires_grad=sharded.requires_grad)
        whole.ds_tensor = torch.empty(own.shape, dtype=own.dtype, device=own.device)  # type: ignore[attr-defined]
    return whole


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(partial(_cast, dtype), (args, kwargs))


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_cast else value
