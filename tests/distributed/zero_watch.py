"""Notes what DeepSpeed's ZeRO gathers, lets go of and exchanges, and the same of a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao.auto.recording.zero_gathers import Gathers, Place


@contextlib.contextmanager
def gathers_noted(
    model: nn.Module, names: dict[int, str], found: list[list[Any]]
) -> Iterator[None]:
    """Note what DeepSpeed has gathered whenever it has come to a module, or has left one."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    paths = {module: path for path, module in model.named_modules()}

    def noting(name: str) -> Any:
        own = getattr(Coordinator, name)

        def note(coordinator: Any, module: nn.Module, forward: bool = False) -> None:
            own(coordinator, module, forward)
            whole = [
                (names[each.ds_id], each.ds_status.name)
                for each in model.parameters()
                if each.ds_status.name != "NOT_AVAILABLE"
            ]
            found.append([name, paths[module], forward, sorted(whole)])

        return mock.patch.object(Coordinator, name, note)

    with noting("fetch_sub_module"), noting("release_sub_module"):
        yield


@contextlib.contextmanager
def copied_gathers_noted(found: list[list[Any]]) -> Iterator[None]:
    """The same of the copy that is recorded, whose last micro-batch stays in *found*."""
    status = {Place.PARTITIONED: "NOT_AVAILABLE", Place.UNDER_WAY: "INFLIGHT"}
    begin = Gathers.begin_micro_batch

    def begin_micro_batch(gathers: Gathers) -> None:
        begin(gathers)
        found.clear()

    def noting(name: str, called: str) -> Any:
        own = getattr(Gathers, name)

        def note(gathers: Gathers, module: nn.Module, *, is_forward: bool) -> None:
            own(gathers, module, is_forward=is_forward)
            root = gathers._root
            paths = {module: path for path, module in root.named_modules()}
            names = {id(each): name for name, each in root.named_parameters()}
            parameters = {
                each for module in root.modules() for each in gathers.parameters_of(module)
            }
            whole = [
                (names[id(each.parameter)], status.get(each.place, "AVAILABLE"))
                for each in parameters
                if each.place is not Place.PARTITIONED
            ]
            found.append([called, paths[module], is_forward, sorted(whole)])

        return mock.patch.object(Gathers, name, note)

    with (
        mock.patch.object(Gathers, "begin_micro_batch", begin_micro_batch),
        noting("enter", "fetch_sub_module"),
        noting("leave", "release_sub_module"),
    ):
        yield


@contextlib.contextmanager
def collectives_noted(found: list[tuple[bool, int]]) -> Iterator[None]:
    """Note the collectives that DeepSpeed has torch run, and what this rank receives for each."""
    backend = deepspeed.comm.comm.cdb
    gather, scatter = backend.all_gather_function, backend.reduce_scatter_function
    sums = dist.all_reduce

    def gathers(output_tensor: Any, input_tensor: Any, **how: Any) -> Any:
        found.append((True, output_tensor.nbytes - input_tensor.nbytes))
        return gather(output_tensor, input_tensor, **how)

    def scatters(output_tensor: Any, input_tensor: Any, **how: Any) -> Any:
        found.append((False, input_tensor.nbytes - output_tensor.nbytes))
        return scatter(output_tensor, input_tensor, **how)

    def reduces(tensor: Any, **how: Any) -> Any:
        found.append((False, tensor.nbytes))  # half of it twice, on two ranks
        return sums(tensor, **how)

    with (
        mock.patch.object(backend, "all_gather_function", gathers),
        mock.patch.object(backend, "reduce_scatter_function", scatters),
        mock.patch.object(dist, "all_reduce", reduces),
    ):
        yield


@contextlib.contextmanager
def left_noted(model: nn.Module, found: list[list[Any]]) -> Iterator[None]:
    """Note the parameters that ZeRO-3 lets go of, and whether nothing else holds what it gathered."""
    refs: dict[str, Any] = {}
    handles = []

    def gathered(module: nn.Module, _: Any) -> None:
        for name, each in module.named_parameters(recurse=False):
            if each.numel():
                refs[paths[module], name] = StorageWeakRef(each.untyped_storage())

    def look(module: nn.Module, *_: Any) -> None:
        for (path, name), ref in list(refs.items()):
            if not model.get_submodule(path).get_parameter(name).numel():
                found.append([f"{path}.{name}", ref.expired()])
                del refs[path, name]

    paths = {module: path for path, module in model.named_modules()}
    for module in paths:
        handles.append(module.register_forward_pre_hook(gathered))
        handles.append(module.register_forward_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
