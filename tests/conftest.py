"""What all tests share."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _python_dispatch

from tests.catalogue.witness import keys_expected, keys_seen


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort out what runs here, and when."""
    _mark_sampled(items)
    _deselect_gpu(config, items)
    _deselect_other_shares(config, items)


def _deselect_other_shares(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run one share of the thorough tests: ``HF_PYAO_TEST_SHARE=2/6`` is the second sixth.

    Which share a test belongs to follows from its name, so that all shares together are all tests.
    """
    share = os.environ.get("HF_PYAO_TEST_SHARE", "")
    if not share:
        return
    number, _, count = share.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"HF_PYAO_TEST_SHARE is {share!r}; expected a share such as 2/6.")
    others = [
        item
        for item in items
        if item.get_closest_marker("thorough") is not None
        and zlib.crc32(item.nodeid.encode()) % int(count) != int(number) - 1
    ]
    config.hook.pytest_deselected(items=others)
    left_out = set(map(id, others))
    items[:] = [item for item in items if id(item) not in left_out]


MOST_CASES = 2
"""How many cases of a parametrised test run by default, where it is not marked ``sampled``."""


def _mark_sampled(items: list[pytest.Item]) -> None:
    """Mark as thorough all but some of the cases of each parametrised test.

    By default run :data:`MOST_CASES`, spread evenly; of a test marked ``sampled``, one in *every*.
    Of a test with several parameters, those that are left differ in all of them, as long as
    *every* has no divisor in common with the number of values of any.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for family in cases.values():
        sampled = family[0].get_closest_marker("sampled")
        if sampled is not None:
            kept = set(range(0, len(family), sampled.kwargs["every"]))
        else:
            family = [item for item in family if item.get_closest_marker("thorough") is None]
            kept = {index * len(family) // MOST_CASES for index in range(MOST_CASES)}
        for index, item in enumerate(family):
            if index not in kept:
                item.add_marker("thorough")


def _deselect_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``gpu`` where there is no accelerator; pytest counts them.

    ``HF_PYAO_GPU_DRY_RUN=1`` runs one case of each test that has a stand-in for a GPU, ``all`` every
    case; see ``tests/gpu/device.py``.
    """
    if torch.accelerator.is_available():
        return
    dry_run = os.environ.get("HF_PYAO_GPU_DRY_RUN", "0")
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
def _nothing_stays_replaced() -> Iterator[None]:
    """Fail a test that leaves torch or transformers with functions of this project's."""
    yield
    masks = sys.modules.get("transformers.masking_utils")
    places = {torch: ("rand",), F: ("scaled_dot_product_attention", "dropout")}
    if masks is not None:
        places[masks] = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa")
    left = [
        name
        for place, names in places.items()
        for name in names
        if getattr(getattr(place, name, None), "__module__", "").startswith("hf_pyao")
    ]
    assert not left, f"still replaced: {left}"


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    """Fail a test that leaves threads that may draw: no layer that draws runs again beside them."""
    yield
    main = threading.main_thread()
    left = [t for t in threading.enumerate() if t is not main and not t.daemon]
    left = [t for t in left if t.name.startswith("pyao")]
    assert not left, f"threads of the package that are no daemons are left: {left}"


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo what a test's training arguments switch on for the whole process.

    Those of transformers 4 do so by Accelerate's variables: FSDP and ``torch.compile`` stay on for
    whatever is made after them.
    """

    def variables() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_"))}

    before = variables()
    yield
    for name in variables():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Undo what a recipe does to the package's logger: the next test counts its messages."""
    logger = logging.getLogger("hf_pyao")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Set aside what is there already, so that counting and collecting objects is quick.

    Clear torch's note of a dispatch mode, too. It is of the whole process: two threads that leave
    modes at once, in a test before, may leave it set.
    """
    gc.collect()
    gc.freeze()
    _python_dispatch._is_in_torch_dispatch_mode = False
    yield
    gc.unfreeze()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Make a group of one process: wrappers are real, and nothing needs a second process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_kept_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands compute their answers, and leave the user's cache directory alone."""
    monkeypatch.setattr("hf_pyao.tools.answers.answers_folder", lambda: None)


@pytest.fixture(autouse=True)
def _triggers_its_keys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that the catalogue names for a key which does not come while it runs."""
    expected = keys_expected(request.node.nodeid)
    if not expected:
        yield
        return
    with keys_seen() as seen:
        yield
    missing = expected - seen
    assert not missing, f"tests/catalogue/triggered_by.py: {missing} did not come, but {seen} did"
