"""Puts the weights of embeddings and head on the host, and takes them off; see
``hf_pyao/engine/weights/on_demand.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.streaming_checks import gib_by_reason
from hf_pyao.auto.install.weight_memory import WeightMemory
from hf_pyao.auto.install.weight_readers import Around, WeightReaders
from hf_pyao.config import GIB
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weights.figures import OnDemandFigures
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.on_demand import WeightsOnDemand
from hf_pyao.engine.weights.tables import READER
from hf_pyao.model.weights.ends import Ends, ends_of
from hf_pyao.model.weights.places import ComputeDevice

Layers = Sequence[tuple[str, nn.Module]]


class _Reader(Around):
    """Runs a module's forward with weights that are read on demand."""

    def __init__(self, source: WeightsOnDemand) -> None:
        super().__init__(source.run)
        self.source = source


class HostEnds:
    """The frozen weights of a model's embeddings and head, as far as they are on the host.

    Making one changes nothing, and they are all on the device.

    Args:
        memory: puts weights into host memory.
        link: transport and host memory.
        device: where compute runs.
    """

    def __init__(self, memory: WeightMemory, link: LinkContext, device: torch.device) -> None:
        self._memory = memory
        self._link = link
        self._device = device
        self._found = Ends()
        self.masters: list[Masters] = []
        """Weights that are on the host, or are to be: one for each parameter."""
        self.source: WeightsOnDemand | None = None
        """What the model reads them from while it is installed."""
        self._counts = OnDemandFigures()
        self._readers = WeightReaders(self.has, device)
        self._compute_device = ComputeDevice(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the host."""
        return sum(each.nbytes for each in self.masters)

    def has(self, parameter: object) -> bool:
        """Say whether *parameter* is on the host now."""
        return self.source is not None and self.source.weight_of(parameter) is not None

    def find(self, model: nn.Module, layers: Layers) -> Ends:
        """Return the weights of *model* that may be on the host; remember what reads them.

        Args:
            model: the whole model.
            layers: qualified name and module of its layers.
        """
        self._found = ends_of(model, layers)
        return self._found

    def prepare(self, model: nn.Module, layers: Layers) -> None:
        """Find the weights that are to be on the host; arguments as of :meth:`find`."""
        ends = self.find(model, layers)
        self.masters = [
            Masters(name, [(name, each)], home=each.device) for name, each in ends.parameters
        ]

    def move_to_host(self) -> bool:
        """Copy the weights to the host's memory; return False if there is no room for one."""
        return all(each.memory is not None or self._memory.take(each) for each in self.masters)

    def stay(self) -> None:
        """Let the weights be on the device, as before :meth:`prepare`."""
        self.move_back()
        for masters in self.masters:
            self._memory.give_back(masters)
        self.masters = []

    def install(self, model: nn.Module, layers: Layers, on_forward: Callable[[], None]) -> None:
        """Let *model* read the weights on demand that are on the host. It may be called again.

        Without weights, forwards are watched all the same: weights may leave while one runs.

        Args:
            model: the whole model.
            layers: qualified name and module of its layers, which read none of them.
            on_forward: called as a forward begins.
        """
        if self.source is None:
            self.source = WeightsOnDemand(self._link, self._device, on_forward, self._counts)
            for module in model.modules():
                has_forward = type(module).forward is not nn.Module.forward
                inside = map(id, module.modules())
                if has_forward and not self._found.modules.isdisjoint(inside):
                    self._readers.exchange(module, READER, _Reader(self.source))
            for _, layer in layers:
                self._readers.exchange(layer, READER + "_layer", Around(self.source.run_layer))
        if not self.masters or self._readers:
            return
        self.source.take(self.masters)
        self._readers.put_on(model, self.has)
        self._compute_device.put_on(model)

    def uninstall(self) -> None:
        """Let the model find its parameters as before. It may be called again."""
        self._readers.take_off()
        self._compute_device.take_off()
        if self.source is not None:
            self.source.figures()
            self.source.stop()
            self.source = None

    def move_back(self) -> None:
        """Return the weights to the device that they came from. It may be called again."""
        for masters in self.masters:
            masters.move_back()

    def figures(self) -> dict[str, Any]:
        """Return what was uploaded, as plain values; nothing if the weights are on the device."""
        if self.source is not None:
            self.source.figures()
        return self._counts.as_dict() if self._counts.pool_bytes else {}

    def describe(self) -> str:
        """Say in a phrase what is on the host."""
        if not self._readers:
            return ""
        phrase = f"embeddings and head ({self.nbytes / GIB:.3f} GiB) are on the host"
        if left := {reason: each for reason, each in self._found.left_bytes.items() if each}:
            phrase += f"; of these stay on the device: {gib_by_reason(left)}"
        return phrase
