"""Starts the two ranks, once for each group of scenarios."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock

from tests.helpers.ranks import read_results, run_ranks

Results = list[dict[str, dict[str, Any]]]
"""One per rank: scenario name -> what was seen."""

ResultsOf = Callable[[str], Results]
"""From the name of a group of scenarios."""


@pytest.fixture(scope="session")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> ResultsOf:
    """Return what gives the ranks' results, group by group; workers of pytest-xdist share a run."""
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    root = tmp_path_factory.getbasetemp()
    root = root.parent if is_shared else root

    @functools.cache
    def results_of(group: str) -> Results:
        folder = root / f"distributed_{group}"
        with FileLock(f"{folder}.lock"):
            if folder.exists():
                return read_results(folder)
            return run_ranks("tests.distributed.worker", folder, group)

    return results_of
