"""Layers that run again beside a cache of keys and values: equal bits, and the same cache."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import PyAOError
from tests.helpers import (
    ARCHITECTURES,
    EVERY_LAYER,
    HIDDEN,
    Batch,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)

Outcome = dict[str, torch.Tensor]
NAMES = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in NAMES else "past_key_values"
"""What the models of this transformers call their cache: ``cache`` from 5.24 on."""
MODELS = [*ARCHITECTURES]
CHUNKED = ["llama", "gpt2", "opt", "mistral", "gemma3_text"]
SETTINGS: list[dict[str, Any]] = [
    {"checkpoint_every": 1},
    {"checkpoint_every": 2},
    {"checkpoint_every": 3, "checkpoint_nested": True},
    {"checkpoint_every": 1, "save_attention": True},
]


def segments(**settings: Any) -> PyAOConfig:
    return EVERY_LAYER.with_settings(**settings)


def as_it_comes(model: nn.Module) -> Outcome:
    """``use_cache`` as the model's configuration has it."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**tiny_batch(0)).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def in_chunks(model: Any) -> Outcome:
    """The second chunk attends to the first, and the third to both."""
    torch.manual_seed(3)
    model.zero_grad()
    ids = tiny_batch(0, length=12)["input_ids"]
    cache: Any = DynamicCache(config=model.config)  # transformers 4 has models that make none here
    losses = []
    for start, stop in ((0, 5), (5, 9), (9, 12)):
        chunk = ids[:, start:stop]
        out = model(input_ids=chunk, labels=chunk, **{CACHE: cache}, use_cache=True)
        losses.append(out.loss)
        assert cache.get_seq_length() == stop
    torch.stack(losses).sum().backward()
    return {"losses": torch.stack(losses).detach(), **gradients_of(model)}


def without_the_first_chunks_loss(model: Any) -> Outcome:
    """Gradients reach the first chunk through its keys and values alone."""
    torch.manual_seed(3)
    model.zero_grad()
    ids = tiny_batch(0, length=10)["input_ids"]
    cache = model(input_ids=ids[:, :6], use_cache=True)[CACHE]
    loss = model(input_ids=ids[:, 6:], labels=ids[:, 6:], **{CACHE: cache}).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def with_a_learned_prefix(model: Any) -> Outcome:
    """As in prefix tuning: the keys and values of a prefix are parameters."""
    torch.manual_seed(3)
    model.zero_grad()
    config = model.config
    shape = (2, getattr(config, "num_key_value_heads", 4), 3, HIDDEN // 4)
    cache = DynamicCache()
    prefix = []
    for index in range(config.num_hidden_layers):
        prefix += [torch.randn(shape, requires_grad=True) for _ in range(2)]
        cache.update(prefix[-2] * 2, prefix[-1] * 2, index)
    ids = tiny_batch(0)["input_ids"]
    loss = model(input_ids=ids, labels=ids, **{CACHE: cache}).loss
    loss.backward()
    found = {f"prefix {n}": p.grad for n, p in enumerate(prefix) if p.grad is not None}
    assert len(found) == len(prefix)
    return {"loss": loss.detach(), **found, **gradients_of(model)}


def check(model: nn.Module, run: Callable[[Any], Outcome], **settings: Any) -> None:
    expected = run(copy.deepcopy(model))
    with attach(model, segments(**settings)) as offloader:
        for _ in range(2):
            assert_same_tensors(run(model), expected, str(settings))
        assert offloader.host_pool.settle() == 0
        lifecycle: Any = offloader._lifecycle
        assert lifecycle.refused == ""
        assert lifecycle.filled.num_runs > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.sampled(every=7)
def test_with_use_cache_as_it_comes(model_type: str, settings: dict[str, Any]) -> None:
    check(tiny_model(model_type, dropout=0.1), as_it_comes, **settings)


def _model(model_type: str) -> nn.Module:
    if model_type in ARCHITECTURES:
        return tiny_model(model_type, dropout=0.1)
    import transformers

    kinds = {
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
        "gemma3_text": (
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            {
                "head_dim": 8,
                "sliding_window": 4,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            },
        ),
    }
    config_name, name, more = kinds[model_type]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **more,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, name)(config).train()
    return model


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("run", [in_chunks, without_the_first_chunks_loss])
@pytest.mark.parametrize("model_type", CHUNKED)
@pytest.mark.sampled(every=7)
def test_chunks_that_attend_to_those_before(
    model_type: str, run: Callable[[Any], Outcome], settings: dict[str, Any]
) -> None:
    check(_model(model_type), run, **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_learned_prefix(settings: dict[str, Any]) -> None:
    check(tiny_model("llama"), with_a_learned_prefix, **settings)


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
@pytest.mark.parametrize("model_type", ["t5", "bart"])
@pytest.mark.sampled(every=1000)
def test_a_decoder_that_finds_its_cross_attention_in_the_cache(
    model_type: str, settings: dict[str, Any]
) -> None:
    def run(model: Any) -> Outcome:
        torch.manual_seed(3)
        model.zero_grad()
        batch = tiny_batch(0)
        encoded = model.get_encoder()(input_ids=batch["input_ids"])
        cache, losses = None, []
        for labels in (batch["labels"][:, :4], batch["labels"][:, 4:]):
            out = model(encoder_outputs=encoded, decoder_input_ids=labels.clamp(min=1),
                        **{CACHE: cache}, use_cache=True)  # fmt: skip
            cache = out[CACHE]
            losses.append(out.logits.square().mean())
        del out, cache, encoded
        gc.collect()
        torch.stack(losses).sum().backward()
        return {"losses": torch.stack(losses).detach(), **gradients_of(model)}

    check(tiny_model(model_type), run, **settings)


class SharedKeys(nn.Module):
    """Its second half attends to the keys and values of the first, as Gemma 3n's does."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

        torch.manual_seed(0)
        config = Gemma3nTextConfig(
            vocab_size=64, vocab_size_per_layer_input=64, hidden_size=HIDDEN, head_dim=8,
            intermediate_size=2 * HIDDEN, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
            laurel_rank=4, altup_num_inputs=2, sliding_window=4, pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        )  # fmt: skip
        self.model = Gemma3nForCausalLM(config).train()

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch)


def test_layers_that_read_what_other_layers_cached() -> None:
    """The caller lets the outputs, and the cache with them, go before backward."""
    check(SharedKeys(), as_it_comes, checkpoint_every=1)


def test_the_cache_is_not_held_where_the_caller_lets_it_go() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=4)
    batch: Batch = tiny_batch(0)
    with attach(model, segments(checkpoint_every=1)):
        out = model(**batch, use_cache=True)
        held = [weakref.ref(entry.keys) for entry in out[CACHE].layers]
        loss = out.loss
        del out
        gc.collect()
        assert [ref() for ref in held] == [None] * 4
        loss.backward()


def test_a_cache_that_is_written_in_place_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = tiny_model("llama")
    batch = tiny_batch(0)

    def step(model: Any) -> Outcome:
        model.zero_grad()
        cache = StaticCache(config=model.config, max_cache_len=16)
        loss = model(**batch, **{CACHE: cache}, use_cache=True).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients_of(model)}

    expected = step(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING), attach(model, segments(checkpoint_every=1)) as offloader:
        assert_same_tensors(step(model), expected, "")
        lifecycle: Any = offloader._lifecycle
        assert lifecycle.filled.num_runs == 0
    assert "may write its tensors in place; call the model with use_cache=False" in caplog.text


def test_keys_that_are_changed_after_the_forward_end_with_an_error() -> None:
    model: Any = tiny_model("llama")
    ids = tiny_batch(0)["input_ids"]
    with attach(model, segments(checkpoint_every=1)):
        cache = model(input_ids=ids[:, :4], use_cache=True)[CACHE]
        cache = copy.copy(cache)
        for entry in cache.layers:
            entry.keys, entry.values = entry.keys.detach(), entry.values.detach()
        found = [entry.keys for entry in cache.layers]
        loss = model(input_ids=ids[:, 4:], labels=ids[:, 4:], **{CACHE: cache}).loss
        for keys in found:
            keys.zero_()
        with pytest.raises(PyAOError, match="changed in place"):
            loss.backward()
