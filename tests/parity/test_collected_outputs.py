"""Models whose own code collects what their modules return: hidden states, router logits, maps.

transformers does that by hooks. A step on fake tensors has them too, and runs all layers where the
model asks for a certain one.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.forward_watch import ForwardWatch
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.auto.recording.step_recording import record_fake_step
from tests.helpers import EVERY_LAYER, assert_same_tensors, gradients_of, tiny_batch, tiny_model

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).major < 5, reason="collects by other means, or by values"
)

Made = tuple[Any, dict[str, Any]]
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def mixture(kind: str, **options: Any) -> Made:
    torch.manual_seed(0)
    own = {
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                     "head_dim": 8},
        "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**TINY, **own, num_hidden_layers=6, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if options and "torch.bincount(" in inspect.getsource(sys.modules[type(model).__module__]):
        pytest.skip("the loss of the router has a shape that follows from values (bincount)")
    return model, dict(tiny_batch(0))


def llava(layer: int | list[int], num_layers: int = 6) -> Made:
    """A model that reads the hidden states of a *layer* of its vision tower."""
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=8,
    )  # fmt: skip
    text = transformers.LlamaConfig(**TINY, num_hidden_layers=2)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=63, image_token_index=63,
        image_seq_length=4, vision_feature_layer=layer,
    )  # fmt: skip
    ids = tiny_batch(0)["input_ids"].clamp(max=62)
    ids[:, :4] = 63
    pixels = torch.randn(2, 3, 16, 16)
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels}
    return transformers.LlavaForConditionalGeneration(config), batch


class TakesALayer(nn.Module):
    """A head on the hidden states of a certain layer, as of a probe or a reward model."""

    def __init__(self, layer: int, num_layers: int = 6) -> None:
        super().__init__()
        self.model = tiny_model("llama", num_hidden_layers=num_layers).model
        self.layer = layer
        self.head = nn.Linear(32, 1)

    def forward(self, input_ids: Tensor, **_: Tensor) -> tuple[Tensor]:
        found = self.model(input_ids=input_ids, output_hidden_states=True).hidden_states
        return (self.head(found[self.layer]).square().mean(),)


def probe(layer: int) -> Made:
    return TakesALayer(layer), {"input_ids": tiny_batch(0)["input_ids"]}


def maps(model_type: str) -> Made:
    return tiny_model(model_type, attention="eager"), {**tiny_batch(0), "output_attentions": True}


CASES: dict[str, Callable[[], Made]] = {
    "mixtral, router logits": lambda: mixture("Mixtral", output_router_logits=True),
    "mixtral": lambda: mixture("Mixtral"),
    "qwen3_moe, router logits": lambda: mixture("Qwen3Moe", output_router_logits=True),
    "olmoe, router logits": lambda: mixture("Olmoe", output_router_logits=True),
    "llava, last but one": lambda: llava(-2),
    "llava, fifth": lambda: llava(5),
    "llava, two": lambda: llava([1, 4]),
    "probe, fifth": lambda: probe(5),
    "probe, first": lambda: probe(1),
    "attention maps": lambda: maps("llama"),
}


def step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**batch)[0]  # outputs would hold the graph of layers that backward does not reach
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=4)
def test_the_recorded_step_saves_what_the_model_saves(name: str) -> None:
    model, batch = CASES[name]()
    model.train()

    def before(seen: SeenForward, *, is_first: bool) -> None:
        del seen, is_first

    watch = ForwardWatch(model, None, before)
    step(model, batch)
    program = record_fake_step(watch.step())[0].whole()
    watch.remove()
    with attach(model, EVERY_LAYER) as offloader:
        step(model, batch)
        figures = offloader.metrics()
    assert sum(slot.link_bytes for slot in program.slots) == figures["offloaded_bytes"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_auto_plans_and_gradients_stay_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = CASES[name]()
    model.train()
    reference = copy.deepcopy(model)
    config = PyAOConfig(
        min_bytes=0, host_memory_gib=0.1, device_memory_gib=1e-6, profile_steps=1, window="layer"
    )
    with caplog.at_level(logging.INFO), attach(model, config) as offloader:
        for _ in range(4):
            assert_same_tensors(step(model, batch), step(reference, batch), name)
        assert offloader.plan is not None, caplog.text


def test_hooks_of_others_are_not_called_by_the_copy() -> None:
    model, batch = mixture("Mixtral", output_router_logits=True)
    model.train()
    called: list[bool] = []

    def before(seen: SeenForward, *, is_first: bool) -> None:
        del seen, is_first

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: called.append(True))
    watch = ForwardWatch(model, None, before)
    step(model, batch)
    num_called = len(called)
    record_fake_step(watch.step())
    watch.remove()
    assert len(called) == num_called > 0
