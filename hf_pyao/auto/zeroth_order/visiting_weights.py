"""Puts a model's weights where zeroth order wants them, and takes them off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.links import pool_for
from hf_pyao.auto.install.weight_readers import Around, WeightReaders
from hf_pyao.auto.zeroth_order.lock_step import LockStep
from hf_pyao.config import GIB
from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.engine.zeroth_order.trained_block import TrainedBlock
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import ConfigError
from hf_pyao.model.weights.places import ComputeDevice, move_others
from hf_pyao.model.weights.streamable import is_dense, is_tied, owners_by_storage

SIGNS = (1, -1)
"""Of the passes of a step; with two ranks, that of each rank."""
_KEY = "_pyao_zeroth_order"
_FILES = ("state_dict", "_load_from_state_dict")
"""Methods by which others take a model's weights, or give it others."""


class VisitingWeights:
    """The weights of one model from :meth:`put_on` until :meth:`take_off`.

    Args:
        model: the whole model.
        layers: qualified name and module of each layer.
        trained: its trained weights.
        device: where compute runs.
        num_resident: layers that stay on the device; None: all.
        host_memory_gib: most memory of the host; None: this process's share.
        transport: copies bytes; None: what suits the device.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        trained: TrainedWeights,
        device: torch.device,
        num_resident: int | None,
        host_memory_gib: float | None,
        transport: Transport | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._layers = {id(layer) for _, layer in layers}
        self._device = device
        transport = transport or transport_for(device)
        self.store: Store = pool_for(host_memory_gib, transport, device)
        num_stay = len(layers) if num_resident is None else num_resident
        stay = resident_layers(len(layers), num_stay) if num_stay else ()
        self.blocks: list[TrainedBlock] = []
        rounded: set[int] = set()
        owners = owners_by_storage(model)
        for number, (fqn, layer) in enumerate(layers):
            inside = {id(module) for module in layer.modules()}
            movable = [
                (f"{fqn}.{name}", parameter)
                for name, parameter in layer.named_parameters()
                if _can_move(parameter) and not is_tied(parameter, owners, inside)
            ]
            if number in stay:
                rounded.update(id(parameter) for _, parameter in movable)
            elif movable:
                self.blocks.append(TrainedBlock(len(self.blocks), Masters(fqn, movable), trained))
        if trained.settings.transfer_dtype is None:
            rounded.clear()
        link = LinkContext(transport, self.store, None)
        self.turns = LockStep(device, model.modules())
        self.visits = WeightVisits(self.blocks, trained, link, device, rounded)
        self._reserved: list[torch.Tensor] = []
        self._readers = WeightReaders(self.visits.streams, device)
        self._compute_device = ComputeDevice(device)

    @property
    def model(self) -> nn.Module | None:
        """Whose weights they are; None if it is gone."""
        return self._model()

    def put_on(self) -> None:
        """Move layers to the host and the rest to the device. :meth:`take_off` undoes all of it.

        Raises:
            ConfigError: the host has no room for them.
        """
        model = self._model()
        assert model is not None
        for block in self.blocks:
            in_place = block.masters.host_bytes_before
            memory = self.store.reserve(block.host_nbytes, in_place_of_bytes=in_place)
            if memory is None:
                needed = sum(each.host_nbytes for each in self.blocks) / GIB
                raise ConfigError(
                    f"{len(self.blocks)} layers take {needed:.3f} GiB of host memory, with "
                    "momentum and copies in transfer_dtype, and there is no room for "
                    f"{block.layer!r}: {self.store.room_to_reserve(in_place) / GIB:.3f} GiB are "
                    "left. Let more layers stay on the device (num_resident), or raise "
                    "host_memory_gib.",
                    key="streaming-host-memory",
                )
            self._reserved.append(memory)
            block.move_to(memory)
        trained = self.visits.trained
        for weight in trained.weights if trained.settings.momentum else ():
            if not self.visits.streams(weight.ref()):
                weight.give_state(torch.zeros(weight.num_elements, device=self._device))
        move_others(model, self.visits.streams, self._device)
        self._readers.put_on(model, self._is_read, lambda _: self.visits)
        self._compute_device.put_on(model)
        for module in model.modules():
            has_forward = type(module).forward is not nn.Module.forward
            is_layer = id(module) in self._layers
            if is_layer or (has_forward and any(map(self._is_read, module.parameters()))):
                run = self._layer if is_layer else self._forward
                self._readers.exchange(module, _KEY, Around(run))
        for name in _FILES:
            self._readers.exchange(model, f"{_KEY}_{name}", Around(self._flushed), name)

    def _is_read(self, parameter: object) -> bool:
        return self.visits.streams(parameter) or self.visits.trained.of(parameter) is not None

    def _forward(self, own: Callable[[], Any]) -> Any:
        """Run the forward of a module; outside of a step (evaluation) it reads updated weights."""
        if self.visits.sign is not None:
            return own()
        with torch.no_grad(), self.visits.in_use:
            self.visits.begin_step()
            with self.visits.reading(0):
                return own()

    def _layer(self, own: Callable[[], Any]) -> Any:
        """Run the forward of a layer, and let the other pass run its own."""
        result = self._forward(own)
        if self.visits.sign is not None:
            self.visits.end_layer()
        if self.visits.sign:
            self.turns.end_layer(SIGNS.index(self.visits.sign))
        return result

    def _flushed(self, own: Callable[[], Any]) -> Any:
        self.visits.flush()
        return own()

    def take_off(self) -> None:
        """Give the model its weights back as they are. It may be called again."""
        self._readers.take_off()
        self._compute_device.take_off()
        self.visits.stop()
        for block in self.blocks:
            block.masters.move_back()
        for memory in self._reserved:
            self.store.return_reserved(memory)
        self._reserved = []


def _can_move(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter) is nn.Parameter and has_storage(parameter)
    return is_plain and parameter.numel() > 0 and is_dense(parameter)
