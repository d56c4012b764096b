"""What kernels allocate inside, in programs, at other sizes, and in predictions."""

from __future__ import annotations

import dataclasses
import json
from math import ceil

import pytest

from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.scaling import interpolate
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    OUTSIDE,
    Buffer,
    Operation,
    Segment,
    StepProgram,
)
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step, recorded_step

FLASH = "_scaled_dot_product_flash_attention_backward"


def made_up(workspaces: list[int]) -> StepProgram:
    """Return a step of operations that make 10 bytes each and hold them for one operation."""
    end = len(workspaces)
    return StepProgram(
        operations=tuple(
            Operation(f"op{n}", "", 0.0, 0, True, workspace_bytes=nbytes)
            for n, nbytes in enumerate(workspaces)
        ),
        buffers=tuple(Buffer(10, n, min(n + 1, end)) for n in range(end)),
        slots=(),
        segments=(Segment(BACKWARD, OUTSIDE, 0, end),),
        resident_bytes=100,
        layer_names=("layer",),
    )


def test_a_workspace_counts_at_its_operation_beside_the_results() -> None:
    found = predict(made_up([0, 500, 0]), [], window_bytes=0)
    assert found.live_bytes == (110, 610, 110)
    assert (found.peak_bytes, found.peak_at) == (610, 1)


def flash_bytes(batch: int, tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return what ``mha_bwd`` allocates inside for heads of a multiple of 32 up to 128."""
    rounded = ceil(tokens / 128) * 128
    sums = 4 * batch * rounded * heads * (width + 1)
    return sums + (4 * batch * tokens * heads * width if key_heads != heads else 0)


def record(name: str, batch: int, tokens: int) -> StepProgram:
    training = FakeTraining(config=config_of(parse_model(name)), training_state="device")
    return record_step(training, batch, tokens)


def workspaces(program: StepProgram, name: str = FLASH) -> set[int]:
    found = {each.workspace_bytes for each in program.operations if each.name == name}
    assert len([each for each in program.operations if each.name == name]) == program.num_layers
    return found


def test_every_layer_of_a_recorded_step_has_its_workspace() -> None:
    program = record("llama:tiny", 2, 100)
    config = config_of(parse_model("llama:tiny"))
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    expected = flash_bytes(2, 100, heads, config.num_key_value_heads, width)
    (found,) = workspaces(program)
    assert expected <= found <= expected + 2 * 2 * 2 * 100 * config.hidden_size  # copies
    assert found in program_peaks(program)


def program_peaks(program: StepProgram) -> set[int]:
    """Return how far the live bytes go up for each operation with a workspace, and come down."""
    live = predict(program, [False] * len(program.slots), window_bytes=0).live_bytes
    bare = dataclasses.replace(
        program, operations=[each._replace(workspace_bytes=0) for each in program.operations]
    )
    without = predict(bare, [False] * len(program.slots), window_bytes=0).live_bytes
    return {more - less for more, less in zip(live, without, strict=True)}


@pytest.mark.parametrize("is_length", [False, True])
def test_a_step_at_another_size_has_the_workspace_of_that_size(is_length: bool) -> None:
    """Rounding makes workspaces uneven: they follow from shapes, not from workspaces."""
    if is_length:
        points = [(length, record("gpt2:tiny", 1, length)) for length in (64, 128, 192)]
        wanted = [(320, record("gpt2:tiny", 1, 320)), (1024, record("gpt2:tiny", 1, 1024))]
    else:
        points = [(batch, record("llama:tiny", batch, 72)) for batch in (2, 3)]
        wanted = [(9, record("llama:tiny", 9, 72)), (64, record("llama:tiny", 64, 72))]
    at = interpolate(points)
    for size, recorded in wanted:
        found = [each.workspace_bytes for each in at(size).operations]
        assert found == [each.workspace_bytes for each in recorded.operations]
        assert any(found)


def test_a_document_keeps_calls_and_settings() -> None:
    training = FakeTraining(config=config_of(parse_model("llama:tiny")))
    step = recorded_step(training, 2, 100)
    document = json.loads(json.dumps(step.to_dict()))
    again = RecordedStep.from_dict(document)
    assert again.program.operations == step.program.operations
    assert again.program.kernels == step.program.kernels
    document["kernels"] = list(KernelSettings(100, 90, True))
    with pytest.raises(ReportError, match="workspace of"):  # they are not those of this device
        RecordedStep.from_dict(document)


def test_a_document_from_before_has_no_workspaces() -> None:
    training = FakeTraining(config=config_of(parse_model("llama:tiny")))
    document = recorded_step(training, 2, 100).to_dict()
    del document["kernels"]
    document["operations"] = [json.dumps(json.loads(line)[:6]) for line in document["operations"]]
    program = RecordedStep.from_dict(document).program
    assert not any(each.workspace_bytes for each in program.operations)


def test_a_step_on_another_device_has_the_workspaces_of_that_device() -> None:
    program = record("llama:tiny", 1, 100)
    other = KernelSettings(100, 90, is_deterministic=True)
    moved = program.with_kernels(other)
    training = FakeTraining(
        config=config_of(parse_model("llama:tiny")), training_state="device", kernels=other
    )
    there = record_step(training, 1, 100)
    assert [o.workspace_bytes for o in moved.operations] == [
        o.workspace_bytes for o in there.operations
    ]
    assert min(workspaces(moved)) > max(workspaces(program))
    assert moved.with_kernels(program.kernels).operations == program.operations
