"""Device memory by segment of a step: what is read at the layers' borders, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_pyao.plan.measure import segment_memory
from hf_pyao.plan.measure.segment_memory import SegmentMemory, unpredicted_bytes

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
    memory.at_border("forward", is_start=True)  # reads no more: there is no further look
    return memory.grown_bytes


def test_peaks_are_of_the_segment_in_which_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100), (130, 140), (131, 150), (160, 190), (165, 400)]
    looks += [(180, 420), (150, 420), (110, 420)]
    assert found(monkeypatch, looks) == {"forward": 90, "head": 300, "backward": 320}


def test_an_older_peak_hides_what_lies_between_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 900), (130, 900), (131, 900), (160, 900), (165, 900)]
    looks += [(180, 900), (150, 900), (110, 900)]
    assert found(monkeypatch, looks) == {"forward": 60, "head": 65, "backward": 80}


def test_gradients_that_are_there_do_not_hide_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(100, 100)] * len(BORDERS)
    assert found(monkeypatch, looks, gradient_bytes=30)["backward"] == 30


def test_a_device_that_does_not_count_tells_nothing() -> None:
    memory = SegmentMemory(torch.device("cpu"))
    memory.at_border("forward", is_start=True)
    assert not memory.grown_bytes
    assert unpredicted_bytes(memory.grown_bytes, {"forward": 5}) == 0


def test_the_segment_with_most_beside_the_prediction_counts() -> None:
    predicted = {"forward": 50, "head": 70, "backward": 60}
    assert unpredicted_bytes({"forward": 55, "head": 70, "backward": 69}, predicted) == 9
    assert unpredicted_bytes({"forward": 45, "head": 60}, predicted) == 0
    assert unpredicted_bytes({"another": 1e9}, predicted) == 0
