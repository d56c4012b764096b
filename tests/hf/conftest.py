"""Tests of trainers and plugins begin and end without what Accelerate keeps of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps process-wide state, and Trainers leave settings for it in the environment.

    Every test begins and ends without either.
    """
    with mock.patch.dict(os.environ):
        for name in [each for each in os.environ if each.startswith(("PYAO_", "ACCELERATE_"))]:
            del os.environ[name]
        reset_accelerate()
        yield
    reset_accelerate()


def reset_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
