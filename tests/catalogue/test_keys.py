"""Every raise of an error and every warning has a key, and the page has each key once."""

from __future__ import annotations

import logging
import pickle
import re

import pytest

from hf_pyao.errors import ConfigError, NoLayersFoundError, PyAOError, warn
from hf_pyao.text import describe_error
from tests.catalogue.page import PAGE, entries_in
from tests.catalogue.sites import ROOT, foreign_raises, key_of_class, sites

ENTRIES = entries_in(PAGE.read_text(encoding="utf-8"))

FOREIGN = {
    ("__init__.py", "AttributeError"): "what `import *` and hasattr expect",
    ("auto/recording/step_recording.py", "_LayersAreMissingError"): "caught in this file",
    ("cli.py", "SystemExit"): "the command's exit status",
    ("engine/recompute/second_run.py", "AllCollectedError"): "ends a second run early",
    ("engine/runtime/flattened_tensor.py", "TypeError"): "caught in this file",
    ("engine/stores/disk_blocks.py", "OSError"): "becomes a DiskError in this file",
    ("engine/stores/disk_blocks.py", "ValueError"): "becomes a DiskError in this file",
    ("engine/stores/disk_files.py", "OSError"): "as the system call would; a DiskError later",
    ("engine/stores/disk_reader.py", "OSError"): "becomes a DiskError in this file",
    (
        "engine/stores/nameless_file.py",
        "OSError",
    ): "becomes a DiskError, or a warning, in the store",
    ("engine/stores/disk_speed.py", "OSError"): "becomes a DiskError in this file",
    ("engine/stores/private_mapping.py", "OSError"): "as the system call would; caught",
    ("engine/stores/shared_memory.py", "OSError"): "as the system call would; caught by the store",
    ("files.py", "ValueError"): "caught in this file",
    ("model/losses/stand_in.py", "AttributeError"): "what hasattr expects",
    ("model/tiles/sliced.py", "NeedsValuesError"): "why an MLP is left alone",
    ("plan/paper/sweep.py", "ValueError"): "caught in this file",
    ("plan/step/recorded_step.py", "ValueError"): "caught in this file: the file is damaged",
    ("tools/advise/forbidden_writes.py", "OSError"): "caught in this file",
    ("tools/advise/script_watch.py", "EnoughSeen"): "ends the script that is looked at",
    ("tools/bench/methods.py", "MethodUnavailable"): "a row of the result",
    ("tools/bench/peers.py", "MethodUnavailable"): "a row of the result",
    ("tools/bench/worker.py", "SearchFailed"): "a row of the result",
    ("tools/estimate/script_profiler.py", "ProfileIsDone"): "ends the script that is profiled",
}
"""File and class -> why it is none of our errors. No user sees one of these as an error."""


def test_every_error_and_warning_has_a_key() -> None:
    without = [f"{site.where} {site.words}" for site in sites() if site.key is None]
    assert not without, (
        "give an error `key=...`, and a warning `errors.warn(logger, key, ...)`; take a key of "
        "hf_pyao/TROUBLESHOOTING.md, or add one there"
    )


def test_the_search_finds_the_places() -> None:
    assert len(sites()) > 350
    assert {"ConfigError", "NoPlanFitsError"} <= set(key_of_class())


def test_the_page_has_the_keys_that_are_used() -> None:
    used = {site.key for site in sites() if site.key} | {k for k in key_of_class().values() if k}
    used |= {"nothing-offloaded", "no-effect"}  # NoEffect.key chooses
    assert used == {entry.key for entry in ENTRIES}


def test_other_errors_are_signals_inside_of_hf_pyao() -> None:
    found = {(each.path.relative_to(ROOT).as_posix(), each.name) for each in foreign_raises()}
    assert found == set(FOREIGN)


def test_entries_are_whole_sentences() -> None:
    assert len(ENTRIES) == len({entry.key for entry in ENTRIES}), "a key is there once"
    for entry in ENTRIES:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", entry.key)
        for text in (entry.cause, entry.remedy):
            assert text.endswith((".", ")")) and "  " not in text


def test_a_message_ends_with_its_key() -> None:
    error = ConfigError("x is 3; expected 4.", key="setting-value")
    assert str(error) == "x is 3; expected 4. [pyao:setting-value]"
    assert f"of y: {error}" == "of y: x is 3; expected 4."
    assert describe_error(error) == "ConfigError: x is 3; expected 4"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError and str(again) == str(error)
    assert str(NoLayersFoundError("none:\n  code()")).endswith("code()\n[pyao:no-layers-found]")
    assert str(PyAOError("plain")) == "plain" and str(PyAOError()) == ""


def test_a_warning_ends_with_its_key(caplog: pytest.LogCaptureFixture) -> None:
    error = ConfigError("no.", key="setting-value")
    warn(logging.getLogger("hf_pyao.some"), "file-damaged", "%d%% of it: %s", 3, error)
    (record,) = caplog.records
    assert record.getMessage() == "3% of it: no. [pyao:file-damaged]"
    assert record.levelno == logging.WARNING and record.filename == "test_keys.py"
