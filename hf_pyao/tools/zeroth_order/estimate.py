"""``pyao estimate --zeroth-order``: device memory of zeroth-order fine-tuning, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.tables import put_on, take_off
from hf_pyao.engine.zeroth_order.noise import NoiseKey
from hf_pyao.engine.zeroth_order.perturbation import (
    CHUNK_ELEMENTS,
    ZerothOrderSettings,
    perturbed,
)
from hf_pyao.engine.zeroth_order.trained import TrainedBlock, TrainedWeights
from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.model.head.head_loss import install_head_loss
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.settings.removed import refuse_removed
from hf_pyao.text import say
from hf_pyao.tools.estimate.command import DEFAULT_LENGTH
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import check_sequence_length, config_of, parse_model

GB = 10**9
_NUM_SLOTS = 2
_LABELS = {
    "slot_bytes": "two slots of the largest block",
    "resident_bytes": "weights outside of layers",
    "pass_bytes": "a pass: perturbed weights, noise, activations, loss",
    "peak_bytes": "together",
    "host_bytes": "weights (and what goes with them) on the host",
}


@dataclass(frozen=True, kw_only=True)
class ZerothOrderMemory:
    """Bytes on the device over a step, with all layers on the host."""

    slot_bytes: int
    """One slot: the largest block."""
    resident_bytes: int
    """Weights and buffers outside of layers: embeddings, head, norms."""
    pass_bytes: int
    """Most that one pass allocates: perturbed weights, noise, activations, logits and loss."""
    host_bytes: int
    """Weights on the host."""

    @property
    def peak_bytes(self) -> int:
        """All of it; the allocator's rounding and CUDA's own memory come on top."""
        return _NUM_SLOTS * self.slot_bytes + self.resident_bytes + self.pass_bytes


class _FakeReads:
    """What modules read in a pass on fake tensors: new tensors, kept until the layer call ends.

    Args:
        ledger: is told of the noise.
        in_layers: by ``id``, the parameters of layers.
        settings: of zeroth order.
    """

    device = torch.device("cpu")

    def __init__(
        self, ledger: MemoryLedger, in_layers: set[int], settings: ZerothOrderSettings
    ) -> None:
        self._ledger = ledger
        self._in_layers = in_layers
        self._settings = settings
        self._noise_bytes = _noise_bytes()
        self._given: dict[int, torch.Tensor] = {}

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is a layer's."""
        return id(parameter) in self._in_layers

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say False: nothing is put into a table."""
        return False

    def read(self, parameter: Any) -> Any:
        """Return a tensor like *parameter*."""
        if parameter is None or id(parameter) in self._given:
            return self._given.get(id(parameter))
        given = torch.empty_like(parameter)
        beside = int(min(1.0, parameter.numel() / CHUNK_ELEMENTS) * self._noise_bytes)
        if self.streams(parameter):
            self._given[id(parameter)] = given
            if self._settings.transfer_dtype is not None:
                beside += parameter.nbytes  # the unpacked weight
        elif self._settings.momentum:
            beside = max(beside, 4 * parameter.numel())  # copies for the update
        self._ledger.note((given,), beside)
        return given

    def end_layer(self, *_: object) -> None:
        """Let go of what a layer has read."""
        self._given.clear()


def _noise_bytes() -> int:
    """Return what perturbing a chunk of a weight allocates beside the result, counted on a CPU."""
    weight, ledger = torch.zeros(CHUNK_ELEMENTS, dtype=torch.float16), MemoryLedger()
    with torch.no_grad(), NotingMode(ledger):
        perturbed(weight, NoiseKey(0, 0), 0, 1e-3)
    return ledger.peak_bytes - 2 * weight.nbytes


def zeroth_order_memory(
    config: Any,
    micro_batch: int = 1,
    sequence_length: int = 2048,
    dtype: str = "float16",
    settings: ZerothOrderSettings | None = None,
    head_loss: str = "off",
) -> ZerothOrderMemory:
    """Run a pass on fake tensors, and return what a step has on the device.

    Args:
        config: of transformers; a causal language model's.
        micro_batch: samples.
        sequence_length: tokens of each.
        dtype: of weights and arithmetic.
        settings: of zeroth order; None: the defaults.
        head_loss: as for ``ZerothOrder``.
    """
    settings = settings or ZerothOrderSettings()
    with FakeTraining(config=config, dtype=dtype).model() as (model, fake_mode):
        layers = find_layers(model).layers
        trained = TrainedWeights(model.named_parameters(), settings)
        blocks = [
            TrainedBlock(0, Masters(fqn, list(layer.named_parameters())), trained)
            for fqn, layer in layers
        ]
        in_layers = {id(p) for _, layer in layers for p in layer.parameters()}
        resident = [p for p in model.parameters() if id(p) not in in_layers]
        ledger = MemoryLedger()
        ledger.note([*resident, *model.buffers()])
        resident_bytes = ledger.live_bytes
        reads = _FakeReads(ledger, in_layers, settings)
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                put_on(module, reads)
                stack.callback(take_off, module)
            for _, layer in layers:
                stack.callback(layer.register_forward_hook(reads.end_layer).remove)
            stack.callback(install_head_loss(model, head_loss, without_gradients=True).uninstall)
            ids = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
            with torch.no_grad(), NotingMode(ledger, fake_mode):
                model(input_ids=ids, labels=ids)
    state_bytes = 4 * sum(p.numel() for p in resident) * bool(settings.momentum)
    return ZerothOrderMemory(
        slot_bytes=max(block.nbytes for block in blocks),
        resident_bytes=resident_bytes + state_bytes,
        pass_bytes=ledger.peak_bytes - resident_bytes,
        host_bytes=sum(block.host_nbytes for block in blocks),
    )


def _chosen(given: Sequence[str]) -> tuple[ZerothOrderSettings, str]:
    """Return the settings and the ``head_loss`` that texts such as ``momentum=0.9`` choose.

    Raises:
        ConfigError: one is no setting, or has a value that it does not take.
    """
    values: dict[str, Any] = {"momentum": 0.0, "transfer_dtype": None, "head_loss": "off"}
    for text in given:
        name, has_value, value = text.partition("=")
        name = name.replace("-", "_")
        refuse_removed(f"ZerothOrder.{name}", name, value)
        if name not in values or not has_value:
            raise unknown_name(
                "setting of --zeroth-order", text, [f"{each}=..." for each in values]
            )
        values[name] = value
    if values["head_loss"] not in ("off", "chunked"):
        raise unknown_name("head_loss", values["head_loss"], ("off", "chunked"))
    with contextlib.suppress(ValueError):  # refused below
        values["momentum"] = float(values["momentum"])
    head_loss = values.pop("head_loss")
    return ZerothOrderSettings(**values), head_loss


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    for name in ("lora", "output", "step"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name} has no effect with --zeroth-order, which estimates all weights: drop "
                "it.",
                key="setting-without-effect",
            )
    spec = parse_model(args.model)
    config = config_of(spec)
    length = args.sequence_length or DEFAULT_LENGTH
    check_sequence_length(config, length)
    micro_batch = args.micro_batch or 1
    settings, head_loss = _chosen(args.zeroth_order)
    found = zeroth_order_memory(config, micro_batch, length, settings=settings, head_loss=head_loss)
    if args.json:
        asked = {"model": spec.name, "micro_batch": micro_batch, "tokens": length}
        asked |= {"momentum": settings.momentum, "transfer_dtype": settings.transfer_dtype}
        asked |= {"head_loss": head_loss, "dtype": "float16"}
        say(json.dumps({**asked, **asdict(found), "peak_bytes": found.peak_bytes}))
        return 0
    given = "".join(f", {each}" for each in args.zeroth_order)
    size = f"{micro_batch} x {length} tokens"
    say(f"{spec.name}, zeroth order, float16{given}, {size}, GB (1e9 bytes)")
    for name, label in _LABELS.items():
        factor = _NUM_SLOTS if name == "slot_bytes" else 1
        say(f"  {label:<52}{factor * getattr(found, name) / GB:8.2f}")
    say("Not counted: what CUDA itself takes, and the allocator's rounding.")
    return 0
