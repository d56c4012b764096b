"""Puts streamed weights on a model, and takes them off; see ``hf_pyao/engine/weights``."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.ends import HostEnds
from hf_pyao.auto.install.layer_weights import LayerWeights
from hf_pyao.auto.install.ring_on_model import RingOnModel
from hf_pyao.auto.install.streaming_checks import (
    check_model,
    nothing_frozen,
)
from hf_pyao.config import GIB
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.engine.weights.blocks import Block, blocks_of
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.ring import WeightRing, compiled_by_now
from hf_pyao.errors import ConfigError, warn
from hf_pyao.model.map.module_map import FoundLayers
from hf_pyao.model.weights.places import move_others
from hf_pyao.model.weights.quantised import QuantisedWeight, move_state
from hf_pyao.model.weights.streamable import (
    StreamableLayer,
    largest_block_bytes,
    streamable_layers,
)
from hf_pyao.training_engines import compiled_part

logger = logging.getLogger(__name__)

_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


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
        ends_leave: the weights of embeddings and head are on the host, too.
        ends_may_leave: they may be put there later.
        disk_path: where weights lie for which the host has no room; None: they are refused.
        disk_label: how messages call that setting.

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
        *,
        ends_leave: bool = False,
        ends_may_leave: bool = False,
        disk_path: str | os.PathLike[str] | None = None,
        disk_label: str = "disk_path",
    ) -> None:
        check_model(model, label)
        self._model = weakref.ref(model)
        self.device = device
        self._layers = [(fqn, weakref.ref(layer)) for fqn, layer in found.layers]
        self._engine: weakref.ref[OffloadEngine] | None = None
        self._counts = UploadFigures()
        self._on_layers = RingOnModel(self._layers, link, device, self._counts)
        self.left_bytes: Counter[str] = Counter()
        """Bytes of the streamed layers' parameters that stay on the device, by reason."""
        layers = streamable_layers(model, found.layers)
        if not any(layer.nbytes for layer in layers):
            raise nothing_frozen(label, num_resident, layers)
        self._num_streamable = sum(bool(layer.tensors) for layer in layers)
        self._quantised: list[QuantisedWeight] = []
        self.places = LayerWeights(
            model,
            layers,
            link,
            device,
            disk_path=disk_path,
            disk_label=disk_label,
        )
        """Where the weights of layers are."""
        self._wanted: int | None = num_resident
        streamed = self._to_stream(layers, num_resident)
        self.ends_leave = ends_leave
        """Whether embeddings and head are on the host, now or from :meth:`put_on` on."""
        self._ends = HostEnds(self.places.on_host, link, device)
        self._ends_may_leave = ends_may_leave and self._ends.find(model, found.layers).nbytes > 0
        self._ends_are_asked_for = False
        if ends_leave:
            self._ends.prepare(model, found.layers)
        self.places.choose_for_disk(layers, streamed, self._ends.masters)
        self._masters = self.places.masters_of(layers, streamed)
        self.blocks: list[Block] = self._blocks_of([layers[number] for number in streamed])
        """What is uploaded: layers, or groups of experts and what else their layers have."""
        self.places.check_room(label, self._masters, self._ends.masters)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the host."""
        return sum(masters.nbytes for masters in self._masters) + self._ends.nbytes

    @property
    def ring(self) -> WeightRing | None:
        """What uploads the weights of layers; None while none are streamed."""
        return self._on_layers.ring

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def least_resident(self) -> int:
        """Layers that always stay, since nothing of them can be streamed."""
        return self.num_layers - self._num_streamable

    @property
    def num_asked_for(self) -> int:
        """Layers that stay from the next forward on."""
        return self.num_resident if self._wanted is None else self._wanted

    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    @property
    def num_resident(self) -> int:
        """Layers that are not streamed, now or from :meth:`put_on` on."""
        return len(self._layers) - len(self._masters)

    def _to_stream(self, layers: Sequence[StreamableLayer], num_resident: int) -> list[int]:
        """Return which layers are streamed where *num_resident* stay."""
        stay = resident_layers(len(layers), num_resident)
        return [n for n, layer in enumerate(layers) if n not in stay and layer.tensors]

    def _blocks_of(self, layers: Sequence[StreamableLayer]) -> list[Block]:
        """Return the blocks of :attr:`_masters`, which are those of *layers*."""
        blocks: list[Block] = []
        largest = largest_block_bytes(layers)
        for layer, masters in zip(layers, self._masters, strict=True):
            blocks.extend(blocks_of(masters, len(blocks), layer.groups(largest)))
        return blocks

    # ---- installing ----------------------------------------------------------------------------

    def put_on(self, engine: OffloadEngine) -> None:
        """Move the weights to the host and the rest to the device, and let layers find them.

        If it raises, :meth:`take_off` puts everything back.
        """
        self._engine = weakref.ref(engine)
        self._wanted = None
        model = self._model()
        if model is None:
            return
        layers = self._streamable(model)
        for masters in self._masters:
            if not self.places.move_off_device(masters, layers, is_new=self.ring is None):
                raise ConfigError(
                    f"the machine refused {masters.nbytes / GIB:.3f} GiB of host memory for the "
                    f"weights of layer {masters.layer!r}. Let more layers stay on the device.",
                    key="streaming-host-memory",
                )
        if not self._ends.move_to_host():
            raise ConfigError(
                f"the machine refused {self._ends.nbytes / GIB:.3f} GiB of host memory for "
                "embeddings and head. Give stream_embeddings='off'.",
                key="streaming-host-memory",
            )
        self._install(model, layers, engine)

    def ask_for(self, num_resident: int) -> None:
        """Let *num_resident* layers stay on the device from the next forward on."""
        self._wanted = num_resident

    @property
    def can_ask_for_ends(self) -> bool:
        """Whether embeddings and head may be put on the host, and are not yet."""
        return self._ends_may_leave and not (self.ends_leave or self._ends_are_asked_for)

    def ask_for_ends(self) -> None:
        """Let embeddings and head be on the host from the next forward on."""
        self._ends_are_asked_for = True
        self._wanted = self.num_asked_for

    def rearrange(self) -> None:
        """Let as many layers stay as was asked for last; before a forward.

        Graphs that were built before keep the blocks that they need. A layer for which there is no
        room on the device is streamed; one for which the host has none goes to the disk, or stays
        where there is none. Once weights lie on a disk, all layers keep their places.
        """
        wanted, self._wanted = self._wanted, None
        if self.places.placed_on_disk is not None:
            # Reads that other graphs need may be under way, and the file may be older than weights
            # that were changed on the device: layers keep their places.
            wanted = None
        ends_leave = self._ends_are_asked_for and not self.ends_leave
        self._ends_are_asked_for = False
        model, engine = self._model(), None if self._engine is None else self._engine()
        if wanted is None or model is None or engine is None:
            return
        layers = self._streamable(model)
        streamed, held = self._to_stream(layers, wanted), self.places.held
        if self.device.type != "cpu":  # an object made of parts does not change its own device
            fixed = [number for number in held if layers[number].flattened]
            streamed = sorted({*streamed, *fixed})
        if streamed == sorted(held) and not ends_leave:
            return
        quantised = self._quantised
        self._uninstall(engine)
        try:
            if ends_leave:
                self._let_ends_leave(model)
            self.places.move_to_disk(layers, [each for each in streamed if each not in held])
            for masters in self.places.masters_of(layers, streamed):
                if masters.memory is None and not self.places.move_off_device(
                    masters, layers, is_new=self.ring is None
                ):
                    warn(
                        logger,
                        "weights-stay",
                        "the host has no room for the weights of layer %r: they stay on the "
                        "device (%.3f GiB).",
                        masters.layer,
                        masters.nbytes / GIB,
                    )
            for layer in [each for each in held if each not in streamed]:
                if not self.places.move_to_device(layer, self.device):
                    warn(
                        logger,
                        "weights-streamed-late",
                        "the device has no room for the weights of layer %r: they are streamed "
                        "(%.3f GiB).",
                        held[layer].layer,
                        held[layer].nbytes / GIB,
                    )
        finally:
            self._follow(quantised)
            self._install(model, self._streamable(model), engine)

    def _let_ends_leave(self, model: nn.Module) -> None:
        layers = [(fqn, layer) for fqn, ref in self._layers if (layer := ref()) is not None]
        self._ends.prepare(model, layers)
        self.ends_leave = self._ends.move_to_host()
        if not self.ends_leave:
            warn(
                logger,
                "weights-stay",
                "the host has no room for embeddings and head: they stay on the device (%.3f GiB).",
                self._ends.nbytes / GIB,
            )
            self._ends.stay()
            self._ends_may_leave = False

    def _follow(self, quantised: Sequence[QuantisedWeight]) -> None:
        """Let quantised layers refer to their weights where they are now, tables and all."""
        for weight in quantised:
            weight.follow()
            module, parameter = weight.module, weight.parameter
            if module is not None and parameter is not None and parameter.device == self.device:
                move_state(module, parameter, self.device)

    def _streamable(self, model: nn.Module) -> list[StreamableLayer]:
        layers = [(fqn, layer) for fqn, ref in self._layers if (layer := ref()) is not None]
        return streamable_layers(model, layers)

    def _install(
        self, model: nn.Module, layers: Sequence[StreamableLayer], engine: OffloadEngine
    ) -> None:
        """Let layers find the weights that are held on the host, and move the rest."""
        self._masters = self.places.find_again(layers)
        numbers = [self.places.position_of(masters) for masters in self._masters]
        self.blocks = self._blocks_of([layers[number] for number in numbers])
        streamed = {id(p): p for b in self.blocks for w in b.weights if (p := w.ref()) is not None}
        in_parts = [weight for n in numbers for _, weight in layers[n].flattened]
        streamed |= {id(p): p for weight in in_parts if (p := weight.ref()) is not None}
        self._quantised = [weight for n in numbers for _, weight in layers[n].quantised]
        self.left_bytes = Counter()
        for number in numbers:
            self.left_bytes.update(layers[number].left_bytes)
        if self.ends_leave or self._ends_may_leave:
            self._ends.install(model, weakly(self._before_forward, None))
        move_others(model, lambda each: id(each) in streamed or self._ends.has(each), self.device)
        self._on_layers.install(
            model,
            self.blocks,
            self._quantised,
            in_parts,
            weakly(self._before_layers, None),
            self.places.read_ahead(self._masters, self._counts),
        )
        names = [n for n, p in model.named_parameters() if id(p) in streamed]
        names += self._ends.names(model)
        if names:
            vars(model)[_DDP_IGNORES] = [*vars(model).get(_DDP_IGNORES, ()), *names]
        if self.ring is not None:
            engine.stream(self.ring)

    def _before_forward(self) -> None:
        """Move what has come since to the device, such as adapters that were added.

        PEFT puts them where the base layer's weight is, which for it is the host.

        Raises:
            ConflictError: a part of the model was compiled meanwhile.
        """
        model = self._model()
        if model is None:
            return
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            if (compiled := compiled_part(model)) is not None:
                raise compiled_by_now(f"a part of the model ({type(compiled).__name__})")
        if self.device.type != "cpu":
            move_others(model, self._is_on_host, self.device)

    def _before_layers(self) -> None:
        if not self.ends_leave:  # otherwise the hook on the model's forward has done it
            self._before_forward()

    def _is_on_host(self, parameter: object) -> bool:
        return self._on_layers.has(parameter) or self._ends.has(parameter)

    def _uninstall(self, engine: OffloadEngine) -> None:
        """Let layers find their parameters as before. It may be called again."""
        engine.stream(None)
        self._on_layers.uninstall()
        model = self._model()
        if model is not None:
            vars(model).pop(_DDP_IGNORES, None)

    def take_off(self, engine: OffloadEngine) -> None:
        """Put everything back. It may be called again, also where it was interrupted.

        Graphs that were built before keep the blocks that they need. Parameters go back to the
        device that they came from; those that were on the host stay where they are.
        """
        self._wanted = None
        self._uninstall(engine)
        self._ends.uninstall()
        for masters in self._masters:
            masters.move_back()
        self._ends.move_back()
        for weight in self._quantised:
            weight.follow()
        self.places.release_reads()

    def streamed_bytes(self) -> dict[str, int]:
        """Return the bytes of the weights that are streamed, by the layer's qualified name."""
        return {masters.layer: masters.nbytes for masters in self._masters}

    def figures(self) -> dict[str, Any]:
        """Return what the uploads came to, as plain values."""
        if self.ring is not None:
            self.ring.figures()
        figures = self._counts.as_dict()
        if ends := self._ends.figures():
            figures["embeddings_and_head"] = ends
        return figures

    def describe(self) -> str:
        """Say in a sentence what is streamed."""
        ends = self._ends.describe()
        return f"{self._describe_layers()}; {ends}" if ends else self._describe_layers()

    def _describe_layers(self) -> str:
        num_layers = len(self._layers)
        if not self.blocks:
            return f"stream_weights: the weights of all {num_layers} layers are on the device"
        nbytes = sum(each.nbytes for each in self._masters)
        sentence = (
            f"stream_weights: the frozen weights of {len(self._masters)} of {num_layers} layers "
            f"({nbytes / GIB:.2f} GiB) are on the host and come layer by layer"
        )
        if phrase := self.places.describe_disk(self._masters):
            sentence += f"; {phrase}"
        num_groups = len(self.blocks) - len(self._masters)
        if num_groups:
            sentence += f", their experts in {num_groups} groups"
        if (num_processes := self.places.on_host.num_processes(self._masters)) > 1:
            sentence += f", in one copy for {num_processes} processes"
        left = {reason: nbytes for reason, nbytes in self.left_bytes.items() if nbytes}
        if left:
            reasons = ", ".join(f"{n / GIB:.3f} GiB {reason}" for reason, n in left.items())
            sentence += f"; of these layers stay on the device: {reasons}"
        return sentence
