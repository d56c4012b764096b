"""A model's tensors in memory that the processes of a node have once.

One process puts its model there (:func:`share`), and describes it. Others that have the same model
without bytes, on the meta device, let their tensors be views of that memory (:func:`adopt`). The
matrices of each layer lie together, so that streaming takes them as they are.

[Note: Shared weights]
Parameters are views of private mappings: what a process writes becomes its own. Page-locking would
give each process pages of its own, too, so uploads from page-locked memory read a shared mapping of
the same file instead, for as long as the parameters hold what is there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from hf_pyao.engine.stores.mapped_files import MappedFiles
from hf_pyao.engine.stores.shared_memory import SharedMemory
from hf_pyao.engine.transfer.layout import byte_span, has_storage, view_of_storage
from hf_pyao.errors import ConflictError, NoLayersFoundError
from hf_pyao.model.map.module_map import find_layers

ALIGNMENT_BYTES = 512
"""Tensors start at multiples of this."""

_KEY = "_pyao_shared_weights"

Named = tuple[str, torch.Tensor]


class SharedWeights:
    """Which memory of a model's is shared. In a copied or unpickled model nothing is.

    Args:
        num_processes: how many have it.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._files: dict[int, tuple[StorageWeakRef, SharedMemory]] = {}

    def add(self, file: SharedMemory) -> torch.UntypedStorage:
        """Return a private mapping of *file*, which is shared."""
        storage = file.private().untyped_storage()
        self._files[storage._cdata] = StorageWeakRef(storage), file  # type: ignore[no-untyped-call]
        return storage

    def file_of(self, storage: torch.UntypedStorage) -> SharedMemory | None:
        """Return the file that *storage* is a private mapping of; None if it is none."""
        living = {key: each for key, each in self._files.items() if not _is_gone(each[0])}
        self._files = living
        found = self._files.get(storage._cdata)
        return None if found is None else found[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the copy without shared memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled model without shared memory."""
        return type(None), ()


def shared_weights_of(model: nn.Module) -> SharedWeights | None:
    """Return what of *model*, or of a part of it, is shared; None if nothing is."""
    found = (module.__dict__.get(_KEY) for module in model.modules())
    return next((each for each in found if each is not None), None)


def share(model: nn.Module, num_processes: int) -> dict[str, Any]:
    """Move the tensors of *model* to memory that other processes may have.

    Parameters stay the same objects.

    Args:
        model: on the host.
        num_processes: how many will have the memory, this one included.

    Returns:
        The description that :func:`adopt` takes, as plain values. It holds as long as this process
        keeps the model.

    Raises:
        ConflictError: a tensor is not dense, not on the host, or overlaps another one.
        OSError: the system has no room.
    """
    groups = _groups(model)
    _check([named for group in groups for named in group])
    shared = SharedWeights(num_processes)
    places: dict[int, int] = {}
    tensors: list[dict[str, Any]] = []
    files: list[dict[str, int]] = []
    mapped_files = MappedFiles()
    with torch.no_grad():
        for group in groups:
            offsets, nbytes = _offsets(group)
            file = SharedMemory.create(nbytes)
            filled = file.shared().untyped_storage()
            storage = shared.add(file)
            for offset, (_, tensor) in zip(offsets, group, strict=True):
                _view(filled, offset, tensor).copy_(tensor.detach())
                before = tensor.detach()
                tensor.data = _view(storage, offset, tensor)
                mapped_files.let_go(before)
                del before  # one tensor at a time is there twice
                places[id(tensor)] = len(tensors)
                tensors.append(
                    {
                        "file": len(files),
                        "offset": offset,
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "size": list(tensor.size()),
                        "stride": list(tensor.stride()),
                        "requires_grad": tensor.requires_grad,
                    }
                )
            files.append({"descriptor": file.descriptor, "nbytes": nbytes})
    model.__dict__[_KEY] = shared
    return {
        "process": os.getpid(),
        "files": files,
        "tensors": tensors,
        "parameters": {name: places[id(p)] for name, p in _parameters(model)},
        "buffers": {name: places[id(b)] for name, b in _buffers(model)},
    }


def adopt(model: nn.Module, description: dict[str, Any], num_processes: int) -> None:
    """Let the tensors of *model* be those that another process describes.

    Args:
        model: of the same class and configuration; its tensors are replaced.
        description: what :func:`share` returned there.
        num_processes: how many have the memory.

    Raises:
        ConflictError: the model has other parameters or buffers.
        OSError: the other process is gone, or of another user.
    """
    parameters, buffers = description["parameters"], description["buffers"]
    for kind, given, own in (
        ("parameters", parameters, dict(_parameters(model))),
        ("buffers", buffers, dict(_buffers(model))),
    ):
        if given.keys() != own.keys():
            names = ", ".join(sorted(given.keys() ^ own.keys())[:4])
            raise ConflictError(
                f"the {kind} of this model are not those of the model that process "
                f"{description['process']} has loaded: {names}. Load the same model in each rank.",
                key="one-copy-model",
            )
    shared = SharedWeights(num_processes)
    storages = [
        shared.add(SharedMemory.of_process(description["process"], f["descriptor"], f["nbytes"]))
        for f in description["files"]
    ]
    tensors = [_described(storages[each["file"]], each) for each in description["tensors"]]
    made: dict[int, Parameter] = {}
    for name, place in parameters.items():
        if place not in made:
            requires_grad = description["tensors"][place]["requires_grad"]
            made[place] = Parameter(tensors[place], requires_grad)
        module, attribute = _owner(model, name)
        module._parameters[attribute] = made[place]
    for name, place in buffers.items():
        module, attribute = _owner(model, name)
        module._buffers[attribute] = tensors[place]
    model.__dict__[_KEY] = shared


def _is_gone(storage: StorageWeakRef) -> bool:
    gone: bool = storage.expired()  # type: ignore[no-untyped-call]
    return gone


def _groups(model: nn.Module) -> list[list[Named]]:
    """Return each tensor of *model* once: those of each layer together, and all others."""
    try:
        layers: Sequence[tuple[str, nn.Module]] = find_layers(model).layers
    except NoLayersFoundError:
        layers = ()
    seen: set[int] = set()
    groups = []
    for root in [*(layer for _, layer in layers), model]:
        group = []
        for name, tensor in [*_parameters(root), *_buffers(root)]:
            if id(tensor) not in seen and tensor.numel():
                seen.add(id(tensor))
                group.append((name, tensor))
        # Vectors are not streamed: what is lies together.
        group.sort(key=lambda named: named[1].dim() < 2)
        if group:
            groups.append(group)
    return groups


def _check(named: Sequence[Named]) -> None:
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        if tensor.device.type != "cpu" or not has_storage(tensor):
            raise ConflictError(
                f"{name!r} is on {tensor.device}, {tensor.layout}; expected a dense tensor on the "
                "CPU. Load the model without a device map and without quantisation.",
                key="one-copy-model",
            )
        first, last = byte_span(tensor)
        if last - first != tensor.nbytes:
            raise ConflictError(
                f"{name!r} has gaps between its elements; it cannot be shared.",
                key="one-copy-model",
            )
        spans.setdefault(tensor.untyped_storage()._cdata, []).append((first, last, name))
    for each in spans.values():
        for (_, last, name), (first, _, other) in itertools.pairwise(sorted(each)):
            if first < last:
                raise ConflictError(
                    f"{name!r} and {other!r} are two tensors over the same bytes. Tie them as one "
                    "parameter before the model is shared.",
                    key="one-copy-model",
                )


def _offsets(group: Sequence[Named]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for _, tensor in group:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _view(storage: torch.UntypedStorage, offset: int, like: torch.Tensor) -> torch.Tensor:
    blank = torch.empty(0, dtype=like.dtype, device="cpu")
    return view_of_storage(blank, storage, offset // like.itemsize, like.size(), like.stride())


def _described(storage: torch.UntypedStorage, each: dict[str, Any]) -> torch.Tensor:
    blank = torch.empty(0, dtype=getattr(torch, each["dtype"]), device="cpu")
    first = each["offset"] // blank.itemsize
    return view_of_storage(blank, storage, first, torch.Size(each["size"]), tuple(each["stride"]))


def _parameters(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _buffers(model: nn.Module) -> Iterator[Named]:
    return model.named_buffers(remove_duplicate=False)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
