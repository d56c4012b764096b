"""What is refused of a model whose frozen weights are to be streamed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.engine.stores.host_share import host_limit_bytes
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.weights.ends import Ends, ends_of
from hf_pyao.model.weights.places import has_streamed
from hf_pyao.model.weights.shared_weights import shared_weights_of
from hf_pyao.model.weights.streamable import StreamableLayer, streamable_layers
from hf_pyao.plan.step.disk_share import NOTHING_ON_DISK, disk_share
from hf_pyao.training_engines import (
    ENGINES,
    Sharded,
    engine_of_module,
    is_compiled,
    is_moved_by_accelerate,
)


def check_can_stream(model: nn.Module, config: PyAOConfig, *, will_be_frozen: bool = False) -> None:
    """Refuse a model whose weights cannot be streamed as *config* asks for; nothing is changed.

    For whoever prepares data, or moves the model, before it is attached.

    Args:
        model: on whatever device.
        config: what is asked for.
        will_be_frozen: all its parameters will be, since adapters are yet to be added.

    Raises:
        ConfigError: no layer has frozen weights, or they take more than the given host memory.
        ConflictError: something else moves, shards or compiles the weights.
        NoLayersFoundError: no layers were found.
    """
    if config.stream_weights == "off":
        return
    label = config.label("stream_weights")
    check_model(model, label)
    found = find_layers(model, config.layers)
    with _frozen(model) if will_be_frozen else contextlib.nullcontext():
        layers = streamable_layers(model, found.layers)
        ends = ends_of(model, found.layers) if config.stream_embeddings == "on" else Ends()
    if not any(layer.nbytes for layer in layers):
        raise nothing_frozen(label, config.stream_weights, layers)
    if config.stream_weights == "auto":
        return
    stay = resident_layers(len(layers), int(config.stream_weights))
    streamed = [layer for index, layer in enumerate(layers) if index not in stay]
    nbytes = sum(layer.nbytes for layer in streamed) + ends.nbytes
    if (shared := shared_weights_of(model)) is not None:
        nbytes = -(-nbytes // shared.num_processes)
    room = host_limit_bytes(config.host_memory_gib)
    if config.host_memory_gib is None:  # the share counts only memory that is not in use yet
        tensors = [tensor for layer in streamed for _, tensor in layer.tensors]
        tensors += [parameter for _, parameter in ends.parameters]
        room += sum(each.nbytes for each in tensors if each.device.type == "cpu")
    if nbytes > room and config.disk_path is None:
        raise no_room(label, len(streamed), nbytes, room, with_ends=bool(ends.parameters))


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters of *model* meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def nothing_frozen(label: str, value: int | str, layers: Sequence[StreamableLayer]) -> ConfigError:
    """Return the error for *layers* of which nothing can be streamed."""
    left: Counter[str] = Counter()
    for layer in layers:
        left.update(layer.left_bytes)
    found = ", ".join(f"{nbytes / GIB:.3f} GiB {reason}" for reason, nbytes in left.most_common())
    return ConfigError(
        f"{label} is {value}, and no layer has frozen weights that can be streamed. Their "
        f"parameters are: {found or 'none'}. Freeze the base model and train adapters (PEFT), or "
        f"give {label}='off'.",
        key="nothing-to-stream",
    )


def no_room(
    label: str,
    num_layers: int,
    nbytes: int,
    room: int,
    *,
    with_ends: bool = False,
    with_staging: bool = False,
) -> ConfigError:
    """Return the error for *nbytes* of weights where the host has *room*.

    *with_ends*: those of embeddings and head are among them. *with_staging*: so is what weights on
    a disk are read into.
    """
    ends, remedy = "", "give disk_path, or let more layers stay on the device"
    if with_ends:
        ends = " and of embeddings and head"
        remedy += ", or give stream_embeddings='off'"
    if with_staging:
        ends += ", and what those on the disk are read into,"
        remedy = remedy.replace("give disk_path, or ", "")
    return ConfigError(
        f"{label}: the weights of {num_layers} layers{ends} take {nbytes / GIB:.3f} GiB of host "
        f"memory, and there is room for {max(0, room) / GIB:.3f} GiB. Raise host_memory_gib if the "
        f"machine has more, or {remedy}.",
        key="streaming-host-memory",
    )


def check_model(model: nn.Module, label: str) -> None:
    """Refuse a model whose weights someone else moves, shards, compiles, or has not loaded."""
    for name, module in model.named_modules():
        what = ""
        unit_of = engine_of_module(module)
        if unit_of.shards is Sharded.WEIGHTS:
            where = name or type(model).__name__
            raise _not_whole(where, f"is divided among ranks, by {unit_of.name}", label)
        if is_compiled(module):
            what = "is compiled: compiled code reads weights by itself"
        elif is_moved_by_accelerate(module):
            what = "has a device map: Accelerate moves its weights by itself"
        elif has_streamed(module):
            what = "is streamed already, by another offloader"
        if what:
            raise ConflictError(
                f"{label}: {name or type(model).__name__!r} {what}. Load and attach the plain "
                f"model, or give {label}='off'.",
                key="streaming-compiled",
            )
    for name, parameter in model.named_parameters():
        what = ""
        if parameter.is_meta:
            what = "is on the meta device: it has no bytes yet"
        elif engine := next((each for each in ENGINES if each.has(parameter)), None):
            what = f"is divided among ranks, by {engine.name}"
        if what:
            raise _not_whole(name, what, label)


def _not_whole(name: str, what: str, label: str) -> ConflictError:
    return ConflictError(
        f"{label}: {name!r} {what}. Weights are streamed where each process has all of them on its "
        f"host: use DDP or one process, or give {label}='off'.",
        key="streaming-sharded",
    )


def weights_on_host_bytes(model: nn.Module, config: PyAOConfig, room_bytes: float) -> float:
    """Return the host memory that streamed weights will take of *room_bytes*.

    Those that are on a disk take what they are read into.

    Args:
        model: as it will be trained.
        config: what is asked for; ``stream_weights`` is ``"off"`` or a number.
        room_bytes: host memory for weights and activations.

    Raises:
        NoLayersFoundError: no layers were found.
    """
    if config.stream_weights == "off":
        return 0
    found = find_layers(model, config.layers)
    layers = streamable_layers(model, found.layers)
    ends = ends_of(model, found.layers) if config.stream_embeddings == "on" else Ends()
    stay = resident_layers(len(layers), int(config.stream_weights))
    sizes = [
        layer.nbytes for number, layer in enumerate(layers) if number not in stay and layer.nbytes
    ]
    share = NOTHING_ON_DISK
    if config.disk_path is not None:
        share = disk_share(sizes, room_bytes - ends.nbytes)
    on_host = (size for number, size in enumerate(sizes) if number not in share.layers)
    return ends.nbytes + share.reserved_bytes + sum(on_host)
