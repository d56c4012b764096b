"""Architectures without a written-out treatment: the general rule finds their layers."""

from __future__ import annotations

import copy

import pytest

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ARCHITECTURES,
    ENCODER_DECODERS,
    EVERYTHING,
    MAIN,
    assert_same_trajectory,
    tiny_batch,
    tiny_model,
    train,
)

OTHERS = sorted(set(ARCHITECTURES) - set(MAIN))
STEPS = tuple((tiny_batch(seed, length=8 + 2 * seed, padding=2),) for seed in range(3))


DEFAULT_WINDOW = PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", OTHERS)
def test_training_is_bitwise_the_same(model_type: str) -> None:
    model = tiny_model(model_type, dropout=0.1)
    expected = train(copy.deepcopy(model), STEPS)
    with attach(model, DEFAULT_WINDOW) as offloader:
        found = train(model, STEPS)
        assert_same_trajectory(found, expected, model_type)
        totals = offloader.totals()
        assert totals["num_micro_batches"] == len(STEPS)
        assert totals["offloaded_bytes"] > totals["held_bytes"]
        assert totals["reloaded_bytes"] == totals["offloaded_bytes"]
        assert offloader.host_pool.settle() == 0


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_encoder_and_decoder_layers_are_found_and_only_the_last_decoder_layer_is_kept(
    model_type: str,
) -> None:
    model = tiny_model(model_type)
    with attach(model, EVERYTHING) as offloader:
        assert len(offloader.layer_names) == 4
        assert "encoder" in offloader.layer_names[0]
        assert "decoder" in offloader.layer_names[-1]
        train(model, STEPS[:1])
        assert offloader.engine.num_layer_calls == 4
        # The encoder's states go to every decoder layer: moving one layer's would free nothing.
        assert offloader.metrics()["kept_bytes/shared by layers"] > 0
