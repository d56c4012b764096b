"""Shows few of the equal parts that a recorded step runs one after the other.

Chunks of the head loss, tiles of an MLP, blocks of rows that a gradient is narrowed in, groups of
attention: one stands for the equal ones behind it, which leave memory as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch._guards import active_fake_mode

from hf_pyao.plan.step.loops import NUM_SHOWN, told_of_parts
from hf_pyao.plan.step.step_recorder import StepRecorder

Part = TypeVar("Part")


@contextmanager
def few_parts(recorder: StepRecorder) -> Iterator[None]:
    """Let loops over equal parts show three of them: the second stands for the rest.

    It stands for all but first and last. Another thread's, on real tensors, are all there.
    """

    def few(parts: Sequence[Any], size_of: Callable[[Any], object] | None) -> Iterator[Any]:
        if len(parts) <= NUM_SHOWN or active_fake_mode() is None:
            yield from parts
            return
        for run in [parts] if size_of is None else _runs_of_equal(parts, size_of):
            yield from _shown(run, recorder)

    with told_of_parts(few):
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
