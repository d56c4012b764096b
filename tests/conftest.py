"""What all tests share."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort out what runs here, and when."""
    _mark_sampled(items)
    _deselect_gpu(config, items)


def _mark_sampled(items: list[pytest.Item]) -> None:
    """Mark as thorough all but one in *every* of the cases of tests marked ``sampled``.

    Of a test with several parameters, those that are left differ in all of them, as long as *every*
    has no divisor in common with the number of values of any.
    """
    num_cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function = item.nodeid.partition("[")[0]
            if num_cases[function] % sampled.kwargs["every"]:
                item.add_marker("thorough")
            num_cases[function] += 1


def _deselect_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``gpu`` where there is no accelerator; pytest counts them.

    ``PYAO_GPU_DRY_RUN=1`` runs one case of each test that has a stand-in for a GPU, ``all`` every
    case; see ``tests/gpu/device.py``.
    """
    if torch.accelerator.is_available():
        return
    dry_run = os.environ.get("PYAO_GPU_DRY_RUN", "0")
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    tried: set[str] = set()
    for item in items:
        runs = item.get_closest_marker("gpu") is None
        if not runs and dry_run != "0" and "gpu" in getattr(item, "fixturenames", ()):
            function = item.nodeid.partition("[")[0]
            runs = dry_run == "all" or function not in tried
            tried.add(function)
        (kept if runs else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Keep torch on one thread: tiny tensors gain nothing from more, and test workers compete."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    """Fail a test that leaves saved-tensor hooks on: the tests after it would run under them."""
    yield
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert top is None, f"saved-tensor hooks were left on: {top}"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Undo what a recipe does to the package's logger: the next test counts its messages."""
    logger = logging.getLogger("hf_pyao")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Set aside what is there already, so that counting and collecting objects is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
