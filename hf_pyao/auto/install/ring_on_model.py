"""Puts a ring of streamed weights on a model's layers, and takes it off."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.weight_readers import Around, WeightReaders
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weights.blocks import Block
from hf_pyao.engine.weights.checkpointed import weights_kept_from_checkpoints
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.masters import thawed_weight
from hf_pyao.engine.weights.places import Place
from hf_pyao.engine.weights.read_ahead import ReadAhead
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.model.weights.experts import ExpertsInGroups
from hf_pyao.model.weights.packed import PackedWeight
from hf_pyao.model.weights.streamable import StreamableLayer

_LAYER = "_pyao_streamed_layer"
_MODULE = "_pyao_streamed_module"
_PACKED = "_pyao_streamed_packed"


class RingOnModel:
    """The ring of one model, from :meth:`install` until :meth:`uninstall`.

    Args:
        layers: qualified name of each layer, and the layer.
        link: transport and host memory.
        device: where compute runs.
        counts: sums over all uploads.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, weakref.ref[nn.Module]]],
        link: LinkContext,
        device: torch.device,
        counts: UploadFigures,
    ) -> None:
        self._layers = layers
        self._link = link
        self._device = device
        self._counts = counts
        self.ring: WeightRing | None = None
        """None while nothing is streamed."""
        self._packed: dict[int, PackedWeight] = {}
        self._readers = WeightReaders(self.has, device)

    def has(self, parameter: object) -> bool:
        """Say whether *parameter* is streamed now."""
        packed = self._packed.get(id(parameter))
        if packed is not None and packed.parameter is parameter:
            return True
        return self.ring is not None and self.ring.weight_of(parameter) is not None

    def install(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        layers: Sequence[StreamableLayer],
        on_forward: Callable[[], None],
        read_ahead: ReadAhead | None = None,
    ) -> None:
        """Let layers find the weights of *blocks*, which are on the host.

        Args:
            model: the whole model.
            blocks: in forward order; none: nothing is done.
            layers: whose weights they have.
            on_forward: called as a forward begins.
            read_ahead: reads those that are on a disk; None: none are.
        """
        if not blocks:
            return
        of_layer: list[list[int]] = [[] for _ in self._layers]
        numbers = {fqn: number for number, (fqn, _) in enumerate(self._layers)}
        for block in blocks:
            of_layer[numbers[block.layer]].append(block.index)
        self.ring = ring = WeightRing(
            blocks,
            [layer for _, layer in self._layers],
            of_layer,
            self._link,
            self._device,
            on_forward=on_forward,
            counts=self._counts,
            read_ahead=read_ahead,
        )
        self._packed = {id(each.parameter): each for layer in layers for _, each in layer.packed}
        for weight in self._packed.values():
            weight.move_tables(self._device)
            weight.follow()
        self._readers.put_on(model, self.has)
        for index, (_, ref) in enumerate(self._layers):
            layer = ref()
            for module in () if layer is None else layer.modules():
                has_groups = False
                for name, parameter in list(module._parameters.items()):
                    if parameter is None or not self.has(parameter):
                        continue
                    found = ring.weight_of(parameter)
                    has_groups |= found is not None and bool(found.groups)
                    self._add_places(ring, module, name, parameter)
                if len(of_layer[index]) > 1 and any(map(self.has, module._parameters.values())):
                    name = type(module).__name__
                    run = functools.partial(_run_module, ring, index, name, has_groups)
                    self._readers.exchange(module, _MODULE, Around(run))
            if layer is not None:
                run = functools.partial(_run_layer, ring, index)
                self._readers.exchange(layer, _LAYER, Around(run))

    def _add_places(
        self, ring: WeightRing, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> None:
        """Have what *module* has as *name* exchanged while its layer runs."""
        ref = weakref.ref(parameter)

        def is_meant(found: object) -> bool:
            return found is ref()

        packed = self._packed.get(id(parameter))
        if packed is not None:
            self._add_packed(ring, module, name, packed, is_meant)
            return
        weight = ring.weight_of(parameter)
        assert weight is not None
        if not weight.groups:
            make = functools.partial(ring.on_device[weight.block].weight, weight)
            ring.add_place(weight.block, Place(module, name, is_meant, make))
            return
        table = module._parameters

        def is_shadowed(found: object) -> bool:
            """The parameter stays in its table, for those who list the module's parameters."""
            return found is None and table.get(name) is ref()

        in_groups = functools.partial(ExpertsInGroups, weakref.proxy(ring), weight)
        place = Place(module, name, is_shadowed, in_groups, is_parameter=False)
        ring.add_place(weight.block, place, is_of_groups=True)

    def _add_packed(
        self,
        ring: WeightRing,
        module: nn.Module,
        name: str,
        packed: PackedWeight,
        is_meant: Callable[[object], bool],
    ) -> None:
        weights = [each for _, t in packed.tensors if (each := ring.weight_of(t)) is not None]
        number = weights[0].block
        block = ring.on_device[number]
        views = functools.partial(
            block.once, packed, lambda: [block.plain(each) for each in weights]
        )

        def parameter_on_device() -> torch.Tensor:
            if packed.parameter.requires_grad:
                raise thawed_weight(weights[0].name.removesuffix(f".{packed.tensors[0][0]}"))
            made = block.once((packed, name), lambda: packed.of(views()))
            if packed.may_be_repacked and made.untyped_storage()._cdata != block.key:
                block.forget((packed, name))
                return parameter_on_device()
            return made

        ring.add_place(number, Place(module, name, is_meant, parameter_on_device))
        if packed.has_state:
            is_there = functools.partial(operator.is_not, None)
            place = Place(
                module, "state", is_there, lambda: packed.state_of(views()), is_parameter=False
            )
            ring.add_place(number, place)
        # Nodes of the layer's graph may keep its weight.
        run = functools.partial(ring.holding, number)
        self._readers.exchange(module, _PACKED, Around(run))

    def uninstall(self) -> None:
        """Let layers find their parameters as before. It may be called again."""
        self._readers.take_off()
        if self.ring is not None:
            self.ring.figures()
            self.ring.stop()
            self.ring = None
        self._packed = {}


def _run_layer(ring: WeightRing, layer: int, run: Callable[[], Any]) -> Any:
    """Have the weights of a layer on the device while its forward runs."""
    with ring.inside(layer):
        return run()


def _run_module(
    ring: WeightRing, layer: int, name: str, has_groups: bool, run: Callable[[], Any]
) -> Any:
    """Run a module that has streamed weights, in a layer of several blocks.

    See ``engine/weights/checkpointed.py``. *has_groups*: it has experts in groups, else others.
    """
    with weights_kept_from_checkpoints(ring.find, name):
        ring.begin_groups(layer, are_read=has_groups)
        return run()
