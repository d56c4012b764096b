"""Puts a model's weights where zeroth order wants them, and takes them off again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.zeroth_order.lock_step import LockStep
from hf_pyao.config import GIB
from hf_pyao.engine.stores import HostPool, Store
from hf_pyao.engine.stores.host_share import HostShare
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, resident_layers
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weights.blocks import Block, blocks_of
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.tables import put_on, take_off
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import ConfigError
from hf_pyao.model.patching.lasting_forward import LeftBehind, exchange, give_back
from hf_pyao.model.weights.places import ComputeDevice, StayingParameters, move_others
from hf_pyao.model.weights.streamable import is_dense, is_tied, owners_by_storage

_LAYER = "_pyao_zeroth_order_layer"
_ROOT = "_pyao_zeroth_order_model"


class _LayerCall(LeftBehind):
    """Hands over to the other pass as a layer call ends."""

    def __init__(self, visits: WeightVisits, turns: LockStep, block: int | None) -> None:
        self._visits = visits
        self._turns = turns
        self._block = block

    def run(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return what the layer's own forward returns."""
        if self._visits.sign is None:
            return own(*args, **kwargs)
        if self._block is not None:
            self._visits.arrive(self._block)
        result = own(*args, **kwargs)
        self._visits.end_layer()
        self._turns.hand_over()
        return result


class _ModelCall(LeftBehind):
    """Lets a forward outside of a step (evaluation, generation) read updated weights."""

    def __init__(self, visits: WeightVisits) -> None:
        self._visits = visits

    def run(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return what the model's own forward returns."""
        if self._visits.sign is not None:
            return own(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(module, own, args, kwargs)
        self._visits.begin_step()
        with self._visits.reading(0):
            return own(*args, **kwargs)


class VisitingWeights:
    """The weights of one model from :meth:`put_on` until :meth:`take_off`.

    Args:
        model: the whole model.
        layers: qualified name and module of each layer.
        trained: its trained weights.
        device: where compute runs.
        num_resident: layers that stay on the device.
        host_memory_gib: most memory of the host; None: this process's share.
        transport: copies bytes; None: what suits the device.
        num_slots: slots of the ring.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        trained: TrainedWeights,
        device: torch.device,
        num_resident: int,
        *,
        host_memory_gib: float | None = None,
        transport: Transport | None = None,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._model = weakref.ref(model)
        self._layers = [(fqn, weakref.ref(layer)) for fqn, layer in layers]
        self._device = device
        transport = transport or transport_for(device)
        self.store: Store = _pool(host_memory_gib, transport)
        self._link = LinkContext(transport, self.store, None)
        self._masters = _masters_of(model, layers, num_resident)
        self._check_room()
        self.blocks: list[Block] = []
        for masters in self._masters:
            self.blocks.extend(blocks_of(masters, len(self.blocks)))
        self.turns = LockStep(device)
        self.visits = WeightVisits(self.blocks, trained, self._link, device, num_slots)
        self._handles: list[tuple[weakref.ref[nn.Module], str, Any]] = []
        self._owners: list[weakref.ref[nn.Module]] = []
        self._staying = StayingParameters(self.visits.streams)
        self._compute_device = ComputeDevice(device)

    def _check_room(self) -> None:
        needed = sum(masters.nbytes for masters in self._masters)
        room = self.store.room_to_reserve(sum(m.host_bytes_before for m in self._masters))
        if needed > room:
            raise ConfigError(
                f"the weights of {len(self._masters)} layers take {needed / GIB:.3f} GiB of host "
                f"memory, and there is room for {room / GIB:.3f} GiB. Let more layers stay on the "
                "device (num_resident), or raise host_memory_gib.",
                key="streaming-host-memory",
            )

    def put_on(self) -> None:
        """Move layers to the host and the rest to the device. :meth:`take_off` undoes all of it."""
        model = self._model()
        assert model is not None
        for masters in self._masters:
            memory = self.store.reserve(masters.nbytes, in_place_of_bytes=masters.host_bytes_before)
            if memory is None:
                raise ConfigError(
                    f"the machine refused {masters.nbytes / GIB:.3f} GiB of host memory for the "
                    f"weights of layer {masters.layer!r}. Let more layers stay on the device.",
                    key="streaming-host-memory",
                )
            masters.move_to(memory)
        move_others(model, self.visits.streams, self._device)
        for module in model.modules():
            parameters = list(module._parameters.values())
            if any(self._is_read(each) for each in parameters):
                self._owners.append(weakref.ref(module))
                self._staying.put_on(module)
                put_on(module, self.visits)
        self._compute_device.put_on(model)
        of_layer = {block.layer: block.index for block in self.blocks}
        for fqn, ref in self._layers:
            if (layer := ref()) is not None:
                call = _LayerCall(self.visits, self.turns, of_layer.get(fqn))
                self._exchange(layer, _LAYER, call)
        self._exchange(model, _ROOT, _ModelCall(self.visits))

    def _is_read(self, parameter: object) -> bool:
        return self.visits.streams(parameter) or self.visits.trained.of(parameter) is not None

    def _exchange(self, module: nn.Module, key: str, handle: Any) -> None:
        self._handles.append((weakref.ref(module), key, handle))
        exchange(module, key, handle)

    def take_off(self) -> None:
        """Give the model its weights back as they are. It may be called again."""
        for ref, key, handle in self._handles:
            if (module := ref()) is not None:
                give_back(module, key, handle)
        for owner in self._owners:
            if (module := owner()) is not None:
                self._staying.take_off(module)
                take_off(module)
        self._handles, self._owners = [], []
        self._compute_device.take_off()
        self.visits.stop()
        for masters in self._masters:
            masters.move_back()
            if masters.memory is not None:
                self.store.return_reserved(masters.memory)
        self._masters = []


def _masters_of(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], num_resident: int
) -> list[Masters]:
    """Return the masters of the layers that do not stay: all dense parameters that are theirs."""
    stay = resident_layers(len(layers), num_resident) if num_resident else ()
    owners = owners_by_storage(model)
    found = []
    for number, (fqn, layer) in enumerate(layers):
        if number in stay:
            continue
        inside = {id(module) for module in layer.modules()}
        parameters = [
            (f"{fqn}.{name}", parameter)
            for name, parameter in layer.named_parameters()
            if _can_move(parameter) and not is_tied(parameter, owners, inside)
        ]
        if parameters:
            found.append(Masters(fqn, parameters))
    return found


def _can_move(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_plain and parameter.numel() > 0 and is_dense(parameter)


def _pool(host_memory_gib: float | None, transport: Transport) -> HostPool:
    share = HostShare.of_this_process(os.environ) if host_memory_gib is None else None
    if host_memory_gib is not None:
        capacity = int(host_memory_gib * GIB)
    else:
        assert share is not None
        capacity = share.capacity_bytes
    return HostPool(
        capacity,
        pin=transport.needs_pinned_memory,
        share=share,
        on_release=transport.host_released,
    )
