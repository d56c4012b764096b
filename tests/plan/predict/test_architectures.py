"""Predictions at other lengths than were recorded, over many architectures: never below."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from hf_pyao import PyAOConfig
from hf_pyao.plan.predict.peak_cause import peak_cause
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.scaling import interpolate
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.fake_peak import peak_of

LENGTH = 32  # kernels round lengths up to this: what they save in between is no polynomial
LONGEST = 16 * LENGTH
WINDOW = 2**14
WIDTH, NUM_LAYERS, VOCAB = 32, 5, 96

_PLAIN: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": LONGEST,
}
_GATED = {**_PLAIN, "num_key_value_heads": 2}
_HEADS = {**_GATED, "head_dim": 8}
_GPT = {"n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": 4, "vocab_size": VOCAB}

SHAPES: dict[str, dict[str, Any]] = {
    "opt": {**_PLAIN, "word_embed_proj_dim": WIDTH, "ffn_dim": 2 * WIDTH},
    "gpt2": {**_GPT, "n_positions": LONGEST},
    "llama": _GATED,
    "biogpt": _PLAIN,
    "bloom": {"hidden_size": WIDTH, "n_layer": NUM_LAYERS, "n_head": 4, "vocab_size": VOCAB},
    "codegen": {**_GPT, "rotary_dim": 4, "n_positions": LONGEST},
    "cohere": _GATED,
    "cohere2": {**_GATED, "sliding_window": 1024},
    "falcon": {
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    },
    "gemma": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 1024},
    "gemma3_text": {**_HEADS, "sliding_window": 1024},
    "glm4": _HEADS,
    "gpt_bigcode": {**_GPT, "n_positions": LONGEST},
    "gpt_neox": _PLAIN,
    "gptj": {**_GPT, "rotary_dim": 4, "n_positions": LONGEST},
    "granite": _GATED,
    "mistral": {**_GATED, "sliding_window": 1024},
    "nemotron": _HEADS,
    "olmo2": _GATED,
    "persimmon": _PLAIN,
    "phi": _PLAIN,
    "phi3": _GATED,
    "qwen2": _GATED,
    "qwen3": _HEADS,
    "smollm3": _GATED,
    "stablelm": _GATED,
    "starcoder2": _GATED,
}
"""Model type -> settings; with one window for all lengths, which is what most models train in."""


def predicted(program: StepProgram, *, offloads: bool) -> Prediction:
    leaves = [
        offloads and slot.nbytes >= 1024 and slot.layer < NUM_LAYERS - 1 for slot in program.slots
    ]
    return predict(program, leaves, window_bytes=WINDOW)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", SHAPES)
def test_up_to_sixteen_times_the_recorded_length(architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **SHAPES[architecture])
    training = FakeTraining(config=config, training_state="device")
    lengths = [LENGTH, 2 * LENGTH, 3 * LENGTH]
    at = interpolate([(length, record_step(training, 2, length)) for length in lengths])
    for length in (4 * LENGTH, LONGEST):
        fresh = record_step(training, 2, length, is_whole=True)
        for offloads in (False, True):
            ours, theirs = (
                predicted(at(length), offloads=offloads),
                predicted(fresh, offloads=offloads),
            )
            assert theirs.peak_bytes <= ours.peak_bytes <= 1.02 * theirs.peak_bytes
            settings = PyAOConfig(
                policy="all" if offloads else "off",
                min_bytes=1024,
                window=WINDOW,
                host_memory_gib=2.0**20,
            )
            assert theirs.peak_bytes == peak_of(training, settings, 2, length).peak_bytes
            named = peak_cause(at(length), ours)
            truth = peak_cause(fresh, theirs)
            assert (named.phase, named.tensor, named.nbytes) == (
                truth.phase,
                truth.tensor,
                truth.nbytes,
            )
