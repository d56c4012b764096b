"""Puts streamed weights on a model, and takes them off; see ``hf_pyao/engine/weights``."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.ends import HostEnds
from hf_pyao.auto.install.links import pool_for
from hf_pyao.auto.install.ring_on_model import RingOnModel
from hf_pyao.auto.install.streaming_checks import (
    StreamingSettings,
    check_model,
    gib_by_reason,
    nothing_frozen,
    numbers_to_stream,
)
from hf_pyao.auto.install.weight_memory import WeightMemory
from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.engine.weights.blocks import Block, blocks_of
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.ring import WeightRing, compiled_by_now
from hf_pyao.errors import ConfigError, DiskError, warn
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.weights.packed import FlattenedWeight, PackedWeight, move_state
from hf_pyao.model.weights.places import move_others
from hf_pyao.model.weights.streamable import (
    StreamableLayer,
    largest_block_bytes,
    slot_bytes,
    streamable_layers,
)
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.weights.first_residents import first_residents, optimizer_bytes
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
        settings: what is streamed, and where weights lie for which the host has no room.
        link: transport and host memory.
        device: where compute runs.
        ends_leave: the weights of embeddings and head are on the host, too.

    Raises:
        ConfigError: no layer has frozen weights, or the host has no room for them.
        ConflictError: something else moves, shards or compiles the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundLayers,
        num_resident: int,
        settings: StreamingSettings,
        link: LinkContext,
        device: torch.device,
        *,
        ends_leave: bool = False,
    ) -> None:
        check_model(model, settings.label)
        self._model = weakref.ref(model)
        self.device = device
        self._layers = [(fqn, weakref.ref(layer)) for fqn, layer in found.layers]
        self._engine: weakref.ref[OffloadEngine] | None = None
        self._counts = UploadFigures()
        self._on_layers = RingOnModel(self._layers, link, device, self._counts)
        self.left_bytes: Counter[str] = Counter()
        """Bytes of the streamed layers' parameters that stay on the device, by reason."""
        self.blocks: list[Block] = []
        """What is uploaded: layers, or groups of experts and what else their layers have."""
        layers = streamable_layers(model, found.layers)
        if not any(layer.nbytes for layer in layers):
            raise nothing_frozen(settings.label, num_resident, layers)
        self.least_resident = sum(not layer.tensors for layer in layers)
        """Layers that always stay, since nothing of them can be streamed."""
        self._packed: list[PackedWeight] = []
        self.memory = WeightMemory(model, layers, link, device, settings)
        """Where the weights are."""
        self._wanted: int | None = num_resident
        streamed = numbers_to_stream(layers, num_resident)
        self.ends_leave = ends_leave
        """Whether embeddings and head are on the host, now or from :meth:`put_on` on."""
        self._ends = HostEnds(self.memory, link, device)
        may_leave = settings.embeddings == settings.value == "auto"
        self._ends_may_leave = may_leave and self._ends.find(model, found.layers).nbytes > 0
        self._ends_are_asked_for = False
        if ends_leave:
            self._ends.prepare(model, found.layers)
        self.memory.plan(layers, streamed, self._ends.masters)
        self.memory.check_room(settings.label, self._ends.masters)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the host."""
        return sum(each.nbytes for each in self.memory.held.values()) + self._ends.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that :meth:`put_on` takes; of those on a disk, for reads alone."""
        return self.memory.needed_bytes(self._ends.masters)

    @property
    def ring(self) -> WeightRing | None:
        """What uploads the weights of layers; None while none are streamed."""
        return self._on_layers.ring

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

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
        return len(self._layers) - len(self.memory.held)

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
        for number, masters in self.memory.held.items():
            if not self.memory.move_off_device(number, layers):
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
        self.memory.tell_of_copies([*self.memory.held.values(), *self._ends.masters])
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
        if self.memory.disk.placed is not None:
            # Reads that other graphs need may be under way, and the file may be older than weights
            # that were changed on the device: layers keep their places.
            wanted = None
        ends_leave = self._ends_are_asked_for and not self.ends_leave
        self._ends_are_asked_for = False
        model, engine = self._model(), None if self._engine is None else self._engine()
        if wanted is None or model is None or engine is None:
            return
        layers = self._streamable(model)
        streamed, held = numbers_to_stream(layers, wanted), self.memory.held
        if self.device.type != "cpu":
            fixed = [number for number in held if _is_fixed(layers[number])]
            streamed = sorted({*streamed, *fixed})
        if streamed == sorted(held) and not ends_leave:
            return
        self._uninstall(engine)
        try:
            if ends_leave:
                self._let_ends_leave(model)
            self.memory.plan(layers, streamed)
            for layer, masters in list(self.memory.held.items()):
                if masters.memory is None:
                    self._move_off_device(layer, masters, layers)
                if layer in streamed:
                    continue
                if not self.memory.move_to_device(layer, self.device):
                    warn(
                        logger,
                        "weights-streamed-late",
                        "the device has no room for the weights of layer %r: they are streamed "
                        "(%.3f GiB).",
                        masters.layer,
                        masters.nbytes / GIB,
                    )
        finally:
            self.memory.leave_planned()
            self._follow()
            self._install(model, self._streamable(model), engine)

    def _move_off_device(
        self, layer: int, masters: Masters, layers: Sequence[StreamableLayer]
    ) -> None:
        try:
            if self.memory.move_off_device(layer, layers):
                return
            why = "the host has no room."
        except (ConfigError, DiskError) as error:
            why = str(error)
            self.memory.forget_unused_disk()
        warn(
            logger,
            "weights-stay",
            "the weights of layer %r stay on the device (%.3f GiB): %s",
            masters.layer,
            masters.nbytes / GIB,
            why,
        )

    def _let_ends_leave(self, model: nn.Module) -> None:
        self._ends.prepare(model, self._living_layers())
        self.ends_leave = self._ends.move_to_host()
        if not self.ends_leave:
            warn(
                logger,
                "weights-stay",
                "the weights of embeddings and head stay on the device (%.3f GiB): the host has no "
                "room.",
                self._ends.nbytes / GIB,
            )
            self._ends.stay()
            self._ends_may_leave = False

    def _follow(self) -> None:
        """Let quantised layers refer to their weights where they are now, tables and all."""
        for weight in self._packed:
            weight.follow()
            module, parameter = weight.module, weight.parameter
            if module is not None and parameter is not None and parameter.device == self.device:
                move_state(module, parameter, self.device)

    def _living_layers(self) -> list[tuple[str, nn.Module]]:
        return [(fqn, layer) for fqn, ref in self._layers if (layer := ref()) is not None]

    def _streamable(self, model: nn.Module) -> list[StreamableLayer]:
        return streamable_layers(model, self._living_layers())

    def _install(
        self, model: nn.Module, layers: Sequence[StreamableLayer], engine: OffloadEngine
    ) -> None:
        """Let layers find the weights that are held on the host, and move the rest."""
        found = [layers[number] for number in self.memory.held]
        largest_bytes = largest_block_bytes(found)
        self._packed = [weight for layer in found for _, weight in layer.packed]
        self.blocks, self.left_bytes = [], Counter()
        for layer, masters in zip(found, self.memory.held.values(), strict=True):
            self.blocks += blocks_of(masters, len(self.blocks), layer.groups(largest_bytes))
            self.left_bytes.update(layer.left_bytes)
        if self.ends_leave or self._ends_may_leave:
            self._ends.install(model, self._living_layers(), weakly(self._before_forward, None))
        self._on_layers.install(
            model,
            self.blocks,
            found,
            weakly(self._before_layers, None),
            self.memory.disk.read_ahead(self.memory.held.values(), self._counts),
        )
        move_others(model, self._is_on_host, self.device)
        parameters = model.named_parameters(remove_duplicate=False)
        if names := [name for name, each in parameters if self._is_on_host(each)]:
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
        for masters in self.memory.held.values():
            masters.move_back()
        self._ends.move_back()
        self._follow()
        self.memory.disk.release()

    def streamed_bytes(self) -> dict[str, int]:
        """Return the bytes of the weights that are streamed, by the layer's qualified name."""
        return {masters.layer: masters.nbytes for masters in self.memory.held.values()}

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
        return "; ".join(filter(None, (self._describe_layers(), self._ends.describe())))

    def _describe_layers(self) -> str:
        num_layers = len(self._layers)
        if not self.blocks:
            return f"stream_weights: the weights of all {num_layers} layers are on the device"
        found = list(self.memory.held.values())
        nbytes = sum(each.nbytes for each in found)
        sentence = (
            f"stream_weights: the frozen weights of {len(found)} of {num_layers} layers "
            f"({nbytes / GIB:.2f} GiB) are on the host and come layer by layer"
        )
        if phrase := self.memory.disk.describe(found):
            sentence += f"; {phrase}"
        num_groups = len(self.blocks) - len(found)
        if num_groups:
            sentence += f", their experts in {num_groups} groups"
        if (num_processes := self.memory.num_processes(found)) > 1:
            sentence += f", in one copy for {num_processes} processes"
        left = {reason: nbytes for reason, nbytes in self.left_bytes.items() if nbytes}
        if left:
            sentence += f"; of these layers stay on the device: {gib_by_reason(left)}"
        return sentence


def _is_fixed(layer: StreamableLayer) -> bool:
    """Say whether *layer* has an object made of parts, which does not change its own device."""
    return any(isinstance(weight, FlattenedWeight) for _, weight in layer.packed)


def check_can_stream(model: nn.Module, config: PyAOConfig, *, will_be_frozen: bool = False) -> None:
    """Refuse a model whose weights cannot be streamed as *config* asks for; nothing is changed.

    For whoever prepares data, or moves the model, before it is attached.

    Args:
        model: on whatever device.
        config: what is asked for.
        will_be_frozen: all its parameters will be, since adapters are yet to be added.

    Raises:
        ConfigError: as :class:`StreamedLayers`.
        ConflictError: as :class:`StreamedLayers`.
        NoLayersFoundError: no layers were found.
    """
    if config.stream_weights == "off":
        return
    trained = [each for each in model.parameters() if will_be_frozen and each.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        streamed_by(model, config)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def streamed_by(model: nn.Module, config: PyAOConfig) -> StreamedLayers:
    """Return what would stream the weights of *model* by *config*, which does not have it off.

    Where it is to be found out how many layers stay, all do. Errors are those of
    :func:`check_can_stream`.
    """
    settings = StreamingSettings.of(config)
    found = find_layers(model, config.layers)
    is_auto, device = settings.value == "auto", torch.device("cpu")
    number = len(found.layers) if is_auto else int(settings.value)
    transport = BlockingTransport()
    link = LinkContext(transport, pool_for(config.host_memory_gib, transport, device), None)
    ends_leave = settings.embeddings == "on" and not is_auto
    return StreamedLayers(model, found, number, settings, link, device, ends_leave=ends_leave)


def streaming_of(
    model: nn.Module,
    found: FoundLayers,
    settings: StreamingSettings,
    link: LinkContext,
    device: torch.device,
    limit: DeviceLimit | None = None,
) -> StreamedLayers | None:
    """Return what streams the weights that ``PyAOConfig.stream_weights`` asks for; None for none.

    Args:
        model: the whole model, on the host or on the device.
        found: its layers.
        settings: how many layers stay.
        link: transport and host memory.
        device: where compute runs.
        limit: memory of the device; None: it is not known.

    Raises:
        ConfigError: as :class:`StreamedLayers`, or ``"auto"`` where no limit is known.
        ConflictError: as :class:`StreamedLayers`.
    """
    stream_weights, label = settings.value, settings.label
    if stream_weights == "off":
        return None
    if stream_weights == "auto" and limit is None and device.type != "cpu":
        raise ConfigError(
            f"{label} is 'auto', and how much memory {device} has is not known. Give "
            f"device_memory_gib, or for {label} a number of layers that stay, such as 0.",
            key="device-memory-unknown",
        )
    ends_leave = settings.embeddings == "on"
    if limit is not None:
        stream_weights, fits = _at_first(model, found, stream_weights, limit)
        ends_leave |= settings.embeddings == "auto" and not fits
    elif stream_weights == "auto" and not ends_leave:
        return None  # everything fits: the device is the host
    elif stream_weights == "auto":
        stream_weights = len(found.layers)
    assert isinstance(stream_weights, int)
    streamed = StreamedLayers(
        model, found, stream_weights, settings, link, device, ends_leave=ends_leave
    )
    stay = streamed.num_resident - streamed.least_resident
    on_disk = streamed.memory.disk.placed
    if settings.value == "auto" and stay and on_disk is not None:
        warn(
            logger,
            "weights-keep-places",
            "%s is 'auto', and the weights of %d layers lie on the disk: those of %d others stay "
            "on the device for as long as the model is attached, since layers keep their places "
            "then. If memory runs out, give %s=0.",
            label,
            len(on_disk.layers),
            stay,
            label,
        )
    return streamed


def _at_first(
    model: nn.Module, found: FoundLayers, stream_weights: int | str, limit: DeviceLimit
) -> tuple[int, bool]:
    """Return how many layers stay until the first batch is known, and whether the device has room.

    A number that was given stays.
    """
    parameters = list(model.parameters())
    layers = streamable_layers(model, found.layers)
    sizes = [layer.nbytes for layer in layers]
    all_bytes = sum(map(_dense_bytes, (*parameters, *model.buffers())))
    gradient_bytes = sum(_dense_bytes(each) for each in parameters if each.requires_grad)
    other_bytes = all_bytes - sum(sizes) + gradient_bytes + optimizer_bytes(parameters)

    given = stream_weights if isinstance(stream_weights, int) else None
    return first_residents(sizes, slot_bytes(layers), other_bytes, limit.nbytes, given)


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if has_storage(tensor) else 0
