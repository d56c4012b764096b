"""Puts a ring of streamed weights on a model's layers, and takes it off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hf_pyao.auto.install.streamed_forwards import LayerForward, ModuleForward
from hf_pyao.auto.install.weight_readers import WeightReaders
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.engine.weights.blocks import Block
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.read_ahead import ReadAhead
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.engine.weights.tables import StreamedTable
from hf_pyao.model.weights.experts import ExpertsInGroups
from hf_pyao.model.weights.flattened import FlattenedWeight
from hf_pyao.model.weights.quantised import QuantisedForward, QuantisedWeight

_LAYER = "_pyao_streamed_layer"
_MODULE = "_pyao_streamed_module"
_QUANTISED = "_pyao_streamed_quantised"


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
        self._readers = WeightReaders(self.has)

    def has(self, parameter: object) -> bool:
        """Say whether *parameter* is streamed now."""
        return self.ring is not None and self.ring.streams(parameter)

    def install(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        quantised: Sequence[QuantisedWeight],
        in_parts: Sequence[FlattenedWeight],
        on_forward: Callable[[], None],
        read_ahead: ReadAhead | None = None,
    ) -> None:
        """Let layers find the weights of *blocks*, which are on the host.

        Args:
            model: the whole model.
            blocks: in forward order; none: nothing is done.
            quantised: those of their weights that are quantised.
            in_parts: parameters whose parts are among their weights.
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
            of_layer,
            self._link,
            self._device,
            read_groups=ExpertsInGroups,
            on_forward=on_forward,
            counts=self._counts,
            read_ahead=read_ahead,
        )
        for weight in quantised:
            self._put_on_quantised(weight, ring)
        for each in in_parts:
            ring.read_in_parts(each.ref, [tensor for _, tensor in each.tensors], each.of)
        self._readers.put_on(model, self.has, lambda _: ring)
        for index, (_, ref) in enumerate(self._layers):
            if (layer := ref()) is None:
                continue
            if len(of_layer[index]) > 1:
                for module in layer.modules():
                    if isinstance(module._parameters, StreamedTable):
                        self._readers.exchange(module, _MODULE, ModuleForward(ring))
            self._readers.exchange(layer, _LAYER, LayerForward(ring, index))

    def uninstall(self) -> None:
        """Let layers find their parameters as before. It may be called again."""
        self._readers.take_off()
        if self.ring is not None:
            self.ring.figures()
            self.ring.stop()
            self.ring = None

    def _put_on_quantised(self, weight: QuantisedWeight, ring: WeightRing) -> None:
        """Let a linear layer of bitsandbytes run over its packed weight in a slot."""
        weight.move_tables(self._device)
        weight.follow()
        module, parameter = weight.module, weight.parameter
        streamed = ring.weight_of(parameter)
        if module is not None and parameter is not None and streamed is not None:
            forward = QuantisedForward(ring, weight)
            streamed.is_read_as(weakly(forward.stand_in, None))
            self._readers.exchange(module, _QUANTISED, forward)
