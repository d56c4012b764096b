"""Device memory by segment of a step: what is read at the layers' borders, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_pyao.plan.measure import segment_memory
from hf_pyao.plan.measure.segment_memory import (
    MeasuredGrowth,
    SegmentMemory,
    differences,
    unpredicted_bytes,
)

DEVICE = torch.device("cuda", 0)  # never touched

BORDERS = [
    ("forward", True),
    ("forward", False),
    ("forward", True),
    ("forward", False),
    ("backward", True),
    ("backward", False),
    ("backward", True),
    ("backward", False),
]
"""Of two layers, forward and backward."""


Look = tuple[int, int]


def found(
    monkeypatch: pytest.MonkeyPatch,
    looks: list[Look],
    gradient_bytes: int = 0,
    *,
    start: Look | None = None,
    behind: Look | None = None,
) -> dict[str, int]:
    """Return what is found where *looks* are what is allocated and the peak, border by border.

    The last one is at the micro-batch's end; *start* is where the model's forward begins, *behind*
    where the next one does.
    """
    left: Iterator[Look] = iter(
        [*([start] if start else []), *looks, *([behind] if behind else [])]
    )
    monkeypatch.setattr(segment_memory, "allocated_and_peak_bytes", lambda device: next(left))
    memory = SegmentMemory(DEVICE, lambda: gradient_bytes)
    if start:
        memory.at_start()
    for phase, is_start in BORDERS:
        memory.at_border(phase, is_start=is_start)
    memory.end()
    if behind:
        memory.at_start()
        memory.at_border("forward", is_start=True)  # reads no more: there is no further look
    assert not list(left)
    return memory.grown_bytes


def test_peaks_are_of_the_segment_in_which_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100), (130, 140), (131, 150), (160, 190), (165, 400)]
    looks += [(180, 420), (150, 420), (110, 420), (105, 420)]
    assert found(monkeypatch, looks) == {"forward": 90, "head": 300, "backward": 320}


def test_an_older_peak_hides_what_lies_between_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 900), (130, 900), (131, 900), (160, 900), (165, 900)]
    looks += [(180, 900), (150, 900), (110, 900), (105, 900)]
    assert found(monkeypatch, looks) == {"forward": 60, "head": 65, "backward": 80}


@pytest.mark.parametrize(("peak", "more"), [(440, {"optimizer": 340}), (420, {})])
def test_an_optimizer_that_takes_more_than_the_layers_is_seen(
    peak: int, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [(100, 100), (130, 140), (131, 150), (160, 190), (165, 400)]
    looks += [(180, 420), (150, 420), (110, 420), (105, 420)]
    measured = found(monkeypatch, looks, behind=(105, peak))
    assert measured == {"forward": 90, "head": 300, "backward": 320, **more}
    assert differences(measured, {"backward": 320}) == {"backward": 0}


def test_gradients_that_are_there_do_not_hide_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100)] * (len(BORDERS) + 1)
    assert found(monkeypatch, looks, gradient_bytes=30)["backward"] == 30


def test_what_comes_after_the_layers_is_a_part_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [*[(100, 100)] * len(BORDERS), (40, 170)]
    assert found(monkeypatch, looks)["backward"] == 70


def test_what_is_there_before_the_layers_is_of_all_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown = found(monkeypatch, [(100, 400)] * (len(BORDERS) + 1), start=(60, 400))
    assert grown == {"before": 40, "forward": 0, "head": 0, "backward": 0}
    predicted = {"before": 25, "forward": 4, "head": 6, "backward": 9}
    assert differences(grown, predicted) == {"forward": 11, "head": 9, "backward": 6}
    less = {**grown, "before": -50}
    assert differences(less, predicted) == {"forward": -4, "head": -6, "backward": -9}


def test_where_a_peak_was_not_seen_an_earlier_step_counts() -> None:
    measured = {"forward": 60, "head": 65, "backward": 80}
    predicted = {"forward": 50, "head": 60, "backward": 80}
    earlier = {"forward": 30, "head": 3, "backward": 90}
    most = {"forward": 200, "head": 200, "backward": 110}
    found = differences(measured, predicted, most, earlier)
    assert found == {"forward": 30, "head": 5, "backward": 30}
    is_seen = differences(measured, predicted, measured, earlier)
    assert is_seen == differences(measured, predicted)


def test_a_step_cannot_have_been_above_the_peak_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([(100, 100), (130, 140), (131, 140), (130, 140)])
    monkeypatch.setattr(segment_memory, "allocated_and_peak_bytes", lambda device: next(left))
    memory = SegmentMemory(DEVICE)
    for phase, is_start in (*BORDERS[:2], *BORDERS[4:6]):
        memory.at_border(phase, is_start=is_start)
    assert memory.grown_bytes == {"forward": 40, "head": 31, "backward": 30}
    assert memory.most_bytes == {"forward": 40, "head": 40, "backward": 40}


def test_a_device_that_does_not_count_tells_nothing() -> None:
    memory = SegmentMemory(torch.device("cpu"))
    memory.at_start()
    memory.at_border("forward", is_start=True)
    memory.end()
    assert not memory.grown_bytes


def test_of_each_step_its_peak_counts() -> None:
    more = {"forward": 40, "head": 5, "backward": -3}
    assert unpredicted_bytes(more, {"forward": 50, "head": 90, "backward": 60}) == 5
    assert unpredicted_bytes(more, {"forward": 70, "head": 90, "backward": 60}) == 20
    assert unpredicted_bytes(more, {"forward": 0, "head": 10, "backward": 60}) == 0
    assert unpredicted_bytes(more, {"another": 7}) == 0
    assert unpredicted_bytes({}, {"forward": 7}) == 0


def test_both_are_said() -> None:
    both = MeasuredGrowth({"backward": 69, "optimizer": 7}, {"backward": 60})
    assert both.figures()["measured_bytes/backward"] == 69
    assert str(both).endswith("69 bytes in backward (predicted: 60 bytes), 7 bytes in optimizer")
    assert not str(MeasuredGrowth())
