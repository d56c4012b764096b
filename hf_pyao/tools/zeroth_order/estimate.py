"""``pyao estimate --zeroth-order``: device memory of zeroth-order fine-tuning, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.weights.tables import put_on, take_off
from hf_pyao.engine.zeroth_order.noise import NoiseKey
from hf_pyao.engine.zeroth_order.perturbation import (
    CHUNK_ELEMENTS,
    ZerothOrderSettings,
    perturbed,
)
from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.model.head.head_loss import install_head_loss
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.text import say
from hf_pyao.tools.estimate.command import DEFAULT_LENGTH
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import check_sequence_length, config_of, parse_model
from hf_pyao.tools.zeroth_order.sizes import STATE_BYTES, BlockSize, Ends

GB = 10**9
_NUM_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class ZerothOrderMemory:
    """Bytes on the device over a step, with all layers on the host."""

    slot_bytes: int
    """One slot: the largest block."""
    resident_bytes: int
    """Weights and buffers outside of layers: embeddings, head, norms."""
    pass_bytes: int
    """Most that one pass allocates: perturbed weights, noise, activations, logits and loss."""
    waiting_bytes: int
    """What the other pass holds meanwhile, between two layers."""
    host_bytes: int
    """Weights on the host."""

    @property
    def peak_bytes(self) -> int:
        """All of it; the allocator's rounding and CUDA's own memory come on top."""
        parts = self.resident_bytes + self.pass_bytes + self.waiting_bytes
        return _NUM_SLOTS * self.slot_bytes + parts


class _FakeReads:
    """What modules read in a pass on fake tensors: new tensors, kept until the layer call ends.

    Args:
        ledger: is told of the noise.
        in_layers: by ``id``, the parameters of layers.
        noise_bytes: what drawing takes meanwhile.
        choices: settings of zeroth order.
        by_rows: by ``id``, weights that are read by rows.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        ledger: MemoryLedger,
        in_layers: set[int],
        noise_bytes: int,
        choices: Choices,
        by_rows: set[int],
    ) -> None:
        self._ledger = ledger
        self._in_layers = in_layers
        self._noise_bytes = noise_bytes
        self._choices = choices
        self._by_rows = by_rows
        self._given: dict[int, torch.Tensor] = {}

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is a layer's."""
        return id(parameter) in self._in_layers

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say False: nothing is put into a table."""
        return False

    def read(self, parameter: Any) -> Any:
        """Return a tensor like *parameter*."""
        if parameter is None or id(parameter) in self._by_rows:
            return parameter
        given = self._given.get(id(parameter))
        if given is None:
            given = torch.empty_like(parameter)
            share = min(1.0, parameter.numel() / CHUNK_ELEMENTS)
            beside = int(share * self._noise_bytes)
            if self.streams(parameter) and self._choices.transfer_dtype is not None:
                beside += parameter.nbytes  # the unpacked weight
            elif not self.streams(parameter) and self._choices.momentum:
                beside = max(beside, STATE_BYTES * parameter.numel())  # copies for the update
            self._ledger.note((given,), beside)
            if self.streams(parameter):
                self._given[id(parameter)] = given
        return given

    def end_layer(self) -> None:
        """Let go of what a layer has read."""
        self._given.clear()


def noise_bytes() -> int:
    """Return what perturbing a chunk of a weight allocates beside the result, counted on a CPU."""
    weight = torch.zeros(CHUNK_ELEMENTS, dtype=torch.float16)
    out, ledger = torch.empty_like(weight), MemoryLedger()
    with torch.no_grad(), NotingMode(ledger):
        perturbed(weight, NoiseKey(0, 0), 0, 1e-3, out)
    return ledger.peak_bytes - weight.nbytes - out.nbytes


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Settings of zeroth order that change its memory, by the names that they have there."""

    momentum: float = 0.0
    stream_embeddings: str = "off"
    head_loss: str = "off"
    transfer_dtype: str | None = None

    @classmethod
    def of(cls, given: Sequence[str]) -> Choices:
        """Return what texts such as ``momentum=0.9`` choose.

        Raises:
            ConfigError: one is no setting, or has a value that it does not take.
        """
        known = {each.name: each for each in fields(cls)}
        values: dict[str, Any] = {}
        for text in given:
            name, has_value, value = text.partition("=")
            name = name.replace("-", "_")
            if name not in known or not has_value:
                raise unknown_name("setting of --zeroth-order", text, [f"{n}=..." for n in known])
            values[name] = value
        for name in ("stream_embeddings", "head_loss"):
            allowed = {"stream_embeddings": ("on", "off"), "head_loss": ("off", "chunked")}[name]
            if values.get(name, "off") not in allowed:
                raise unknown_name(name, values[name], allowed)
        if "momentum" in values:
            try:
                values["momentum"] = float(values["momentum"])
            except ValueError:
                raise ConfigError(
                    f"momentum is {values['momentum']!r}; expected 0 <= momentum < 1.",
                    key="setting-value",
                ) from None
        ZerothOrderSettings(
            momentum=values.get("momentum", 0.0), transfer_dtype=values.get("transfer_dtype")
        )
        return cls(**values)


def zeroth_order_memory(
    config: Any,
    micro_batch: int = 1,
    sequence_length: int = 2048,
    dtype: str = "float16",
    choices: Choices | None = None,
) -> ZerothOrderMemory:
    """Run a pass on fake tensors, and return what a step has on the device.

    Args:
        config: of transformers; a causal language model's.
        micro_batch: samples.
        sequence_length: tokens of each.
        dtype: of weights and arithmetic.
        choices: settings of zeroth order; None: the defaults.
    """
    choices = choices or Choices()
    beside = noise_bytes()
    with FakeTraining(config=config, dtype=dtype).model() as (model, fake_mode):
        found = find_layers(model).layers
        layers = [layer for _, layer in found]
        sizes = [BlockSize.of(layer, choices.momentum, choices.transfer_dtype) for layer in layers]
        slot_bytes = max(size.slot_bytes for size in sizes)
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        streams = choices.stream_embeddings == "on"
        ends = Ends(model, found if streams else None, slot_bytes, beside)
        resident = [p for p in model.parameters() if id(p) not in in_layers | ends.ids]
        ledger = MemoryLedger()
        ledger.note([*resident, *model.buffers()])
        resident_bytes, waiting = ledger.live_bytes, [0]
        has_momentum = bool(choices.momentum)
        reads = _FakeReads(ledger, in_layers, beside, choices, ends.ids)

        def end_layer(*_: Any) -> None:
            reads.end_layer()
            waiting[0] = max(waiting[0], ledger.live_bytes - resident_bytes)

        head_loss = install_head_loss(model, choices.head_loss, without_gradients=True)
        with _reading(model, reads), ends.by_rows(ledger), torch.no_grad():
            hooks = [layer.register_forward_hook(end_layer) for layer in layers]
            ids = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
            with NotingMode(ledger, fake_mode):
                model(input_ids=ids, labels=ids)
            for hook in hooks:
                hook.remove()
        head_loss.uninstall()
        pass_bytes = ledger.peak_bytes - resident_bytes
        if choices.head_loss == "chunked":
            pass_bytes += ends.head_bytes  # put together on the device, where it visits
        if has_momentum:
            resident_bytes += sum(STATE_BYTES * p.numel() for p in resident)
    return ZerothOrderMemory(
        slot_bytes=slot_bytes,
        resident_bytes=resident_bytes,
        pass_bytes=pass_bytes,
        waiting_bytes=waiting[0],
        host_bytes=sum(size.host_bytes for size in sizes) + ends.host_bytes(has_momentum),
    )


@contextmanager
def _reading(model: nn.Module, reads: _FakeReads) -> Iterator[None]:
    modules = [module for module in model.modules() if module._parameters]
    for module in modules:
        put_on(module, reads)
    try:
        yield
    finally:
        for module in modules:
            take_off(module)


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    if args.lora is not None:
        raise ConfigError(
            "--lora is given, and --zeroth-order estimates all weights: drop it.",
            key="settings-contradict",
        )
    if args.output is not None or args.step is not None:
        raise ConfigError(
            "--output and --step have no effect with --zeroth-order: drop them.",
            key="setting-without-effect",
        )
    spec = parse_model(args.model)
    config = config_of(spec)
    length = args.sequence_length or DEFAULT_LENGTH
    check_sequence_length(config, length)
    micro_batch = args.micro_batch or 1
    choices = Choices.of(args.zeroth_order)
    found = zeroth_order_memory(config, micro_batch, length, choices=choices)
    if args.json:
        import json

        values = {**asdict(found), "peak_bytes": found.peak_bytes, "dtype": "float16"}
        values |= asdict(choices)
        say(
            json.dumps({"model": spec.name, "micro_batch": micro_batch, "tokens": length, **values})
        )
        return 0
    rows = (
        ("two slots of the largest block", _NUM_SLOTS * found.slot_bytes),
        ("weights outside of layers", found.resident_bytes),
        ("a pass: perturbed weights, noise, activations, loss", found.pass_bytes),
        ("the other pass, which waits", found.waiting_bytes),
        ("together", found.peak_bytes),
        ("weights (and what goes with them) on the host", found.host_bytes),
    )
    given = "".join(f", {each}" for each in args.zeroth_order)
    size = f"{micro_batch} x {length} tokens"
    say(f"{spec.name}, zeroth order, float16{given}, {size}, GB (1e9 bytes)")
    for name, nbytes in rows:
        say(f"  {name:<52}{nbytes / GB:8.2f}")
    say("Not counted: what CUDA itself takes, and the allocator's rounding.")
    return 0
