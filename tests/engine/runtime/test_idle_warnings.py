"""Offloading that is on and moves nothing says so once, with the reasons and what to do."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM

from hf_pyao import PyAOConfig, attach
from tests.helpers import EVERYTHING, tiny_batch, tiny_model


def warnings_of(
    caplog: pytest.LogCaptureFixture, model: nn.Module, config: PyAOConfig, steps: int = 3
) -> tuple[str, list[str]]:
    """Train a few steps; return the description, and what was warned."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_pyao"), attach(model, config) as offloader:
        for _ in range(steps):
            model(**tiny_batch()).loss.backward()
        return offloader.describe(), [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        (
            {"min_bytes": 2**30},
            r"KiB 'below min_bytes'; .*'last layer';.* Remedy: lower min_bytes,",
        ),
        ({"host_memory_gib": 0}, r"'host memory full'.* Remedy: raise host_memory_gib"),
        ({"policy": "modules", "modules": ("core_attn",), "min_bytes": 2**30}, "'below min_bytes'"),
    ],
)
def test_a_micro_batch_of_which_all_stays_is_warned_about_once(
    values: dict[str, Any], pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, warned = warnings_of(caplog, tiny_model("llama"), replace(EVERYTHING, **values), steps=1)
    ours = [text for text in warned if text.startswith("offloading has no effect")]
    assert len(ours) == 1
    assert re.search(pattern, ours[0]), ours[0]
    _, warned = warnings_of(caplog, tiny_model("llama"), replace(EVERYTHING, **values))
    assert sum(text.startswith("offloading has no effect") for text in warned) == 1


def test_keeping_every_layer_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(EVERYTHING, keep_last_layers=9)
    described, warned = warnings_of(caplog, tiny_model("llama"), config)
    assert described.startswith("hf_pyao offloads nothing, unless a layer runs several times")
    (text,) = warned
    assert "keep_last_layers=9 keeps on the device what all 3 layers save" in text
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        caplog.clear()
        attach(tiny_model("llama"), config).detach()
    assert len(caplog.records) == 1, "without waiting for a step"


def test_one_layer_that_runs_several_times_is_not(caplog: pytest.LogCaptureFixture) -> None:
    config = AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = AlbertForMaskedLM(config).train()
    ours = replace(EVERYTHING, layers=("albert.encoder.albert_layer_groups.*",))
    with attach(model, ours) as offloader:
        assert len(offloader.layer_names) == 1
        for _ in range(2):
            model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
    _, warned = warnings_of(caplog, model, ours)
    assert warned == []


@pytest.mark.parametrize(
    "config",
    [
        EVERYTHING,
        replace(EVERYTHING, policy="off"),
        replace(EVERYTHING, min_bytes=2**30, recompute_modules=("pointwise",)),
    ],
)
def test_what_works_as_it_should_is_not_warned_about(
    config: PyAOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    _, warned = warnings_of(caplog, tiny_model("llama"), config)
    assert warned == []
