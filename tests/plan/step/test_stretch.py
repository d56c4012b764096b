"""A program of four layers, stretched, is that of the whole model."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.stretch import stretch
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

SHAPES = {
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 7, "n_head": 2, "n_positions": 64, "vocab_size": 64},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    },
}


def training(architecture: str, **options: object) -> FakeTraining:
    config = AutoConfig.for_model(architecture, **SHAPES[architecture])
    return FakeTraining(config=config, **options)  # type: ignore[arg-type]


def alive(program: StepProgram, *, offloads: bool, window: int | None) -> tuple[object, ...]:
    leaves = [offloads and slot.layer < program.num_layers - 1 for slot in program.slots]
    predicted = predict(program, leaves, window_bytes=window)
    kernels = [
        (operation.name, live)
        for operation, live in zip(program.operations, predicted.live_bytes, strict=True)
        if operation.is_kernel
    ]
    return predicted.peak_bytes, predicted.offloaded_bytes, predicted.host_peak_bytes, kernels


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training_state", ["host", "device"])
@pytest.mark.sampled(every=1000)
def test_it_is_that_of_the_whole_model(
    architecture: str, checkpointing: bool, training_state: str
) -> None:
    options = {"checkpointing": checkpointing, "training_state": training_state}
    fake = training(architecture, **options)
    whole = record_step(fake, 2, 32, is_whole=True)
    stretched = record_step(fake, 2, 32)
    assert sorted(stretched.forms.values()) == sorted(whole.forms.values())
    assert stretched.num_layers == whole.num_layers == 7
    assert stretched.layer_names == whole.layer_names
    assert stretched.resident_bytes == whole.resident_bytes
    assert [s.name for s in stretched.slots] == [s.name for s in whole.slots]
    for window in (None, 0, 20_000):
        for offloads in (False, True):
            assert alive(stretched, offloads=offloads, window=window) == alive(
                whole, offloads=offloads, window=window
            )


@pytest.mark.thorough
@pytest.mark.parametrize("keep_last_layers", [0, 1, 2, 3])
def test_recomputing_in_all_but_the_last_layers(keep_last_layers: int) -> None:
    options = {"recompute_modules": ("pointwise",), "keep_last_layers": keep_last_layers}
    fake = training("llama")
    stretched = record_step(fake, 2, 32, **options)  # type: ignore[arg-type]
    whole = record_step(fake, 2, 32, is_whole=True, **options)  # type: ignore[arg-type]
    for window in (None, 0, 20_000):
        assert alive(stretched, offloads=True, window=window) == alive(
            whole, offloads=True, window=window
        )


@pytest.mark.thorough
def test_other_programs_are_refused() -> None:
    program = record_step(training("llama"), 1, 16)
    with pytest.raises(ValueError, match="a program of 7 layers cannot be stretched to 9"):
        stretch(program, [f"layer{number}" for number in range(9)], 0)
