"""What autograd saves in a layer: by kind of tensor, by sub-module, and as naive hooks count it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from studies.published_rows import (
    MODELS,
    NAMES,
    SEQUENCE_LENGTH,
    TRACE,
    Row,
    Steps,
    middle_layer_bytes,
)

MICRO_BATCH = 4
MB = 1e6
SOURCE = f"{TRACE}, what autograd saves"
TOLERANCE = 0.01

# Kind -> (slots of a middle layer, MB per sample and layer).
KINDS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "opt": {
        "residual, the norms' input": ("self_attn_layer_norm:0 final_layer_norm:0", 4.19),
        "norms' output": ("self_attn.q_proj:0 fc1:0", 4.19),
        "q, k, v": ("self_attn:0 self_attn:1 self_attn:2", 6.29),
        "attention's output and statistic": ("self_attn:3 self_attn:4", 2.16),
        "dropout masks": (":0 :1", 2.10),
        "input of the down projection": ("activation_fn:0", 8.39),
    },
    "gpt2": {
        "residual, the norms' input": ("ln_1:0 ln_2:0", 2.62),
        "norms' output": ("attn.c_attn:0 mlp.c_fc:0", 2.62),
        "q, k, v": ("attn:0", 3.93),
        "attention's output and statistic": ("attn:1 attn:2", 1.35),
        "dropout masks": ("attn.resid_dropout:0 mlp.dropout:0", 1.31),
        "output of the up projection": ("mlp.act:0", 5.24),
        "inside the activation": ("mlp.act:1 mlp.act:2 mlp.act:3", 15.73),
        "input of the down projection": ("mlp.c_proj:0", 5.24),
    },
    "llama": {
        "norms' input, float32 copy": ("input_layernorm:0 post_attention_layernorm:0", 8.39),
        "normed, before the weight": ("input_layernorm:2 post_attention_layernorm:2", 4.19),
        "norms' output": ("self_attn.q_proj:0 mlp.gate_proj:0", 4.19),
        "q, k, v": ("self_attn:0 self_attn:1 self_attn:2", 3.15),
        "attention's output and statistic": ("self_attn:3 self_attn:4", 2.16),
        "outputs of gate and up projection": ("mlp.act_fn:0 mlp:0", 16.78),
        "inside the activation": ("mlp:1", 8.39),
        "input of the down projection": ("mlp.down_proj:0", 8.39),
    },
}

# Sub-modules that saved it first -> MB per sample and layer.
PARTS: Mapping[str, Mapping[str, float]] = {
    "opt": {
        "self_attn_layer_norm final_layer_norm": 4.2,
        "self_attn.q_proj": 2.1,
        "self_attn": 8.4,
        "fc1": 2.1,
        "activation_fn": 8.4,
        "": 2.1,
    },
    "gpt2": {
        "ln_1 ln_2": 2.6,
        "attn.c_attn": 1.3,
        "attn": 5.3,
        "mlp.c_fc": 1.3,
        "mlp.act": 21.0,
        "mlp.c_proj": 5.2,
        "attn.resid_dropout mlp.dropout": 1.3,
    },
    "llama": {
        "input_layernorm post_attention_layernorm": 12.6,
        "self_attn.q_proj": 2.1,
        "self_attn": 5.3,
        "mlp.gate_proj": 2.1,
        "mlp.act_fn": 8.4,
        "mlp": 16.8,
        "mlp.down_proj": 8.4,
    },
}

# Of a layer: distinct, with every pack counted, packs, weights packed (whatever the batch), eager
# attention; outside of the layers; logits, and their float32 log-softmax.
TOTALS: Mapping[str, tuple[float, float, int, float, float, float, float, float]] = {
    "opt": (27.34, 42.02, 22, 100.7, 77.6, 4.2, 51.0, 103.0),
    "gpt2": (38.06, 39.37, 23, 39.3, 64.2, 3.3, 51.0, 103.0),
    "llama": (55.65, 72.49, 31, 121.6, 109.1, 8.4, 131.0, 263.0),
}


def saved_bytes(steps: Steps, models: Sequence[str] = tuple(MODELS)) -> Iterator[Row]:
    """Yield bytes that autograd saves, per sample of 512 tokens in half precision."""
    for model in models:
        program = steps.record(MODELS[model], MICRO_BATCH)
        for kind, (slots, published) in KINDS[model].items():
            yield _row(model, f"{kind}, a layer", published, _bytes(program, slots.split()))
        for parts, published in PARTS[model].items():
            names = [slot.name for slot in program.slots if slot.layer == 1]
            first = [name for name in names if name.rpartition(":")[0] in (parts.split() or [""])]
            shown = parts.replace(" ", " + ") or "the layer itself"
            yield _row(model, f"saved first by {shown}", published, _bytes(program, first))
        yield from _totals(steps, model, program)


def _totals(steps: Steps, model: str, program: StepProgram) -> Iterator[Row]:
    layer, naive, num_packs, weights, eager, outside, logits, log_softmax = TOTALS[model]
    packs = [pack for pack in program.packs if pack.layer == 1]
    yield _row(model, "a layer, each storage once", layer, _bytes(program))
    every_pack = sum(pack.nbytes for pack in packs) / MICRO_BATCH / MB
    yield _row(model, "a layer, every pack", naive, every_pack)
    yield _row(model, "packs of a layer", num_packs, len(packs), unit="packs")
    found = count_others(steps.training(MODELS[model]))
    yield _row(model, "views of weights packed, a layer", weights, found["weights"] / MB)
    with_eager = steps.record(MODELS[model], MICRO_BATCH, is_eager=True)
    yield _row(model, "a layer with eager attention", eager, _bytes(with_eager))
    yield _row(
        model, "outside of the layers, without the loss", outside,
        found["outside"] / MICRO_BATCH / MB,
    )  # fmt: skip
    sizes = {
        program.labels.get(number, program.operations[buffer.birth].name): buffer.nbytes
        for number, buffer in enumerate(program.buffers)
    }
    for name, shown, published in (
        ("the logits", "logits", logits),
        ("_log_softmax", "log-softmax, float32", log_softmax),
    ):
        yield _row(model, shown, published, sizes[name] / MICRO_BATCH / MB)


def count_others(training: FakeTraining) -> dict[str, int]:
    """Return what hooks around the model see besides the layers' activations.

    ``weights``: bytes of parameters that one layer packs; ``outside``: bytes of the storages that
    are packed outside of the layers, without those as large as the logits.
    """
    found = {"weights": 0, "outside": 0}
    with training.model() as (model, _):
        ids = torch.zeros(MICRO_BATCH, SEQUENCE_LENGTH, dtype=torch.int64)
        layers = [layer for _, layer in find_layers(model).layers]
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}
        inside = [False]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata in parameters:
                found["weights"] += tensor.nbytes * inside[0]
            elif not inside[0]:
                seen[storage._cdata] = storage
            return tensor

        def enter(*_: Any) -> None:
            inside[0] = True

        def leave(*_: Any) -> None:
            inside[0] = False

        for layer in layers:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
        logits = ids.numel() * training.config.vocab_size
        found["weights"] //= len(layers)
        found["outside"] = sum(s.nbytes() for s in seen.values() if s.nbytes() < logits)
    return found


def _bytes(program: StepProgram, names: Sequence[str] | None = None) -> float:
    return middle_layer_bytes(program, names) / MICRO_BATCH / MB


def _row(model: str, figure: str, published: float, ours: float, unit: str = "MB") -> Row:
    tolerance = max(TOLERANCE, _rounding(published))
    return Row(
        f"{NAMES[model]}, {figure}", unit, published, ours, source=SOURCE, tolerance=tolerance
    )


def _rounding(published: float) -> float:
    """Return by how much a published figure may be off as it is rounded, as a share."""
    decimals = len(str(published).partition(".")[2])
    return 0.5 * 10.0**-decimals / published
