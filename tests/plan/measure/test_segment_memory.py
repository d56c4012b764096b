"""Device memory by segment of a step: what is read at the layers' borders, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_pyao.plan.measure import segment_memory
from hf_pyao.plan.measure.segment_memory import MeasuredGrowth, SegmentMemory

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


def found(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int]], gradient_bytes: int = 0
) -> dict[str, int]:
    """Return what is found where *looks* are what is allocated and the peak, border by border."""
    left: Iterator[tuple[int, int]] = iter(looks)
    monkeypatch.setattr(segment_memory, "allocated_and_peak_bytes", lambda device: next(left))
    memory = SegmentMemory(DEVICE, lambda: gradient_bytes)
    for phase, is_start in BORDERS:
        memory.at_border(phase, is_start=is_start)
    memory.end()
    if len(looks) > len(BORDERS):
        memory.at_border("forward", is_start=True)  # of the next micro-batch
        memory.at_border("forward", is_start=False)  # reads no more: there is no further look
    return memory.grown_bytes


def test_peaks_are_of_the_segment_in_which_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100), (130, 140), (131, 150), (160, 190), (165, 400)]
    looks += [(180, 420), (150, 420), (110, 420)]
    assert found(monkeypatch, looks) == {"forward": 90, "head": 300, "backward": 320}


def test_an_older_peak_hides_what_lies_between_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 900), (130, 900), (131, 900), (160, 900), (165, 900)]
    looks += [(180, 900), (150, 900), (110, 900)]
    assert found(monkeypatch, looks) == {"forward": 60, "head": 65, "backward": 80}


@pytest.mark.parametrize(("peak", "more"), [(440, {"optimizer": 340}), (420, {})])
def test_an_optimizer_that_takes_more_than_the_layers_is_seen(
    peak: int, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [(100, 100), (130, 140), (131, 150), (160, 190), (165, 400)]
    looks += [(180, 420), (150, 420), (110, 420), (105, peak)]
    measured = found(monkeypatch, looks)
    assert measured == {"forward": 90, "head": 300, "backward": 320, **more}
    assert MeasuredGrowth(measured, {"backward": 320}).unpredicted_bytes == 0


def test_gradients_that_are_there_do_not_hide_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100)] * len(BORDERS)
    assert found(monkeypatch, looks, gradient_bytes=30)["backward"] == 30


def test_a_device_that_does_not_count_tells_nothing() -> None:
    memory = SegmentMemory(torch.device("cpu"))
    memory.at_border("forward", is_start=True)
    assert not memory.grown_bytes
    assert MeasuredGrowth(memory.grown_bytes, {"forward": 5}).unpredicted_bytes == 0


def test_the_segment_with_most_beside_the_prediction_counts() -> None:
    predicted = {"forward": 50, "head": 70, "backward": 60}
    both = MeasuredGrowth({"forward": 55, "head": 70, "backward": 69}, predicted)
    assert both.unpredicted_bytes == 9
    assert both.figures()["measured_bytes/backward"] == 69
    assert str(both).endswith("69 bytes in backward (predicted: 60 bytes)")
    assert MeasuredGrowth({"forward": 45, "head": 60}, predicted).unpredicted_bytes == 0
    assert MeasuredGrowth({"another": 10**9}, predicted).unpredicted_bytes == 0
    assert not str(MeasuredGrowth())
