"""Shows few of the equal parts that a recorded step runs one after the other.

Chunks of the head loss, tiles of an MLP, blocks of rows that a gradient is narrowed in, groups of
attention: one stands for the equal ones behind it, which leave memory as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from torch._guards import active_fake_mode

from hf_pyao.model.gradient_buffer import RowBlocks
from hf_pyao.model.losses.chunking import ChunkPlan
from hf_pyao.model.tiles import TilePlan
from hf_pyao.plan.options.group_plan import Group, GroupPlan
from hf_pyao.plan.step.loops import NUM_SHOWN
from hf_pyao.plan.step.step_recorder import StepRecorder

Part = TypeVar("Part")


@contextmanager
def few_parts(recorder: StepRecorder) -> Iterator[None]:
    """Let loops over equal parts show three of them: the second stands for the rest.

    It stands for all but first and last. Another thread's, on real tensors, are all there.
    """
    with (
        _few(ChunkPlan, "slices", recorder),
        _few(TilePlan, "slices", recorder),
        _few(RowBlocks, "slices", recorder),
        _few(GroupPlan, "groups", recorder, _size_of_group),
    ):
        yield


def _size_of_group(group: Group) -> tuple[int, int]:
    return group.end_sample - group.first_sample, group.end_head - group.first_head


@contextmanager
def _few(
    kind: type[Any],
    method: str,
    recorder: StepRecorder,
    size_of: Callable[[Any], object] | None = None,
) -> Iterator[None]:
    """Let *method* of *kind*, which yields the parts of a loop, yield few of them.

    Args:
        kind: has the loop's parts.
        method: yields them.
        recorder: told how often a part is to run.
        size_of: the size of a part; None: all but the last have one size.
    """
    all_parts = getattr(kind, method)

    def few(plan: Any) -> Iterator[Any]:
        parts = list(all_parts(plan))
        if len(parts) <= NUM_SHOWN or active_fake_mode() is None:
            yield from parts
            return
        runs = [parts] if size_of is None else _runs_of_equal(parts, size_of)
        for run in runs:
            yield from _shown(run, recorder)

    with mock.patch.object(kind, method, few):
        yield


def _runs_of_equal(parts: Sequence[Part], size_of: Callable[[Part], object]) -> list[list[Part]]:
    """Return *parts* in runs of neighbours of one size."""
    runs: list[list[Part]] = []
    for part in parts:
        if not runs or size_of(runs[-1][-1]) != size_of(part):
            runs.append([])
        runs[-1].append(part)
    return runs


def _shown(run: Sequence[Part], recorder: StepRecorder) -> Iterator[Part]:
    """Yield first, second and last of *run*; what is seen of the second runs for all between."""
    if len(run) <= NUM_SHOWN:
        yield from run
        return
    yield run[0]
    outside = recorder.num_runs
    recorder.count_as(outside * (len(run) - 2))
    yield run[1]
    recorder.count_as(outside)
    yield run[-1]
