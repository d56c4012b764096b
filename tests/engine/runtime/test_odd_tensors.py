"""Tensors without memory, and those of transforms: kept, never a crash, and the same gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.transfer.layout import Stays
from tests.helpers import EVERY_LAYER, Stack
from tests.helpers.odd_tensors import CONFIGS, LAYERS, saved_zeros


def check(configs: list[str]) -> None:
    """Compare with plain torch, in another process, which a wrong access would end."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.odd_tensors", *configs],
        capture_output=True,
        text=True,
        check=False,
    )
    cases = [f"{function.__name__} {config}" for function in LAYERS for config in configs]
    assert run.stdout.splitlines() == [f"{case} same" for case in cases], run.stderr[-2000:]
    assert run.returncode == 0


SOME = ["all"]


@pytest.mark.thorough
def test_gradients_are_those_of_plain_torch() -> None:
    check(SOME)


@pytest.mark.thorough
def test_gradients_are_those_of_plain_torch_in_all_configurations() -> None:
    check([name for name in CONFIGS if name not in SOME])


def test_zeros_without_memory_are_kept_and_counted() -> None:
    model = Stack(saved_zeros)
    with attach(model, EVERY_LAYER) as offloader:
        model(torch.randn(4, 4)).sum().backward()
        assert offloader.metrics()[f"kept_bytes/{Stays.UNSUPPORTED}"] > 0
