"""Puts a model's weights where zeroth order wants them, and takes them off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.links import pool_for
from hf_pyao.auto.install.weight_readers import WeightReaders
from hf_pyao.auto.zeroth_order.lock_step import LockStep
from hf_pyao.config import GIB
from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, resident_layers
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weights.expert_groups import GROUP_BYTES
from hf_pyao.engine.weights.host_bytes import ALIGNMENT_BYTES
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.packed_block import PackedBlock
from hf_pyao.engine.zeroth_order.packed_visits import PackedVisits
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.engine.zeroth_order.visits import AtPlace, WeightVisits
from hf_pyao.errors import ConfigError
from hf_pyao.model.patching.lasting_forward import LeftBehind
from hf_pyao.model.weights.ends import ends_by_rows
from hf_pyao.model.weights.places import ComputeDevice, move_others
from hf_pyao.model.weights.streamable import is_dense, is_tied, owners_by_storage

_LAYER = "_pyao_zeroth_order_layer"
_LEAST_PIECE_BYTES = 4096
"""Pieces of a weight that visits by rows may be as large as this, however small layers are."""
_OUTSIDE = "_pyao_zeroth_order_outside"


class _LayerCall(LeftBehind):
    """Hands over to the other pass as a layer call ends."""

    def __init__(
        self, visits: WeightVisits, turns: LockStep, layer: str, block: int | None
    ) -> None:
        self._visits = visits
        self._turns = turns
        self._layer = layer
        self._block = block

    def run(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return what the layer's own forward returns."""
        if self._visits.sign is None:
            return own(*args, **kwargs)
        if self._visits.sign:
            self._visits.trained.visit(self._layer)
        if self._block is not None:
            self._visits.arrive(self._block)
        result = own(*args, **kwargs)
        self._visits.end_layer()
        self._turns.hand_over()
        return result


class _OutsideCall(LeftBehind):
    """Lets a forward outside of a step (evaluation, generation) read updated weights.

    It is on the model and on its parts: whoever calls one of these by itself finds them, too.
    """

    def __init__(self, visits: WeightVisits) -> None:
        self._visits = visits

    def run(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return what the module's own forward returns."""
        visits = self._visits
        if visits.sign is not None:
            return own(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(module, own, args, kwargs)
        with visits.in_use:
            visits.begin_step()
            with visits.reading(0):
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
        ends_visit: embeddings and head are on the host, too, and come by rows.
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
        ends_visit: bool = False,
        transport: Transport | None = None,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._model = weakref.ref(model)
        self._layers = [(fqn, weakref.ref(layer)) for fqn, layer in layers]
        self._device = device
        transport = transport or transport_for(device)
        self.store: Store = pool_for(host_memory_gib, transport, device)
        self._link = LinkContext(transport, self.store, None)
        of_layers = _masters_of(model, layers, num_resident)
        before, after = ends_by_rows(model, layers) if ends_visit else ([], [])
        self._masters = [*map(_alone, before), *of_layers, *map(_alone, after)]
        self.blocks = _blocks_of(self._masters, of_layers, trained)
        self._check_room()
        self.turns = LockStep(device)
        self.visits = _visits_of(trained)(
            self.blocks,
            trained,
            self._link,
            device,
            num_slots,
            self.turns.hand_over,
            read_later={id(parameter) for _, parameter in after},
        )
        if isinstance(self.visits, PackedVisits):
            self.visits.round_too(_packed_ids(model, layers, trained))
        self._states: list[torch.Tensor] = []
        self._readers = WeightReaders(self.visits.streams, device)
        self._compute_device = ComputeDevice(device)

    @property
    def model(self) -> nn.Module | None:
        """Whose weights they are; None if it is gone."""
        return self._model()

    def _check_room(self) -> None:
        momentum = sum(block.state_nbytes for block in self.blocks)
        packed = sum(block.packed_nbytes for block in self.blocks if isinstance(block, PackedBlock))
        needed = sum(masters.nbytes for masters in self._masters) + momentum + packed
        room = self.store.room_to_reserve(sum(m.host_bytes_before for m in self._masters))
        if needed > room:
            raise ConfigError(
                f"the weights of {len(self._masters)} layers, embeddings and heads take "
                f"{needed / GIB:.3f} GiB of host memory ({momentum / GIB:.3f} GiB of it for "
                f"momentum, {packed / GIB:.3f} GiB for copies in transfer_dtype), and there is "
                f"room for {room / GIB:.3f} GiB. Let more layers stay on the device "
                "(num_resident), or raise host_memory_gib.",
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
        self._give_states()
        move_others(model, self.visits.streams, self._device)
        places = places_of(model, self._living_layers())
        needs_place = self.visits.trained.settings.zo2_order
        self._readers.put_on(
            model,
            self._is_read,
            lambda each: AtPlace(self.visits, places[each]) if needs_place else self.visits,
        )
        self._compute_device.put_on(model)
        of_layer = {block.layer: block.index for block in self.blocks}
        for fqn, layer in self._living_layers():
            call = _LayerCall(self.visits, self.turns, fqn, of_layer.get(fqn))
            self._readers.exchange(layer, _LAYER, call)
        outside = _OutsideCall(self.visits)
        for module in model.modules():
            has_forward = type(module).forward is not nn.Module.forward
            if has_forward and any(map(self._is_read, module.parameters())):
                self._readers.exchange(module, _OUTSIDE, outside)

    def _living_layers(self) -> list[tuple[str, nn.Module]]:
        return [(fqn, layer) for fqn, ref in self._layers if (layer := ref()) is not None]

    def _give_states(self) -> None:
        """Give momenta their memory: on the host where the weight is, else on the device."""
        for block in self.blocks:
            if block.state_nbytes:
                what = f"the momentum of {block.layer!r}"
                block.give_state_memory(self._reserved(block.state_nbytes, what))
            if isinstance(block, PackedBlock):
                what = f"copies in transfer_dtype of {block.layer!r}"
                block.give_packed_memory(self._reserved(block.packed_nbytes, what))
        trained = self.visits.trained
        for weight in trained.weights if trained.settings.momentum else ():
            if not self.visits.streams(weight.ref()):
                state = torch.zeros(weight.num_elements, device=self._device)
                weight.parts[0].give_state(state)

    def _reserved(self, nbytes: int, what: str) -> torch.Tensor:
        memory = self.store.reserve(nbytes)
        if memory is None:
            raise ConfigError(
                f"the machine refused {nbytes / GIB:.3f} GiB of host memory for {what}.",
                key="streaming-host-memory",
            )
        self._states.append(memory)
        return memory

    def _is_read(self, parameter: object) -> bool:
        return self.visits.streams(parameter) or self.visits.trained.of(parameter) is not None

    def take_off(self) -> None:
        """Give the model its weights back as they are. It may be called again."""
        self._readers.take_off()
        self._compute_device.take_off()
        self.visits.stop()
        for masters in self._masters:
            masters.move_back()
            if masters.memory is not None:
                self.store.return_reserved(masters.memory)
        for memory in self._states:
            self.store.return_reserved(memory)
        self._masters, self._states = [], []


def places_of(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """Return by module what it is a place of: its layer's name, or its own."""
    places = {inner: fqn for fqn, layer in layers for inner in layer.modules()}
    return {module: places.get(module, name or "model") for name, module in model.named_modules()}


def _masters_of(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], num_resident: int
) -> list[Masters]:
    """Return the masters of the layers that do not stay: all dense parameters that are theirs."""
    stay = resident_layers(len(layers), num_resident) if num_resident else ()
    return [
        Masters(fqn, parameters)
        for number, (fqn, parameters) in enumerate(_movable_of(model, layers))
        if number not in stay and parameters
    ]


def _movable_of(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Yield by layer the parameters that can visit."""
    owners = owners_by_storage(model)
    for fqn, layer in layers:
        inside = {id(module) for module in layer.modules()}
        yield (
            fqn,
            [
                (f"{fqn}.{name}", parameter)
                for name, parameter in layer.named_parameters()
                if _can_move(parameter) and not is_tied(parameter, owners, inside)
            ],
        )


def _packed_ids(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], trained: TrainedWeights
) -> set[int]:
    """Return the ``id`` of each matrix that travels in the format if its layer visits."""
    form = trained.format
    assert form is not None
    return {
        id(parameter)
        for _, parameters in _movable_of(model, layers)
        for _, parameter in parameters
        if form.packs(parameter.size(), parameter.dtype)
    }


def _visits_of(trained: TrainedWeights) -> type[WeightVisits]:
    return WeightVisits if trained.format is None else PackedVisits


def _alone(named: tuple[str, nn.Parameter]) -> Masters:
    return Masters(named[0], [named])


def _blocks_of(
    masters: Sequence[Masters], of_layers: Sequence[Masters], trained: TrainedWeights
) -> list[VisitBlock]:
    """Return a block of each layer, and blocks of rows, none larger, of each other weight."""
    blocks: list[VisitBlock] = []
    of_layer = VisitBlock if trained.format is None else PackedBlock
    limit = max((of_layer(0, each, trained).nbytes for each in of_layers), default=GROUP_BYTES)
    limit = max(limit, _LEAST_PIECE_BYTES)
    for each in masters:
        if each in of_layers:
            blocks.append(of_layer(len(blocks), each, trained))
            continue
        master = each.masters[0]
        num_rows, width = master.size
        known = trained.of(master.ref())
        row_nbytes = master.nbytes // num_rows
        if known is not None and trained.settings.momentum:
            row_nbytes += 4 * width
        most = max(1, (limit - 2 * ALIGNMENT_BYTES) // row_nbytes)
        firsts = range(0, num_rows, -(-num_rows // -(-num_rows // most)))
        if known is not None:
            known.divide([first * width for first in firsts])
        for first in firsts:
            rows = first, min(first + firsts.step, num_rows)
            blocks.append(VisitBlock(len(blocks), each, trained, rows))
    return blocks


def _can_move(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter) is nn.Parameter and has_storage(parameter)
    return is_plain and parameter.numel() > 0 and is_dense(parameter)
