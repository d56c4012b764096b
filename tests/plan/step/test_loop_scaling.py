"""Steps with chunked losses, computed at other micro-batches, are those that are recorded there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig

from hf_pyao.levers import Levers
from hf_pyao.model import gradient_buffer
from hf_pyao.model.head import head_forward
from hf_pyao.model.losses import cross_entropy
from hf_pyao.model.losses.chunking import TOKEN_MULTIPLE, plan_chunks
from hf_pyao.plan.step.loop_scaling import LoopLines, interpolate_loops, likely_least_size
from hf_pyao.plan.step.loops import Loop
from hf_pyao.plan.step.scaling import OtherOperationsError
from hf_pyao.plan.step.step_program import Buffer, Operation, StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

LENGTH = 64


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops of many parts in steps of few tokens."""
    monkeypatch.setattr(gradient_buffer, "_BLOCK_ELEMENTS", 2**13)
    for module in (cross_entropy, head_forward):
        monkeypatch.setattr(module, "default_budget_bytes", lambda device: 2**20)


def recorded(micro_batch: int, *, checkpointing: bool = False, **levers: object) -> StepProgram:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2000,
    )
    training = FakeTraining(config=config, checkpointing=checkpointing)
    return record_step(training, micro_batch, LENGTH, levers=Levers(head_loss="chunked", **levers))


def line_of(checkpointing: bool) -> tuple[LoopLines, int, Callable[[int], StepProgram]]:
    single = recorded(1, checkpointing=checkpointing)
    first = likely_least_size(single)
    assert first is not None
    points = [(1, single), (first, recorded(first, checkpointing=checkpointing))]
    sizes = LoopLines(points).telling_sizes(first)
    assert sizes is not None
    at = interpolate_loops([(size, recorded(size, checkpointing=checkpointing)) for size in sizes])
    return LoopLines(points), first, at


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_computed_step_is_the_recorded_one(checkpointing: bool) -> None:
    lines, first, at = line_of(checkpointing)
    assert any(each.num_parts > 4 for each in lines.at(first))
    compared = 0
    for size in (first + 6, 1000):
        if lines.holds(size):
            found, expected = at(size), recorded(size, checkpointing=checkpointing)
            for field in dataclasses.fields(StepProgram):
                if field.compare:
                    assert getattr(found, field.name) == getattr(expected, field.name), field.name
            compared += 1
    assert compared == 2
    with pytest.raises(OtherOperationsError, match="few"):
        at(1)


def test_loops_are_cut_as_the_code_cuts_them() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rows, most = draw.randint(1, 20_000), draw.randint(1, 40) * TOKEN_MULTIPLE
        chunks = plan_chunks(rows, 100, 8, torch.bfloat16, (), most)
        for loop, parts in (
            (Loop(rows, most, TOKEN_MULTIPLE), list(chunks.slices())),
            (Loop(rows, most), list(Loop(rows, most).slices())),
        ):
            start, stop = parts[-1]
            assert (loop.num_parts, loop.last_rows) == (len(parts), stop - start)
            assert loop.part_rows == parts[0][1] - parts[0][0]


def made_up(size: int, nbytes: int) -> StepProgram:
    """Return a step of one operation, with a loop over ten rows of each sample in parts of four."""
    operation = Operation("mm", "", 2.0, 7, True)
    buffer = Buffer(nbytes, 0, 1)
    return StepProgram(
        (operation,), (buffer,), (), (), 0, ("layer",), loops=(Loop(10 * size, 4), Loop(3, 2))
    )


def test_a_number_that_is_no_line_is_refused() -> None:
    lines = LoopLines([(1, made_up(1, 0)), (8, made_up(8, 0))])
    sizes = lines.telling_sizes(8)
    assert sizes is not None
    for grows in (
        lambda size: 5,
        lambda size: 5 + 3 * size,
        lambda size: 2 * lines.at(size)[0].last_rows,
        lambda size: 1 + lines.at(size)[0].num_parts,
    ):
        at = interpolate_loops([(size, made_up(size, grows(size))) for size in sizes])
        assert [at(size).buffers[0].nbytes for size in range(8, 40)] == list(
            map(grows, range(8, 40))
        )
    with pytest.raises(OtherOperationsError, match="no line"):
        interpolate_loops([(size, made_up(size, size**2)) for size in sizes])


def test_other_loops_are_refused() -> None:
    other = dataclasses.replace(made_up(8, 0), loops=(Loop(80, 5), Loop(3, 2)))
    unknown = dataclasses.replace(made_up(8, 0), loops=(None,))
    for second in (other, unknown):
        with pytest.raises(OtherOperationsError, match="other loops"):
            LoopLines([(1, made_up(1, 0)), (8, second)])
    assert likely_least_size(unknown) is None
