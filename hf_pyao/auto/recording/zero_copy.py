"""The copy of a model that DeepSpeed trains with ZeRO: whole, its weights gathered by module.

Under ZeRO-3 the model's own parameters are empty between their uses, and a copy of them would run
nothing. So the copy has fake parameters of the whole shapes, which :mod:`gathers` gathers.

DeepSpeed has no way to ask a model for its engine: it is looked for among all objects. Its
settings are read from attributes of the engine's optimizer (``deepspeed/runtime/zero/stage3.py``,
``stage_1_and_2.py``; 0.19).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.recording.gathers import Unit, reused
from hf_pyao.auto.recording.sharded_copy import CopyError
from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import DEEPSPEED, ZERO_3

_BESIDE_3 = 3
"""Reductions that ZeRO-3 lets run beside compute: it waits for the third last
(``max_param_reduce_events`` of 2 in ``stage3.py``)."""


class ZeroCopy:
    """What ZeRO does with a model, and the same with its copy.

    Args:
        model: trained by DeepSpeed, or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._divided = [each for each in model.parameters() if ZERO_3.has(each)]
        self._engine = zero_engine_of(model)

    def make_whole(self, memo: dict[int, Any], fake_mode: FakeTensorMode) -> None:
        """Put whole copies of divided parameters into *memo*, where ``deepcopy`` looks.

        Raises:
            CopyError: the model is divided in a way that is not followed.
        """
        if not self._divided:
            return
        if self._engine is None:
            raise CopyError("it is trained by DeepSpeed, whose engine was not found.")
        registry = getattr(self._model, "ds_inflight_param_registry", None)
        if registry is not None:  # handles of collectives
            memo[id(registry)] = {}
        for parameter in self._divided:
            _check(parameter)
            memo[id(parameter)] = _whole(parameter, fake_mode)

    def units(self, copy: nn.Module) -> Iterator[Unit]:
        """Yield the units of *copy*: each module that has parameters; of ZeRO-1 all at once."""
        optimizer = getattr(self._engine, "optimizer", None)
        if optimizer is None:
            return
        is_3 = bool(self._divided)
        # On a CPU all is queued from the one thread that computes.
        is_cpu = next(self._model.parameters()).device.type == "cpu"
        overlaps = not is_cpu and bool(self._engine.zero_overlap_comm())
        all_reduces = not is_3 and getattr(optimizer, "use_multi_rank_bucket_allreduce", True)
        names = ("offload_optimizer", "cpu_offload")
        is_offloaded = any(bool(getattr(optimizer, name, False)) for name in names)
        # ZeRO-3 has a place for all of them throughout.
        kept_dtype = None if is_3 or is_offloaded else next(copy.parameters()).dtype
        common: dict[str, Any] = {
            "num_ranks": self._num_ranks,
            "kept_dtype": kept_dtype,
            "is_gathered": is_3,
            "runs_ahead": overlaps,
            "num_beside": (_BESIDE_3 if is_3 else 1) if overlaps else 0,
            "sums_all": bool(all_reduces or not getattr(optimizer, "reduce_scatter", True)),
        }
        if not is_3 and not optimizer.partition_gradients and not overlaps:
            yield Unit(modules=(), parameters=tuple(copy.parameters()), **common)
            return
        users = list(_users(copy))
        stay: set[nn.Module] = set()
        if is_3:
            offload = getattr(optimizer, "parameter_offload", optimizer)
            stay = reused(users, offload._max_reuse_distance_in_numel)
        for module in users:
            parameters = tuple(_parameters_of(module))
            yield Unit(modules=(module,), parameters=parameters, stays=module in stay, **common)

    @property
    def _num_ranks(self) -> int:
        for each in self._divided:
            return int(each.ds_zero_partition_world_size)  # type: ignore[attr-defined]
        return process_rank().num_ranks


def zero_engine_of(model: nn.Module) -> Any:
    """Return the ``DeepSpeedEngine`` around *model*; None if there is none, or ZeRO is off.

    Slow where there is one: it looks at all objects.
    """
    if "deepspeed" not in sys.modules:
        return None
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and DEEPSPEED.wraps(each):
            if any(module is model for module in each.modules()):
                return each if each.zero_optimization_stage() else None
    return None


def _check(parameter: Any) -> None:
    """Check that *parameter* is gathered as :mod:`gathers` has it.

    Raises:
        CopyError: it is not; says why.
    """
    part = parameter.ds_tensor
    why = ""
    if getattr(parameter, "nvme_swapper", None) is not None:
        why = "on NVMe"
    elif getattr(parameter, "ds_secondary_tensor", None) is not None:
        why = "partitioned a second time within a node (zero_hpz_partition_size)"
    elif hasattr(part, "ds_quant_scale") or part.dtype != parameter.dtype:
        why = "gathered in another type than they have"
    if why:
        raise CopyError(f"it is trained by DeepSpeed, and its parameters are {why}.")


def _whole(parameter: Any, fake_mode: FakeTensorMode) -> nn.Parameter:
    """Return a fake parameter of the shape that *parameter* has when it is gathered."""
    part = parameter.ds_tensor
    with fake_mode:
        data = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)
        whole: Any = nn.Parameter(data, requires_grad=parameter.requires_grad)
        whole.ds_tensor = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    number = getattr(parameter, ZERO_3.parameter_attribute)
    setattr(whole, ZERO_3.parameter_attribute, number)
    # What modules return is never let go of either.
    whole.ds_persist = bool(parameter.ds_persist or parameter.is_external_param)
    # DeepSpeed's own linear layers ask whether a weight is there; they may not gather it.
    whole.ds_status = "whole"
    found: nn.Parameter = whole
    return found


def _users(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that gather parameters: each its own, a leaf all inside of it."""
    if any(True for _ in _parameters_of(module)):
        yield module
    if not _is_leaf(module):
        for child in module.children():
            yield from _users(child)


def _parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield what *module* gathers: its own parameters, and others that it was seen to use."""
    yield from module.parameters(recurse=_is_leaf(module))
    yield from getattr(module, "_external_params", {}).values()


def _is_leaf(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))
