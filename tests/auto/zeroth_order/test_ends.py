"""Embeddings and head that visit by rows: bits, bytes on the device, and other readers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_pyao import ZerothOrder, ZerothOrderSettings
from tests.auto.zeroth_order.test_step import EPSILON, RATE, Losses, check
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainMeZO

MANY_WORDS = {"vocab_size": 1600}
"""An embedding of several pieces: 1,600 x 32 float32 are 200 KiB, a layer has about 40."""


def pieces_of(made: ZerothOrder, name: str) -> int:
    return sum(block.layer == name for block in made.blocks)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bits_are_those_of_resident_weights(tied: bool, momentum: float) -> None:
    model = tiny_model("llama", dropout=0.1, tie_word_embeddings=tied, **MANY_WORDS)
    made = check(model, 4, momentum=momentum, resume_at=2, micro_batches=2, stream_embeddings="on")
    names = {block.layer for block in made.blocks}
    assert len([name for name in names if "layers" not in name]) == (1 if tied else 2)
    assert max(pieces_of(made, name) for name in names) > 2


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["opt", "gpt2", "bart", "gemma3_text", "falcon", "t5"])
@pytest.mark.parametrize("num_resident", [0, None])
def test_other_architectures(architecture: str, num_resident: int | None) -> None:
    model = tiny_model(architecture, dropout=0.1, **MANY_WORDS)
    resident = 99 if num_resident is None else num_resident
    check(model, 6, num_resident=resident, resume_at=3, stream_embeddings="on")


def test_frozen_ends_are_read_by_rows_too() -> None:
    model = tiny_model("llama", **MANY_WORDS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name)
    check(model, 3, stream_embeddings="on")


def test_each_piece_comes_once_a_step_and_goes_back_once() -> None:
    model = tiny_model("llama", tie_word_embeddings=False, **MANY_WORDS)
    batch = tiny_batch(0)
    with ZerothOrder(model, stream_embeddings="on") as made:
        for number in range(5):
            before = made.figures()
            made.accumulate(model, lambda model: model(**batch).loss)
            made.end_step(RATE)
            after = made.figures()
            if number > 2:
                assert after["num_uploads"] - before["num_uploads"] == len(made.blocks)
                assert after["num_late_uploads"] == before["num_late_uploads"]
                assert after["num_offloads"] - before["num_offloads"] == len(made.blocks)
        distinct = batch["input_ids"].unique().numel()
        assert after["gathered_rows"] == 5 * distinct, "once for both passes"
        largest_layer = max(b.nbytes for b in made.blocks if "layers" in b.layer)
        assert max(block.nbytes for block in made.blocks) == largest_layer


def test_whoever_reads_the_weight_otherwise_gets_all_of_it() -> None:
    """A model that multiplies with its embedding's weight by itself."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model("llama", tie_word_embeddings=False, **MANY_WORDS)
            self.config = self.inner.config

        def forward(self, **batch: Any) -> Any:
            out = self.inner(**batch)
            weight = self.inner.model.embed_tokens.weight
            out.loss = out.loss + (weight * weight).mean() + weight[:7].t().sum()
            assert weight.shape == (1600, 32)
            return out

    check(Reads(), 3, stream_embeddings="on")


def test_parts_of_the_model_can_be_called_outside_of_a_step() -> None:
    model = tiny_model("llama", tie_word_embeddings=False, **MANY_WORDS)
    plain_model = copy.deepcopy(model)
    batch = tiny_batch(0)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5)
    for options in ({"stream_embeddings": "on"}, {}):
        with ZerothOrder(model, settings, **options) as made:
            made.load_state_dict({"num_steps": plain.num_steps, "seed": 5, "momentum": {}})
            plain.step(Losses([batch]), RATE)
            made.accumulate(model, lambda model: model(**batch).loss)
            made.end_step(RATE)
            ids = batch["input_ids"]
            with torch.no_grad():
                expected = plain_model.model(ids).last_hidden_state
                assert torch.equal(model.model(ids).last_hidden_state, expected)
                plain.step(Losses([batch]), RATE)
                made.accumulate(model, lambda model: model(**batch).loss)
                made.end_step(RATE)
                expected = plain_model.model.embed_tokens(ids)
                assert torch.equal(model.model.embed_tokens(ids), expected)
                assert torch.equal(model.lm_head(expected), plain_model.lm_head(expected))
                layer = model.model.layers[1].mlp
                expected_mlp = plain_model.model.layers[1].mlp(expected)
                assert torch.equal(layer(expected), expected_mlp)


def test_products_by_pieces_have_a_bias() -> None:
    model = tiny_model("llama", tie_word_embeddings=False, **MANY_WORDS)
    model.lm_head.bias = nn.Parameter(torch.randn(1600))
    check(model, 2, stream_embeddings="on")
    with ZerothOrder(model, stream_embeddings="on"), torch.no_grad():
        hidden = torch.randn(2, 3, 32)
        found = model.lm_head(hidden)
    assert torch.equal(found, F.linear(hidden, model.lm_head.weight, model.lm_head.bias))
