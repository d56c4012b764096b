"""Puts streamed weights on a model, and takes them off; see ``hf_pyao/engine/weights``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.streaming_checks import check_model, no_room, nothing_frozen
from hf_pyao.config import GIB
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.engine.weights.blocks import Block
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.engine.weights.tables import put_on, take_off
from hf_pyao.errors import ConfigError
from hf_pyao.model.map.module_map import FoundLayers
from hf_pyao.model.patching.exchanged_forwards import has_forward_of_its_own
from hf_pyao.model.patching.lasting_forward import LeftBehind, exchange, give_back
from hf_pyao.model.weights.places import StayingParameters, move_others
from hf_pyao.model.weights.quantised import QuantisedForward, QuantisedWeight
from hf_pyao.model.weights.streamable import streamable_layers
from hf_pyao.training_engines import package_of

_LAYER = "_pyao_streamed_layer"
_CAST = "_pyao_streamed_cast"
_QUANTISED = "_pyao_streamed_quantised"
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


class LayerForward(LeftBehind):
    """Has a layer's weights on the device while its forward runs."""

    def __init__(self, ring: WeightRing, index: int) -> None:
        self._ring = ring
        self._index = index

    def run(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the layer's own forward returns."""
        with self._ring.inside(self._index):
            return own(*args, **kwargs)


class CastingForward(LeftBehind):
    """Casts the weight of a linear module as autocast would, so that the cast is known as its."""

    def __init__(self, ring: WeightRing, device_type: str) -> None:
        self._ring = ring
        self._device_type = device_type

    def run(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module's own forward returns."""
        if not torch.is_autocast_enabled(self._device_type):
            return own(*args, **kwargs)
        weight = dict.get(module._parameters, "weight")
        assert weight is not None
        dtype = torch.get_autocast_dtype(self._device_type)
        if weight.dtype == dtype:
            return own(*args, **kwargs)
        with self._ring.casts(weight, dtype):
            return own(*args, **kwargs)


class StreamedLayers:
    """The streamed weights of one model, from :meth:`put_on` until :meth:`take_off`.

    Making one changes nothing: all that may be refused is refused here.

    Args:
        model: the whole model, on the host or on the device.
        found: its layers.
        num_resident: layers that stay on the device.
        label: how messages call that setting.
        link: transport and host memory.
        device: where compute runs.

    Raises:
        ConfigError: no layer has frozen weights, or the host has no room for them.
        ConflictError: something else moves, shards or compiles the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundLayers,
        num_resident: int,
        label: str,
        link: LinkContext,
        device: torch.device,
    ) -> None:
        check_model(model, label)
        self._model = weakref.ref(model)
        self.device = device
        self._link = link
        self._store: Store = link.tiers.stores[0]
        self._layers = [weakref.ref(layer) for _, layer in found.layers]
        self.ring: WeightRing | None = None
        self._owners: list[weakref.ref[nn.Module]] = []
        self._handles: list[tuple[weakref.ref[nn.Module], str, Any]] = []
        self._staying: StayingParameters | None = None
        self.left_bytes: Counter[str] = Counter()
        """Bytes of the streamed layers' parameters that stay on the device, by reason."""
        layers = streamable_layers(model, found.layers)
        if not any(layer.nbytes for layer in layers):
            raise nothing_frozen(label, num_resident)
        stay = resident_layers(len(layers), num_resident)
        self._block_of_layer: list[int | None] = []
        self._quantised: list[QuantisedWeight] = []
        self.blocks: list[Block] = []
        for index, layer in enumerate(layers):
            is_streamed = index not in stay and bool(layer.parameters)
            self._block_of_layer.append(len(self.blocks) if is_streamed else None)
            if is_streamed:
                self.blocks.append(Block(len(self.blocks), layer.fqn, layer.tensors))
                self._quantised.extend(weight for _, weight in layer.quantised)
                self.left_bytes.update(layer.left_bytes)
        self._check_room(label)

    @property
    def nbytes(self) -> int:
        """Bytes of the streamed weights on the host."""
        return sum(block.nbytes for block in self.blocks)

    def _check_room(self, label: str) -> None:
        before = sum(block.host_bytes_before for block in self.blocks)
        room = self._store.room_to_reserve(before)
        if self.nbytes > room:
            raise no_room(label, len(self.blocks), self.nbytes, room)

    # ---- installing ----------------------------------------------------------------------------

    def put_on(self, engine: OffloadEngine) -> None:
        """Move the weights to the host and the rest to the device, and let layers find them.

        If it raises, :meth:`take_off` puts everything back.
        """
        model = self._model()
        if model is None or not self.blocks:
            return
        for block in self.blocks:
            before = block.host_bytes_before
            memory = self._store.reserve(block.nbytes, in_place_of_bytes=before)
            if memory is None:
                raise ConfigError(
                    f"the machine refused {block.nbytes / GIB:.3f} GiB of host memory for the "
                    f"weights of layer {block.layer!r}. Let more layers stay on the device."
                )
            block.move_to(memory)
        self.ring = ring = WeightRing(
            self.blocks,
            self._block_of_layer,
            self._link,
            self.device,
            on_forward=weakly(self._move_newcomers, None),
        )
        streamed = {id(p): p for b in self.blocks for w in b.weights if (p := w.ref()) is not None}
        move_others(model, lambda each: id(each) in streamed, self.device)
        for weight in self._quantised:
            self._put_on_quantised(weight, ring)
        self._staying = StayingParameters(lambda each: ring.weight_of(each) is not None)
        for module in model.modules():
            if any(id(p) in streamed for p in module._parameters.values()):
                self._owners.append(weakref.ref(module))
                self._staying.put_on(module)
                if _is_linear(module) and _dtype_of(module, "weight") == torch.float32:
                    self._exchange(module, _CAST, CastingForward(ring, self.device.type))
                put_on(module, ring)
        for index, ref in enumerate(self._layers):
            if (layer := ref()) is not None:
                self._exchange(layer, _LAYER, LayerForward(ring, index))
        names = [name for name, p in model.named_parameters() if id(p) in streamed]
        vars(model)[_DDP_IGNORES] = [*vars(model).get(_DDP_IGNORES, ()), *names]
        engine.stream(ring)

    def _move_newcomers(self) -> None:
        """Move what has come since to the device, such as adapters that were added.

        PEFT puts them where the base layer's weight is, which for it is the host.
        """
        model, ring = self._model(), self.ring
        if model is not None and ring is not None and self.device.type != "cpu":
            move_others(model, lambda each: ring.weight_of(each) is not None, self.device)

    def _put_on_quantised(self, weight: QuantisedWeight, ring: WeightRing) -> None:
        """Let a linear layer of bitsandbytes run over its packed weight in a slot."""
        weight.move_tables(self.device)
        weight.follow()
        module, parameter = weight.module, weight.parameter
        streamed = ring.weight_of(parameter)
        if module is not None and parameter is not None and streamed is not None:
            forward = QuantisedForward(ring, weight)
            streamed.is_read_as(weakly(forward.stand_in, None))
            self._exchange(module, _QUANTISED, forward)

    def _exchange(self, module: nn.Module, key: str, handle: Any) -> None:
        self._handles.append((weakref.ref(module), key, handle))
        exchange(module, key, handle)

    def take_off(self, engine: OffloadEngine) -> None:
        """Put everything back. It may be called again, also where it was interrupted.

        Graphs that were built before keep the blocks that they need. Parameters go back to the
        device that they came from; those that were on the host stay where they are.
        """
        engine.stream(None)
        for ref, key, handle in self._handles:
            if (module := ref()) is not None:
                give_back(module, key, handle)
        for owner in self._owners:
            if (module := owner()) is not None:
                if self._staying is not None:
                    self._staying.take_off(module)
                take_off(module)
        if self.ring is not None:
            self.ring.stop()
        for block in self.blocks:
            block.move_back()
        for weight in self._quantised:
            weight.follow()
        model = self._model()
        if model is not None:
            vars(model).pop(_DDP_IGNORES, None)

    def figures(self) -> dict[str, Any]:
        """Return what the uploads came to, as plain values; empty before :meth:`put_on`."""
        return {} if self.ring is None else self.ring.figures().as_dict()

    def describe(self) -> str:
        """Say in a sentence what is streamed."""
        num_layers = len(self._block_of_layer)
        sentence = (
            f"stream_weights: the frozen weights of {len(self.blocks)} of {num_layers} layers "
            f"({self.nbytes / GIB:.2f} GiB) are on the host and come layer by layer"
        )
        left = {reason: nbytes for reason, nbytes in self.left_bytes.items() if nbytes}
        if left:
            reasons = ", ".join(f"{n / GIB:.3f} GiB {reason}" for reason, n in left.items())
            sentence += f"; of these layers stay on the device: {reasons}"
        return sentence


def _dtype_of(module: nn.Module, name: str) -> torch.dtype | None:
    parameter = module._parameters.get(name)
    return None if parameter is None else parameter.dtype


def _is_linear(module: nn.Module) -> bool:
    """Say whether autocast casts the weight of *module* for one product, in its own forward."""
    if has_forward_of_its_own(module):
        return False
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    return kind.__name__ == "Conv1D" and package_of(kind) == "transformers"
