"""One training step on fake tensors: every byte that would be alive on the device, and no memory.

The engine, the head loss and transformers run as they do in training. Fake tensors of a CPU stand
for the device's; where a CPU would pick another operation than CUDA does, CUDA's is put in its
place (``hf_pyao/simulation``). So no GPU is needed, and none is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.integrations.cuda_choices import choices_of_cuda
from hf_pyao.integrations.module_map import find_layers
from hf_pyao.simulation.cuda_operations import operations_of_cuda
from hf_pyao.simulation.late_transport import LateTransport
from hf_pyao.simulation.ledger import MemoryLedger, NotingMode
from model_sizes import build_config, find_size

BUCKET_BYTES = 10**9
"""What ZeRO-2 reduces gradients in: 5e8 elements of half precision."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train."""

    name: str
    policy: str = "off"
    """``PyAOConfig.policy``."""
    head_loss: str = "off"
    """``PyAOConfig.head_loss``."""
    window: str | int = PyAOConfig.window
    """``PyAOConfig.window``."""
    checkpointing: bool = False


METHODS = (
    Method(name="none"),
    Method(name="checkpointing", checkpointing=True),
    Method(name="policy all", policy="all"),
    Method(name="chunked loss", head_loss="chunked"),
    Method(name="checkpointing + chunked loss", checkpointing=True, head_loss="chunked"),
    Method(name="policy all + chunked loss", policy="all", head_loss="chunked"),
    Method(name="the same, window 'layer'", policy="all", head_loss="chunked", window="layer"),
    Method(
        name="policy all + checkpointing + chunked loss",
        policy="all",
        checkpointing=True,
        head_loss="chunked",
    ),
)
"""What is compared, by rising effort."""

TRAINING_STATES = ("host", "device")
"""Where gradients and AdamW's moments are: see :func:`peak_of_step`."""


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes on the device over one step: forward, loss and backward."""

    peak_bytes: int
    """Most bytes alive at once, weights and training state included."""
    phase_peak_bytes: dict[str, int]
    """The same for each part of the step."""
    weights_bytes: int
    state_bytes: int
    """Moments of AdamW on the device."""
    offloaded_bytes: int
    num_chunks: int
    """Chunks of the head loss; 0 for the model's own."""


def peak_of_step(
    architecture: str,
    size: str,
    method: Method,
    micro_batch: int,
    *,
    sequence_length: int = 512,
    training_state: str = "host",
    keep_last_layers: int = PyAOConfig.keep_last_layers,
) -> StepPeak:
    """Run one step of a bfloat16 model and return what would be alive on the device.

    Args:
        architecture: transformers' ``model_type``.
        size: its row in ``model_sizes.py``.
        method: how to train.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        training_state: ``"host"`` is ZeRO-2 with its optimizer offloaded: a gradient leaves as
            soon as it is complete, through a bucket of 1 GB, and AdamW works on the host.
            ``"device"`` is a plain loop: gradients stay, and AdamW has two moments in bfloat16.
        keep_last_layers: ``PyAOConfig.keep_last_layers``.
    """
    config = build_config(architecture, find_size(architecture, size))
    config.use_cache = False
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake_mode,
        operations_of_cuda(*choices_of_cuda()),
    ):
        model = _build_model(config, method)
        ids = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
        weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if training_state == "host":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_let_go_of_gradient)
        settings = PyAOConfig(
            policy=method.policy,
            head_loss=method.head_loss,
            window=method.window,
            keep_last_layers=keep_last_layers,
            host_memory_gib=2.0**20,
        )
        with attach(model, settings, transport=LateTransport()) as offloader:
            ledger = MemoryLedger(offloader.host_pool.owns)
            ledger.note([*model.parameters(), *model.buffers()])
            stack = find_layers(model).stack
            stack.register_forward_hook(lambda *_: ledger.end_phase("layers, forward"))
            with NotingMode(ledger, fake_mode):
                # As in a loop by hand, the outputs live on during backward, logits included.
                outputs = model(input_ids=ids, labels=ids)
                ledger.end_phase("head and loss")
                bucket = _bucket(training_state)
                outputs.loss.backward()
                ledger.end_phase("backward")
                del bucket, outputs
            figures = offloader.metrics()
            head_loss = offloader.head_loss
            num_chunks = 0 if head_loss is None else head_loss.metrics()["head_loss_num_chunks"]
    if method.head_loss != "off" and not num_chunks:
        raise RuntimeError(f"{architecture}-{size} kept its own loss: {offloader.describe()}")
    state_bytes = 2 * weights_bytes if training_state == "device" else 0
    phases = {name: value + state_bytes for name, value in ledger.phase_peak_bytes.items()}
    return StepPeak(
        peak_bytes=max(phases.values()),
        phase_peak_bytes=phases,
        weights_bytes=weights_bytes,
        state_bytes=state_bytes,
        offloaded_bytes=int(figures["offloaded_bytes"]),
        num_chunks=int(num_chunks),
    )


def _build_model(config: Any, method: Method) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).train()
    if method.checkpointing:
        # transformers 5.23 renamed it.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        # The state of the random numbers is a few bytes, and fake tensors have none.
        enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def _let_go_of_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _bucket(training_state: str) -> Tensor | None:
    if training_state == "device":
        return None
    return torch.empty(BUCKET_BYTES, dtype=torch.uint8)
