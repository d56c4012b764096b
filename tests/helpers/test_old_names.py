"""Scripts that import modules by their old names run unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import old_names
old_names.install()
import importlib
for name in old_names.NAMES:
    if not name.endswith(("codecs.kernels", "bench.preload")):  # which need Triton, or start a server
        importlib.import_module(name)
import hf_pyao.integrations.module_map as one
from hf_pyao.integrations import module_map as two
from hf_pyao.model.map import module_map as three
assert one is two is three
from hf_pyao.planning.plan import Plan, PlanError, PlanPolicy
from hf_pyao.report.plan_report import KEEP_EVERYTHING
from hf_pyao.report import ReportError, read_document
from hf_pyao import Plan as public
assert Plan is public
try:
    from hf_pyao.planning.plan import Nothing
except ImportError:
    print("refused")
"""


@pytest.mark.thorough
def test_old_names_are_the_modules_that_have_new_ones() -> None:
    program = PROGRAM.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
