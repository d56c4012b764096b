"""Streamed weights under DDP: the same parameters, whether attached before or after wrapping."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


def test_parameters_are_the_same_on_two_ranks(tmp_path: Path) -> None:
    for facts in run_ranks("tests.distributed.streaming_worker", tmp_path):
        assert facts["before"]["same"]
        assert facts["after"]["same"]
        assert facts["before"]["ignored"] > 0
