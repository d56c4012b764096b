"""Rows for what goes wrong, the search for the largest micro-batch, and the measured figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import FAILED, OK, OUT_OF_MEMORY, UNAVAILABLE, BenchRow
from hf_pyao.plan.hardware.link_speed import LinkSpeed, measure_link
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.methods import MethodUnavailable
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.bench.worker import (
    describe_device,
    make_bench,
    run_trial,
)

SEARCH = Trial(method="none", micro_batch=64, is_search=True)


def _limited(bench: Bench, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Let the bench run out of memory above *largest*."""
    try_steps, measure = bench.try_steps, bench.measure

    def check(trial: Trial) -> None:
        if trial.micro_batch > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore.")

    def limited_try(trial: Trial, num_steps: int = 2) -> None:
        check(trial)
        try_steps(trial, num_steps)

    def limited_measure(trial: Trial) -> BenchRow:
        check(trial)
        return measure(trial)

    monkeypatch.setattr(bench, "try_steps", limited_try)
    monkeypatch.setattr(bench, "measure", limited_measure)


@pytest.mark.thorough
def test_a_search_measures_at_the_largest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _limited(bench, monkeypatch, 3)
    row = run_trial(bench, SEARCH)
    assert (row.status, row.micro_batch, row.num_tried) == (OK, 3, 4)
    assert row.step is not None
    assert row.gradient_digest is None, "rows of other micro-batches must not be compared"


@pytest.mark.thorough
def test_a_search_may_find_that_nothing_fits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _limited(bench, monkeypatch, 0)
    row = run_trial(bench, SEARCH)
    assert (row.status, row.micro_batch, row.num_tried) == (OUT_OF_MEMORY, 0, 1)
    assert row.reason == "CUDA out of memory. Tried to allocate 1 GiB."


@pytest.mark.thorough
def test_a_search_says_when_it_stopped_at_its_limit(bench: Bench) -> None:
    row = run_trial(bench, dataclasses.replace(SEARCH, micro_batch=2))
    assert (row.status, row.micro_batch) == (OK, 2)
    assert row.reason == "no larger one than 2 was tried"


@pytest.mark.thorough
def test_a_search_of_what_cannot_run_says_why(bench: Bench) -> None:
    row = run_trial(bench, dataclasses.replace(SEARCH, method="pyao-single-stream"))
    assert row.status == UNAVAILABLE
    assert row.num_tried is None


@pytest.mark.thorough
def test_what_fits_in_a_try_may_not_when_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limited(bench, monkeypatch, 3)
    monkeypatch.setattr(bench, "measure", _raising(torch.OutOfMemoryError("fragmented")))
    row = run_trial(bench, SEARCH)
    assert (row.status, row.micro_batch, row.step) == (OUT_OF_MEMORY, 3, None)
    assert row.reason == "when measured: fragmented"


def _raising(error: Exception) -> Any:
    def run(trial: Trial) -> BenchRow:
        raise error

    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY, "CUDA out of memory."),
        (RuntimeError("CUDA error: out of memory"), OUT_OF_MEMORY, "RuntimeError: CUDA error"),
        (RuntimeError("shapes differ\nat x"), FAILED, "RuntimeError: shapes differ"),
        (ConfigError("policy is bad"), FAILED, "policy is bad"),
        (MethodUnavailable("not here"), UNAVAILABLE, "not here"),
    ],
)
@pytest.mark.sampled(every=1000)
def test_errors_become_rows(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: str,
    reason: str,
) -> None:
    monkeypatch.setattr(bench, "measure", _raising(error))
    row = run_trial(bench, Trial(method="none", micro_batch=2))
    assert row.status == status
    assert row.reason.startswith(reason)
    assert "\n" not in row.reason
    assert row.step is None
    assert row.wall_s is not None


@pytest.mark.thorough
def test_an_error_in_a_step_leaves_the_model_usable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_trial(bench, Trial(method="none", micro_batch=2))
    with monkeypatch.context() as patch:
        patch.setattr(bench.model.lm_head, "forward", _raising(RuntimeError("x")))
        failed = run_trial(bench, Trial(method="pyao-layer", micro_batch=2))
    assert failed.status == FAILED
    row = run_trial(bench, Trial(method="pyao-layer", micro_batch=2))
    assert row.gradient_digest == expected.gradient_digest


@pytest.mark.thorough
def test_the_compared_loss_is_the_model_s_own(bench: Bench, setup: BenchSetup) -> None:
    from hf_pyao.tools.bench.models import build_model, make_batch

    model = build_model(setup, torch.device("cpu"))
    batch = make_batch(model, setup, 2, torch.device("cpu"))
    row = run_trial(bench, Trial(method="none", micro_batch=2))
    assert row.loss == model(**batch).loss.item()


@pytest.mark.thorough
def test_dropout_is_drawn_alike_for_each_method(setup: BenchSetup) -> None:
    model = dataclasses.replace(
        setup.model,
        model_type="gpt2",
        settings={
            **{"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32},
            **{"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.3},
        },
    )
    bench = make_bench(dataclasses.replace(setup, model=model))
    rows = [
        run_trial(bench, Trial(method=method, micro_batch=2))
        for method in ("none", "checkpoint", "pyao:min_bytes=0", "none")
    ]
    assert len({row.gradient_digest for row in rows}) == 1
    bench.setup = dataclasses.replace(bench.setup, seed=1)
    assert run_trial(bench, Trial(method="none", micro_batch=2)).loss != rows[0].loss


@pytest.mark.thorough
def test_without_deterministic_kernels_nothing_is_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(batch: Any) -> torch.Tensor:
        if not calls:
            calls.append(1)
            raise RuntimeError("x does not have a deterministic implementation, but you set ...")
        return original(batch)

    calls: list[int] = []
    original = bench._loss
    monkeypatch.setattr(bench, "_loss", loss)
    row = run_trial(bench, Trial(method="none", micro_batch=2))
    assert row.status == OK
    assert row.gradient_digest is None
    assert row.reason.startswith("not compared: x does not have a deterministic implementation")


def test_a_cpu_has_no_link() -> None:
    assert measure_link(torch.device("cpu")) == LinkSpeed()
    assert LinkSpeed().is_duplex is None
    facts = describe_device(torch.device("cpu"))
    assert (facts["name"], facts["memory_gib"]) == ("CPU", None)
