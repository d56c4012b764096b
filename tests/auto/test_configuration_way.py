"""A configuration's way through ``attach``: which files get it whole, and how often it comes back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_pyao
from helpers import tiny_model
from hf_pyao import PyAOConfig, attach

ROOT = Path(hf_pyao.__file__).parent
MOST_FILES = 20
MOST_RETURNS = 12


def files_on_the_way(config: PyAOConfig) -> list[str]:
    """Return the file of each call while ``attach`` runs that has a configuration as an argument.

    A file follows itself once: what calls within a file does not leave it.
    """
    found: list[str] = []

    def listen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), PyAOConfig) for name in names):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            if found[-1:] != [file]:
                found.append(file)

    model = tiny_model("llama")
    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        offloader = attach(model, config)
    finally:
        sys.setprofile(before)
    offloader.detach()
    return found


@pytest.mark.parametrize("policy", ["auto", "all"])
def test_a_configuration_is_read_in_few_files(policy: str) -> None:
    way = files_on_the_way(PyAOConfig(policy=policy))
    assert way[0] == "attachment.py" and "auto/parts.py" in way  # the way was seen
    assert len(set(way)) <= MOST_FILES, sorted(set(way))
    assert len(way) - len(set(way)) <= MOST_RETURNS, way
