"""Training with embeddings and head on the host equals plain training, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ACCUMULATING,
    ARCHITECTURES,
    ENCODER_DECODERS,
    assert_same_trajectory,
    enable_checkpointing,
    tiny_batch,
    tiny_model,
    train,
)
from tests.helpers.adapters import cast_base_, tiny_lora, with_adapters

STEPS = (*ACCUMULATING, *ACCUMULATING[:2])
"""Five steps, some of several micro-batches."""

HERE: dict[str, Any] = {
    "policy": "all",
    "min_bytes": 0,
    "host_memory_gib": 0.1,
    "stream_weights": 0,
    "stream_embeddings": "on",
}

FEW = ("opt", "gpt2", "llama", "gemma3_text", "t5", "bart")


def check(
    model: nn.Module,
    what: str,
    autocast: Any = None,
    *,
    has_head: bool = True,
    keeps_its_loss: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare training of a copy with that of *model*, whose weights are all on the device.

    A chunked loss has other bits than the model's own by right: the reference has it then, too.
    A model that *keeps_its_loss* goes on with its own where a chunked one was asked for.

    Returns:
        What was uploaded of embeddings and head.
    """
    if autocast is not None:
        cast_base_(model, autocast)
    ours = copy.deepcopy(model)
    head_loss = settings.get("head_loss", "off")
    plain = PyAOConfig(policy="off", head_loss=head_loss)
    with attach(model, plain) if head_loss != "off" else contextlib.nullcontext():
        expected = train(model, STEPS, autocast=autocast)
    with attach(ours, PyAOConfig(**{**HERE, **settings})) as offloader:
        found = train(ours, STEPS, autocast=autocast)
        assert offloader.weights is not None
        figures = offloader.weights.figures()["embeddings_and_head"]
        if head_loss == "chunked":
            assert offloader.head_loss is not None
            num_chunked = offloader.head_loss.metrics()["head_loss_num_chunked"]
            assert num_chunked == (0 if keeps_its_loss else len(found.losses))
    assert_same_trajectory(found, expected, what)
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), f"{what}: {name}"
    assert figures["num_left"] == 0
    assert figures["gathered_rows"] > 0
    num_forwards = len(found.losses)
    is_chunked = head_loss == "chunked" and not keeps_its_loss
    assert figures["num_uploads"] == has_head * num_forwards * (1 if is_chunked else 2), what
    return dict(figures)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("model_type", FEW)
def test_of_each_kind_of_embedding_and_head(model_type: str, head_loss: str, autocast: Any) -> None:
    """Learned positions, a tied head, an untied one, scaled embeddings, a shared embedding."""
    model = tiny_lora(model_type, dropout=0.1)
    adds_to_logits = model_type == "bart"  # a bias, between the head and the loss
    what = f"{model_type}, {head_loss}"
    check(model, what, autocast, head_loss=head_loss, keeps_its_loss=adds_to_logits)


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", sorted({*ARCHITECTURES} - {*FEW}))
def test_of_the_other_architectures(model_type: str, autocast: Any) -> None:
    check(tiny_lora(model_type, dropout=0.1), model_type, autocast)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("opt", {"word_embed_proj_dim": 16}), ("llama", {"tie_word_embeddings": True})],
    ids=["projections", "tied"],
)
def test_in_bfloat16(model_type: str, settings: dict[str, Any], head_loss: str) -> None:
    model = tiny_lora(model_type, dtype=torch.bfloat16, **settings)
    check(model, f"{model_type}, {settings}", head_loss=head_loss)


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora on the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "lora on the head": {"target_modules": ["lm_head", "q_proj"]},
    "dora on the head": {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
    "dora on the embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_with_adapters_on_them(name: str, autocast: Any, head_loss: str) -> None:
    model = with_adapters(tiny_model("llama"), **ADAPTERS[name])
    if autocast is not None:
        cast_base_(model, autocast)
    ours = copy.deepcopy(model)
    with attach(model, PyAOConfig(policy="off", head_loss=head_loss)):
        expected = train(model, STEPS, autocast=autocast)
    with attach(ours, PyAOConfig(**HERE, head_loss=head_loss)) as offloader:
        found = train(ours, STEPS, autocast=autocast)
        assert offloader.weights is not None
        figures = offloader.weights.figures()["embeddings_and_head"]
        is_trained = name in ("trained head", "trained embedding")
        assert figures["host_bytes"] == (1 if is_trained else 2) * 64 * 32 * 4
    assert_same_trajectory(found, expected, name)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inputs_that_require_gradients_under_checkpointing(use_reentrant: bool) -> None:
    """PEFT's hook on the embedding makes its result a leaf that requires gradients."""
    model: Any = tiny_lora("llama", dropout=0.1)
    model.enable_input_require_grads()
    enable_checkpointing(model.base_model.model, use_reentrant=use_reentrant)
    check(model, f"reentrant: {use_reentrant}")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("model_type", FEW)
def test_evaluation_and_generation(model_type: str) -> None:
    model: Any = tiny_lora(model_type).eval()
    batch = tiny_batch(0)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = batch["input_ids"]
    with torch.no_grad():
        expected = model(**batch).logits
        tokens = model.generate(input_ids=ids, **options)
    with attach(model, PyAOConfig(**HERE)) as offloader:
        assert offloader.weights is not None
        with torch.inference_mode():
            assert torch.equal(model(**batch).logits, expected)
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, expected)
            before = offloader.weights.figures()["embeddings_and_head"]
            assert torch.equal(model.generate(input_ids=ids, **options), tokens)
        after = offloader.weights.figures()["embeddings_and_head"]
        # The head comes for each token; T5 and BART encode first, without it.
        assert after["num_uploads"] - before["num_uploads"] == 5
    assert (model_type in ENCODER_DECODERS) == model.config.is_encoder_decoder
