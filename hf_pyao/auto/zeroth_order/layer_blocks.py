"""Which weights of a model visit the device, and the host memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_pyao.config import GIB
from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order.trained import TrainedBlock, TrainedWeights
from hf_pyao.errors import ConfigError
from hf_pyao.model.weights.streamable import is_dense, is_tied, owners_by_storage


def blocks_of(
    model: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    num_resident: int | None,
    trained: TrainedWeights,
) -> list[TrainedBlock]:
    """Return a block of each layer that does not stay: of all dense parameters that are its own.

    Args:
        model: the whole model.
        layers: qualified name and module of each layer.
        num_resident: layers that stay on the device, evenly spread; None: all.
        trained: its trained weights.
    """
    num_stay = len(layers) if num_resident is None else num_resident
    stay = resident_layers(len(layers), num_stay) if num_stay else ()
    owners = owners_by_storage(model)
    blocks: list[TrainedBlock] = []
    for number, (fqn, layer) in enumerate(layers):
        inside = {id(module) for module in layer.modules()}
        movable = [
            (f"{fqn}.{name}", parameter)
            for name, parameter in layer.named_parameters()
            if _can_move(parameter) and not is_tied(parameter, owners, inside)
        ]
        if movable and number not in stay:
            blocks.append(TrainedBlock(len(blocks), Masters(fqn, movable), trained))
    return blocks


def _can_move(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter) is nn.Parameter and has_storage(parameter)
    return is_plain and parameter.numel() > 0 and is_dense(parameter)


def reserve(store: Store, block: TrainedBlock) -> torch.Tensor:
    """Return host memory of *store* for *block*.

    Raises:
        ConfigError: there is none.
    """
    in_place = block.masters.host_bytes_before
    memory = store.reserve(block.host_nbytes, in_place_of_bytes=in_place)
    if memory is None:
        room = max(0, store.room_to_reserve(in_place))
        raise ConfigError(
            f"the weights of {block.layer!r}, with momentum and copies in transfer_dtype, take "
            f"{block.host_nbytes / GIB:.3f} GiB of host memory, and there is room for "
            f"{room / GIB:.3f} GiB, behind the layers before it. Let more layers stay on the "
            "device (num_resident), or raise host_memory_gib.",
            key="streaming-host-memory",
        )
    return memory
