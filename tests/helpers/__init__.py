"""Tiny models, and the reference: a training loop that knows nothing of hf_pyao.

Every parity test runs the same loop twice, with and without an attached model, and compares bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pyao import PyAOConfig
from hf_pyao.engine.transfer.layout import bytes_of
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket

PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "bf16 weights": (torch.bfloat16, None),
}
"""Dtype of the weights, and that of autocast."""

VOCAB = 64
HIDDEN = 32
NUM_LAYERS = 3

EVERYTHING = PyAOConfig(
    policy="all", min_bytes=0, host_memory_gib=0.1, keep_last_layers=1, window="layer"
)
"""Tiny models save tiny tensors: offload those too. The last layer is kept, as in the paper."""

EVERY_LAYER = PyAOConfig(
    policy="all", min_bytes=0, host_memory_gib=0.1, keep_last_layers=0, window="layer"
)
"""As above, the last layer too."""

Batch = dict[str, torch.Tensor]

# ---- models --------------------------------------------------------------------------------------

_GATED = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "n_embd": HIDDEN,
        "n_head": 4,
        "n_layer": NUM_LAYERS,
        "n_positions": 64,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": _GATED,
    "bart": {
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": HIDDEN,
        "decoder_ffn_dim": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    },
    "bloom": {"hidden_size": HIDDEN, "n_layer": NUM_LAYERS, "n_head": 4, "vocab_size": VOCAB},
    "falcon": {
        "hidden_size": HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    },
    "gemma3_text": {**_GATED, "head_dim": 8, "sliding_window": 4},
    "gpt_neox": {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": VOCAB,
    },
    "mistral": {**_GATED, "sliding_window": 4},
    "mixtral": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": _GATED,
    "phi3": _GATED,
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 8},
    "qwen3_moe": {
        **_GATED,
        "head_dim": 8,
        "moe_intermediate_size": HIDDEN,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "t5": {
        "d_model": HIDDEN,
        "d_kv": 8,
        "d_ff": HIDDEN,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCAB,
        "decoder_start_token_id": 0,
    },
}
"""Model type -> the settings of a tiny configuration."""

MAIN = ("opt", "gpt2", "llama")
ENCODER_DECODERS = ("bart", "t5")

_DROPOUTS = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "opt": ("attention_dropout", "dropout"),
    "bart": ("attention_dropout", "dropout", "activation_dropout"),
    "t5": ("dropout_rate",),
    "bloom": ("attention_dropout", "hidden_dropout"),
}


def tiny_model(
    model_type: str,
    *,
    attention: str | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> PreTrainedModel:
    """Build a tiny model of *model_type* in training mode, the same one every time."""
    known = {**ARCHITECTURES[model_type]}
    known.update(dict.fromkeys(_DROPOUTS.get(model_type, ("attention_dropout",)), dropout))
    config = AutoConfig.for_model(model_type, **{**known, **settings})
    auto = AutoModelForSeq2SeqLM if model_type in ENCODER_DECODERS else AutoModelForCausalLM
    options = {} if attention is None else {"attn_implementation": attention}
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(config, **options)
    return (model if dtype is torch.float32 else model.to(dtype)).train()


def enable_checkpointing(model: PreTrainedModel, *, use_reentrant: bool, **options: Any) -> None:
    """Switch transformers' checkpointing on, under the name that this release has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant}, **options)


# ---- data ----------------------------------------------------------------------------------------


def tiny_batch(seed: int = 0, *, size: int = 2, length: int = 8, padding: int = 0) -> Batch:
    """Return token ids with themselves as labels; row r is padded by ``r * padding`` at its end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (size, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding:
        mask = torch.ones_like(ids)
        for row in range(1, size):
            mask[row, length - row * padding :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


ACCUMULATING = (
    (tiny_batch(0),),
    (tiny_batch(1), tiny_batch(2)),
    (tiny_batch(3), tiny_batch(4)),
)
"""Three optimizer steps, the first of one micro-batch, the others of two."""

# ---- the reference loop --------------------------------------------------------------------------


@dataclass
class Trajectory:
    """All that training computed."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    rng_state: torch.Tensor | None = None


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]] = ACCUMULATING,
    *,
    autocast: torch.dtype | None = None,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    between: Callable[[], None] = lambda: None,
) -> Trajectory:
    """Train *model* with AdamW and return its trajectory.

    Args:
        model: is changed.
        steps: the micro-batches of each optimizer step.
        autocast: dtype to autocast to, if any.
        backward: gets the loss of each micro-batch.
        between: called between the optimizer steps.
    """
    seen = Trajectory()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for micro_batches in steps:
        optimizer.zero_grad()
        for batch in micro_batches:
            with autocasting(autocast):
                loss = model(**batch, use_cache=False).loss
            backward(loss / len(micro_batches))
            seen.losses.append(loss.detach().clone())
            del loss
        seen.gradients.append(gradients_of(model))
        optimizer.step()
        between()
    seen.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen.rng_state = torch.get_rng_state()
    return seen


def autocasting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context that autocasts to *dtype* on a CPU, or one that does nothing."""
    return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients by parameter name."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def num_hooks(model: nn.Module) -> int:
    """Return how many hooks the modules of *model* have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def assert_same_trajectory(ours: Trajectory, reference: Trajectory, what: str = "") -> None:
    """Compare bits of losses, gradients and parameters, and the state of the random generator."""
    for index, (loss, expected) in enumerate(zip(ours.losses, reference.losses, strict=True)):
        assert torch.isfinite(expected), f"{what}: the reference's loss {index} is {expected}"
        assert torch.equal(loss, expected), f"{what}: loss {index} is {loss}, not {expected}"
    for step, (found, expected) in enumerate(zip(ours.gradients, reference.gradients, strict=True)):
        assert_same_tensors(found, expected, f"{what}: gradients of step {step}")
    assert_same_tensors(ours.parameters, reference.parameters, f"{what}: parameters")
    assert ours.rng_state is not None and reference.rng_state is not None
    assert torch.equal(ours.rng_state, reference.rng_state), f"{what}: random stream was touched"


def assert_same_tensors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
) -> None:
    """Compare two dictionaries of tensors by bits."""
    assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()} differ"
    assert expected, f"{what}: nothing to compare"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (
            f"{what}: {name} differs by at most {(found[name] - tensor).abs().max().item():.3g}"
        )


NOTHING_BUT_ROUNDING = 1e-6
"""Below this share of the largest one, a gradient is zero in exact numbers.

So is that of a key projection's bias: it adds the same to all scores of a query.
"""


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    """Compare all parameters by bits."""
    pairs = (dict(each.named_parameters()) for each in (model, reference))
    assert_same_tensors(*pairs, "parameters")


def relative_errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return each difference's norm by the expected norm; by the largest where it is rounding."""
    assert found.keys() == expected.keys(), f"{found.keys() ^ expected.keys()} differ"
    norms = {name: float(tensor.norm()) for name, tensor in expected.items()}
    largest = max(norms.values())
    assert largest > 0, "all gradients are zero"
    return {
        name: float((found[name] - tensor).norm())
        / (norms[name] if norms[name] > NOTHING_BUT_ROUNDING * largest else largest)
        for name, tensor in expected.items()
    }


# ---- layers that do what a test says
# ---------------------------------------------------------------


class FunctionLayer(GradientCheckpointingLayer):
    """A layer with one weight (size, size) that computes ``function(layer, x)``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], size: int = 4) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute what the test says."""
        return self.function(self, x, *args, **kwargs)


class Stack(nn.Module):
    """A model of layers that do what a test says, one after the other."""

    def __init__(self, *functions: Callable[..., Any], size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(FunctionLayer(function, size) for function in functions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def linear_relu(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    """Compute what most layers here do."""
    return torch.relu(x @ layer.weight)


class RecordingTransport(BlockingTransport):
    """Copies at once, and keeps the bytes of all offloads, so that no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[str, torch.Tensor]] = []

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, *, label: str = "", **how: Any
    ) -> DoneTicket:
        """Copy to the host, and record it."""
        self.sources.append((label, bytes_of(src)))
        return super().offload(src, dst, label=label, **how)
