"""Headline sizes fit their card with what flash attention's backward allocates inside.

The bytes of a call are those of PyTorch's ``flash_api.cpp``, ``mha_bwd``, written out here; what is
there beside them is predicted with the table of workspaces taken out.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from math import ceil
from typing import Any

import pytest

from hf_pyao.plan.hardware.attention_workspaces import AttentionShape
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.step_program import BACKWARD, OUTSIDE, StepProgram
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import LONG_CONTEXT

FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
MULTIPROCESSORS = {"rtx4070": 46, "rtx4090": 128, "h200": 132}


def inside(shape: AttentionShape, multiprocessors: int, *, is_deterministic: bool) -> int:
    """Return what ``mha_bwd`` allocates beside dq, dk and dv."""
    head_size = ceil(shape.head_dim / 8) * 8
    width = ceil(head_size / 32) * 32 if head_size <= 128 else ceil(head_size / 64) * 64
    length = ceil(shape.queries / 128) * 128
    splits = ceil(multiprocessors / (shape.batch * shape.heads)) if is_deterministic else 1
    nbytes = 4 * splits * shape.batch * length * shape.heads * width
    nbytes += 4 * shape.batch * shape.heads * length
    if shape.heads != shape.key_heads:
        nbytes += 2 * 2 * shape.batch * shape.keys * shape.heads * head_size
    return nbytes


def bare(program: StepProgram) -> StepProgram:
    operations = [each._replace(workspace_bytes=0, call=None) for each in program.operations]
    return dataclasses.replace(program, operations=operations)


def check(
    estimator: Estimator, found: Outcome, batch: int, *, is_deterministic: bool = False
) -> int:
    """Check that all calls of the kernel are there, and fit; return the largest workspace."""
    program, config = found.program, estimator.config
    rest = bare(program)
    live = predict(
        rest, estimator.leaves(LONG_CONTEXT, rest), window_bytes=estimator.window_bytes
    ).live_bytes
    pairs: defaultdict[int, int] = defaultdict(int)
    largest = 0
    multiprocessors = estimator.hardware.num_multiprocessors
    for segment in program.segments:
        if segment.phase != BACKWARD or segment.layer == OUTSIDE:
            continue
        for number in range(segment.start, segment.end):
            operation = program.operations[number]
            if operation.name != FLASH_BACKWARD:
                continue
            assert operation.call is not None
            shape = AttentionShape(*operation.call.sizes)
            pairs[segment.layer] += shape.batch * shape.heads * operation.num_runs
            nbytes = inside(shape, multiprocessors, is_deterministic=is_deterministic)
            assert nbytes <= operation.workspace_bytes <= nbytes + shape.copied_bytes
            assert live[number] + nbytes <= estimator.limit_bytes
            assert live[number] + nbytes <= found.late.peak_bytes
            largest = max(largest, nbytes)
    assert dict(pairs) == dict.fromkeys(
        range(program.num_layers), batch * config.num_attention_heads
    )
    return largest


def test_a_small_step_holds_each_workspace() -> None:
    at = estimator(config_of(parse_model("llama:tiny")), find_hardware("rtx4070"), 72, False)
    assert check(at, at.predicted(LONG_CONTEXT, "chunked", 3)[0], 3) > 0


CASES: list[tuple[str, str, int | None]] = [
    ("gpt2:0.8b", "rtx4070", 512),
    ("opt:1.3b", "rtx4070", 512),
    ("llama:1.2b", "rtx4070", 512),
    ("llama:1.2b", "rtx4070", None),
    ("llama:1.2b", "rtx4090", None),
    ("llama:8b", "h200", None),
]
"""Model, card, and the length of samples; None: the longest sequence of one sample."""


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "card", "length"), CASES)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_headline_sizes_fit_with_workspaces(
    model: str, card: str, length: int | None, is_deterministic: bool
) -> None:
    hardware = find_hardware(card)
    assert hardware.num_multiprocessors == MULTIPROCESSORS[card]
    config = config_of(parse_model(model))

    def at(tokens: int) -> Estimator:
        return estimator(config, hardware, tokens, is_deterministic)

    if length is None:
        longest = at(512).longest_sequence(LONG_CONTEXT, "chunked")
        chosen, batch = at(longest), 1
    else:
        chosen = at(length)
        batch = chosen.row(LONG_CONTEXT, "chunked", with_longest=False).largest_micro_batch
    found, _ = chosen.predicted(LONG_CONTEXT, "chunked", batch)
    assert check(chosen, found, batch, is_deterministic=is_deterministic) > 0


def estimator(config: Any, hardware: Hardware, tokens: int, is_deterministic: bool) -> Estimator:
    """Return what README's figures are estimated with: ZeRO-2, its optimizer on the host."""
    kernels = hardware.kernels._replace(is_deterministic=is_deterministic)
    return Estimator(
        config, hardware, training_state="host", sequence_length=tokens, kernels=kernels
    )
