"""A tiny model on the CPU, to measure methods in this process."""

from __future__ import annotations

import pytest

from hf_pyao.tools.bench.arguments import SMOKE_MODEL
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.setup import BenchSetup
from hf_pyao.tools.bench.worker import make_bench
from hf_pyao.tools.estimate.model_specs import parse_model


def smoke_setup() -> BenchSetup:
    """Return one warm-up step and two timed ones of a model of two layers."""
    return BenchSetup(
        model=parse_model(SMOKE_MODEL),
        sequence_length=16,
        dtype="float32",
        device="cpu",
        num_warmup=1,
        num_steps=2,
    )


@pytest.fixture(scope="session")
def setup() -> BenchSetup:
    return smoke_setup()


@pytest.fixture
def bench(setup: BenchSetup) -> Bench:
    """The model, ready to be measured."""
    return make_bench(setup)
