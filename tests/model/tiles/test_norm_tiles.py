"""Norms that are written out in steps run in tiles too, where MLPs do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_pyao import attach
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.tiles.mlp_search import find_norms
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from tests.helpers import EVERYTHING, tiny_batch, tiny_model

TILES = replace(EVERYTHING, mlp_tiles=4)


def names_of(model: PreTrainedModel) -> list[str]:
    return [norm.path for norm in find_norms(find_layers(model))]


def test_norms_of_layers_and_their_like_outside_are_found() -> None:
    llama = names_of(tiny_model("llama"))
    assert llama[:2] == [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    ]
    assert llama[-1] == "norm"
    assert len(llama) == 2 * tiny_model("llama").config.num_hidden_layers + 1
    qwen = names_of(tiny_model("qwen3"))
    assert not [name for name in qwen if "q_norm" in name], "of a head's features, not a token's"


@pytest.mark.thorough
@pytest.mark.parametrize(("model_type", "is_wide"), [("llama", True), ("gpt2", False)])
def test_fused_norms_need_no_tiles(model_type: str, is_wide: bool) -> None:
    model = tiny_model(model_type)
    with attach(model, TILES) as offloader:
        model(**tiny_batch()).loss.backward()
        assert offloader.mlp_tiles is not None
        num_norms = offloader.mlp_tiles.metrics()["mlp_tiles_num_norms_tiled"]
        assert bool(num_norms) is is_wide
        assert ("so do" in offloader.mlp_tiles.describe()) is is_wide


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["64", "32"]
)
def test_gradients_are_those_without_tiles(dtype: torch.dtype, bound: float) -> None:
    plain, model = tiny_model("llama").to(dtype), tiny_model("llama").to(dtype)
    batch = tiny_batch()
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    with attach(model, TILES):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    assert torch.equal(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= bound * theirs.grad.norm()


@pytest.mark.thorough
def test_less_of_a_norm_is_alive_at_once() -> None:
    peaks = []
    for tiles in ("off", 8):
        model = tiny_model("llama")
        norm = model.model.norm
        hidden = torch.randn(1, 4096, norm.weight.shape[0], requires_grad=True)
        with attach(model, replace(EVERYTHING, mlp_tiles=tiles)):
            ledger = MemoryLedger()
            with NotingMode(ledger):
                output = norm(hidden)
                output.backward(torch.ones_like(output))
        peaks.append(ledger.peak_bytes / (hidden.numel() * hidden.element_size()))
    whole, tiled = peaks
    assert whole > 6, "several copies of all tokens"
    assert tiled < 4 + whole / 8, "input's gradient, output, its gradient, and one tile's copies"


@pytest.mark.thorough
def test_a_norm_with_a_hook_of_a_user_is_left_alone() -> None:
    model = tiny_model("llama")
    seen: list[int] = []

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append(output.shape[-2])

    model.model.norm.register_forward_hook(hook)
    batch = tiny_batch()
    with attach(model, TILES):
        model(**batch, use_cache=False).loss.backward()
    assert seen == [batch["input_ids"].shape[1]]
