"""Training with MLPs in tiles against training without, over architectures and ways to train."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ARCHITECTURES,
    HIDDEN,
    NUM_LAYERS,
    VOCAB,
    Batch,
    enable_checkpointing,
    gradients_of,
    relative_errors,
    tiny_batch,
    tiny_model,
)

TILES = PyAOConfig(policy="off", mlp_tiles=3)
OFFLOADED = PyAOConfig(
    policy="all", min_bytes=0, keep_last_layers=0, host_memory_gib=0.1, mlp_tiles=3
)

_GATED = ARCHITECTURES["llama"]
MASKED = {
    "distilbert": {
        **{"dim": HIDDEN, "hidden_dim": 2 * HIDDEN, "n_heads": 4, "n_layers": 2},
        **{"vocab_size": VOCAB, "dropout": 0.0, "attention_dropout": 0.0},
    },
}
MORE = {
    "gptj": {"n_embd": HIDDEN, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, "rotary_dim": 4}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 64},
    "gemma2": {**_GATED, "head_dim": 8},
    "stablelm": _GATED,
    "starcoder2": {**_GATED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "cohere": _GATED,
    "granite": _GATED,
    "smollm3": _GATED,
}

FUSED_EXPERTS = {"mixtral", "qwen3_moe"}
SUMS_ITS_INPUT_IN_ANOTHER_ORDER = {"olmo2"}
"""The MLP's input is the residual stream itself: autograd adds three gradients there, of which
tiles hand over two as one."""


def _more(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    if model_type in MASKED:
        config = AutoConfig.for_model(model_type, **MASKED[model_type])
        return AutoModelForMaskedLM.from_config(config).train()
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **MORE[model_type])
    ).train()


def gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def compare(
    model: nn.Module, config: PyAOConfig = TILES, bound: float = 1e-6, **batch: Any
) -> dict[str, float]:
    """Check one step against one without tiles; return the figures of the tiles."""
    data = tiny_batch(**{"length": 8, "padding": 2, **batch})
    expected_loss, expected = gradients(copy.deepcopy(model), data)
    with attach(model, config) as offloader:
        loss, found = gradients(model, data)
        assert offloader.mlp_tiles is not None
        metrics = offloader.mlp_tiles.metrics()
        if metrics["mlp_tiles_num_tiled"]:
            assert metrics["mlp_tiles_num_tiles"] == config.mlp_tiles
    assert relative(loss, expected_loss) <= bound
    errors = relative_errors(found, expected)
    assert {name: error for name, error in errors.items() if error > bound} == {}
    return metrics


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@pytest.mark.sampled(every=5)
def test_one_step(model_type: str) -> None:
    model = tiny_model(model_type)
    bound = 1e-5 if model_type in SUMS_ITS_INPUT_IN_ANOTHER_ORDER else 1e-6
    metrics = compare(model, OFFLOADED, bound)
    num_mlps = 4 if model_type in ("bart", "t5") else NUM_LAYERS
    if model_type in FUSED_EXPERTS:  # before transformers 5, each was an MLP of its own
        num_mlps = sum(name.endswith(".experts.0") for name, _ in model.named_modules())
        num_mlps *= getattr(model.config, "num_local_experts", 0) or model.config.num_experts
    assert metrics["mlp_tiles_num_tiled"] == num_mlps


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", [*MASKED, *MORE])
@pytest.mark.sampled(every=1000)
def test_one_step_of_others(model_type: str) -> None:
    model = _more(model_type)
    bound = 1e-5 if model_type in MASKED else 1e-6
    assert compare(model, TILES, bound)["mlp_tiles_num_tiled"] >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama", "bloom", "qwen2"])
def test_inputs_have_the_bits_of_the_plain_path(model_type: str) -> None:
    """All gradients but those of the weights in tiles: they follow from their inputs'.

    In float32, Llama's norms use their input as it is twice; autograd adds those gradients and the
    residual's in another order then.
    """
    dtype = torch.bfloat16 if model_type in ("llama", "qwen2") else torch.float32
    model = tiny_model(model_type).to(dtype)
    batch = tiny_batch(size=2, length=24)
    expected_loss, expected = gradients(copy.deepcopy(model), batch)
    with attach(model, TILES):
        loss, found = gradients(model, batch)
    weights = [n for n in found if any(part in n for part in ("mlp.", "fc1", "fc2", "norm"))]
    others = found.keys() - set(weights)
    assert weights and others
    if not _rows_are_independent():
        pytest.skip("products of some rows have other bits than of all rows on this machine")
    assert torch.equal(loss, expected_loss)
    assert [name for name in sorted(others) if not torch.equal(found[name], expected[name])] == []


def _rows_are_independent() -> bool:
    torch.manual_seed(0)
    rows = torch.randn(48, HIDDEN)
    for inner in (2 * HIDDEN, 4 * HIDDEN):
        up, down = torch.randn(inner, HIDDEN), torch.randn(HIDDEN, inner)
        for n in (16,):
            if not torch.equal((rows @ up.t())[:n], rows[:n] @ up.t()):
                return False
            wide = rows @ up.t()
            if not torch.equal((wide @ down.t())[:n], wide[:n] @ down.t()):
                return False
    return True


def _lora(model_type: str, targets: list[str], dropout: float = 0.0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=model_type == "gpt2",
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        return get_peft_model(tiny_model(model_type), config).train()


LORA = {
    "llama": ["q_proj", "up_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "opt": ["q_proj", "fc1", "fc2"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", sorted(LORA))
@pytest.mark.sampled(every=1000)
def test_adapters_in_the_mlp(model_type: str) -> None:
    assert compare(_lora(model_type, LORA[model_type]))["mlp_tiles_num_tiled"] == NUM_LAYERS


@pytest.mark.thorough
def test_adapters_outside_of_a_frozen_mlp() -> None:
    assert compare(_lora("llama", ["q_proj"]))["mlp_tiles_num_tiled"] == NUM_LAYERS


@pytest.mark.thorough
def test_dropout_in_adapters_is_drawn_again_as_it_was() -> None:
    """The masks are others than without tiles: by numerical derivative, then."""
    model = _lora("opt", LORA["opt"], dropout=0.5).double()  # whose norms are in double, too
    batch = tiny_batch(length=8)
    weight = next(p for n, p in model.named_parameters() if "fc2.lora_B" in n)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)

    def value_at(step: float) -> Tensor:
        with torch.no_grad():
            weight.add_(step * direction)
        torch.manual_seed(7)
        value: Tensor = model(**batch).logits.tanh().sum()  # the model's loss is in float32
        if step == 0.0:
            value.backward()
        with torch.no_grad():
            weight.sub_(step * direction)
        return value.detach()

    with attach(model, TILES):
        model.zero_grad()
        value_at(0.0)
        assert weight.grad is not None
        slope = float((weight.grad * direction).sum())
        numerical = float((value_at(1e-5) - value_at(-1e-5)) / 2e-5)
    assert slope == pytest.approx(numerical, rel=1e-5)


@pytest.mark.thorough
def test_frozen_mlps_and_tied_weights() -> None:
    model = tiny_model("llama")
    layers: Any = model.model.layers
    layers[0].mlp.requires_grad_(False)
    layers[2].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    layers[1].mlp.gate_proj.weight = layers[1].mlp.up_proj.weight
    assert compare(model)["mlp_tiles_num_tiled"] == NUM_LAYERS


@pytest.mark.thorough
def test_one_mlp_in_several_layers() -> None:
    model = tiny_model("llama")
    layers: Any = model.model.layers
    layers[2].mlp = layers[0].mlp
    assert compare(model)["mlp_tiles_num_tiled"] == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_gradient_checkpointing(model_type: str, use_reentrant: bool) -> None:
    model = tiny_model(model_type)
    enable_checkpointing(model, use_reentrant=use_reentrant)
    compare(model, OFFLOADED)


CONFIGS: dict[str, dict[str, Any]] = {
    "auto": {"policy": "auto", "profile_steps": 1},
    "modules": {"policy": "modules", "modules": ("mlp_act",)},
    "recompute": {"policy": "all", "recompute_modules": ("pointwise",)},
    "chunked": {"policy": "all", "head_loss": "chunked"},
    "lossless masks": {"policy": "all", "codec": "bitmask"},
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_with_other_settings(name: str, model_type: str) -> None:
    settings = {"min_bytes": 0, "keep_last_layers": 0, "host_memory_gib": 0.1, **CONFIGS[name]}
    metrics = compare(tiny_model(model_type), PyAOConfig(mlp_tiles=2, **settings))
    assert metrics["mlp_tiles_num_tiled"] == NUM_LAYERS


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    model, batch = tiny_model("llama"), tiny_batch(length=16)

    def run(of: nn.Module) -> dict[str, Tensor]:
        of.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = of(**batch).loss
        loss.backward()
        return gradients_of(of)

    expected = run(copy.deepcopy(model))
    with attach(model, OFFLOADED):
        found = run(model)
    assert max(relative_errors(found, expected).values()) < 1e-2


def _compiled(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = tiny_model("llama")
    layers: Any = model.model.layers
    for layer in layers:
        layer.mlp = wrap(layer.mlp)
    return model


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_compiled_mlps_run_in_tiles() -> None:
    model = _compiled(lambda mlp: torch.compile(mlp, backend="aot_eager"))  # type: ignore[arg-type, return-value]
    data = tiny_batch(length=8)
    expected_loss, expected = gradients(tiny_model("llama"), data)
    with attach(model, TILES) as offloader:
        loss, found = gradients(model, data)
        assert offloader.mlp_tiles is not None
        assert offloader.mlp_tiles.metrics()["mlp_tiles_num_tiles"] == 3
    assert relative(loss, expected_loss) <= 1e-6
    plain = {name.replace("_orig_mod.", ""): gradient for name, gradient in found.items()}
    assert max(relative_errors(plain, expected).values()) <= 1e-6


@pytest.mark.thorough
def test_the_loss_curve_stays_within_that_of_a_nudged_run() -> None:
    steps = [tiny_batch(seed, size=4, length=16) for seed in range(200)]

    def curve(nudge: float, config: PyAOConfig | None) -> Tensor:
        model = tiny_model("llama")
        with torch.no_grad():
            next(model.parameters()).mul_(1 + nudge)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        offloader = None if config is None else attach(model, config)
        losses = []
        for batch in steps:
            loss, _ = gradients(model, batch)
            optimizer.step()
            losses.append(loss)
        if offloader is not None:
            offloader.detach()
        return torch.stack(losses)

    plain = curve(0.0, None)
    spread = max(float((curve(n, None) - plain).abs().max()) for n in (1e-7, -1e-7, 2e-7))
    assert float((curve(0.0, TILES) - plain).abs().max()) <= 2 * spread
