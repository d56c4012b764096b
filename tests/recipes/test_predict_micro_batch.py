"""The prediction of micro-batches: its search, its ledger, and what is published of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException

from hf_pyao import PyAOConfig, attach
from hf_pyao.config import DEFAULT_WINDOW_BYTES
from hf_pyao.model.fake_cuda import cuda_choices, cuda_operations
from hf_pyao.tools.estimate import fake_step
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.search import largest_fitting
from studies import predict_micro_batch
from studies.predict_micro_batch import METHODS, Method, peak_of_step
from tests.helpers.ledger import AllocationLedger
from tests.recipes.conftest import REPOSITORY

BY_NAME = {method.name: method for method in METHODS}


def smoke(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    predict_micro_batch.main(["--smoke", *options])
    return capsys.readouterr().out


@pytest.mark.thorough
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "result.json"
    output = smoke(capsys, "--result", str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["schema_version"] == 1
    assert document["is_measured"] is False
    assert torch.__version__.startswith(document["provenance"]["versions"]["torch"])
    own, chunked = document["rows"]
    assert 1 <= own["largest_micro_batch"] < chunked["largest_micro_batch"]
    assert chunked["num_chunks"] >= 1 and own["num_chunks"] == 0
    for row in document["rows"]:
        peaks, largest = row["peak_bytes"], row["largest_micro_batch"]
        assert peaks[str(largest)] <= document["limit_bytes"] < peaks[str(largest + 1)]
        assert f"| {largest:>4} |" in output
    for text in document["assumptions"]:
        assert text in output


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict_micro_batch.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    for taught in ("without one", "no figure from here was measured", "ZeRO-2", *BY_NAME):
        assert taught in output


# ---- the search ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    base=st.integers(0, 200),
    slope=st.integers(1, 40),
    bend=st.integers(1, 60),
    limit=st.integers(1, 4000),
)
def test_the_largest_micro_batch_that_fits_is_found(
    base: int, slope: int, bend: int, limit: int
) -> None:
    asked: list[int] = []

    def peak(micro_batch: int) -> int:
        asked.append(micro_batch)
        return base + slope * micro_batch + slope * max(0, micro_batch - bend)

    found = largest_fitting(peak, limit)
    assert peak(found + 1) > limit
    assert found == 0 or peak(found) <= limit
    assert len(asked) <= 2 * math.log2(4000) + 4


# ---- the ledger ----------------------------------------------------------------------------------


def step(name: str, micro_batch: int, architecture: str = "llama") -> fake_step.StepPeak:
    return peak_of_step(
        architecture, "tiny", BY_NAME[name], micro_batch, sequence_length=128,
        training_state="device",
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("architecture", ["llama", "opt", "gpt2"])
def test_what_is_offloaded_leaves_and_logits_never_exist(architecture: str) -> None:
    try:
        plain = {mb: step("none", mb, architecture) for mb in (16, 32)}
    except DataDependentOutputException:
        pytest.skip(f"this release's {architecture} reads values in its forward")
    chunked = {mb: step("chunked loss", mb, architecture) for mb in (16, 32)}
    both = {mb: step("policy all + chunked loss", mb, architecture) for mb in (16, 32)}

    def growth(peaks: dict[int, fake_step.StepPeak]) -> float:
        return (peaks[32].peak_bytes - peaks[16].peak_bytes) / 16

    logits = 128 * build_config(architecture, find_size(architecture, "tiny")).vocab_size  # fmt: skip
    # Two copies in float32 at least, and two gradients; less than one is what may be left.
    assert growth(plain) - growth(chunked) > 8 * logits
    assert growth(chunked) < 2 * logits
    offloaded = (both[32].offloaded_bytes - both[16].offloaded_bytes) / 16
    forward = [peaks[32].phase_peak_bytes["layers, forward"] for peaks in (chunked, both)]
    assert offloaded > 0
    window = DEFAULT_WINDOW_BYTES
    assert isinstance(window, int)
    assert forward[0] - forward[1] > both[32].offloaded_bytes - window
    assert both[32].phase_peak_bytes.keys() == {"layers, forward", "head and loss", "backward"}


@pytest.mark.thorough
def test_training_states_differ_by_gradients_moments_and_bucket() -> None:
    options = {"architecture": "llama", "size": "tiny", "micro_batch": 1, "sequence_length": 64}
    method = BY_NAME["chunked loss"]
    host = peak_of_step(**options, method=method, training_state="host")  # type: ignore[arg-type]
    device = peak_of_step(**options, method=method, training_state="device")  # type: ignore[arg-type]
    assert host.state_bytes == 0
    assert device.state_bytes == 2 * device.weights_bytes
    assert device.peak_bytes >= 4 * device.weights_bytes
    assert host.phase_peak_bytes["backward"] > fake_step.BUCKET_BYTES + host.weights_bytes


def real_peak_bytes(method: Method, micro_batch: int) -> int:
    """The same step on real tensors, by the events of the allocator."""
    size = find_size("llama", "micro")
    config = build_config("llama", size)
    config.use_cache = False
    ids = torch.zeros(micro_batch, 128, dtype=torch.int64)
    with AllocationLedger() as ledger:
        model = fake_step.build_model(config, checkpointing=method.checkpointing)
        settings = PyAOConfig(policy=method.policy, head_loss=method.head_loss)
        with attach(model, settings):
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
        del outputs
    return ledger.peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["none", "chunked loss"])
def test_the_ledger_agrees_with_the_allocator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The operations of a CPU on both sides: only there can real tensors be counted.
    own: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        return own(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=True)

    monkeypatch.setattr(cuda_operations, "_flash_attention", attention)
    monkeypatch.setattr(cuda_choices, "can_trace_wide_products", lambda: False)
    predicted = peak_of_step(
        "llama", "micro", BY_NAME[name], 2, sequence_length=128, training_state="device"
    )
    measured = real_peak_bytes(BY_NAME[name], 2)
    assert predicted.peak_bytes - predicted.state_bytes == pytest.approx(measured, rel=0.02)


# ---- what is published ---------------------------------------------------------------------------

PAPER_MODELS = ("opt-1.3b", "gpt2-0.8b", "llama-1.2b")
RESULTS = REPOSITORY / "recipes" / "results"


def published(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert document["schema_version"] == predict_micro_batch.SCHEMA_VERSION
    assert document["kind"] == "predicted_micro_batch"
    assert document["is_measured"] is False
    assert tuple(document["assumptions"]) == predict_micro_batch.ASSUMPTIONS
    assert document["limit_bytes"] == int(12 * 2**30 * 0.96)
    for row in document["rows"]:
        peaks, largest = row["peak_bytes"], row["largest_micro_batch"]
        assert peaks[str(largest)] <= document["limit_bytes"] < peaks[str(largest + 1)]
        assert row["sequence_length"] == 512
        assert row["training_state"] == "host"
    return document


def largest_of(document: dict[str, Any], method: str) -> tuple[int, ...]:
    found = {
        row["model"]: row["largest_micro_batch"]
        for row in document["rows"]
        if row["method"] == method
    }
    return tuple(found[model] for model in PAPER_MODELS)


def test_the_page_says_what_was_predicted() -> None:
    everything = published("predicted_micro_batch.json")
    keep_none = published("predicted_micro_batch_keep_none.json")
    page = (REPOSITORY / "hf_pyao" / "model" / "head" / "HEAD_LOSS.md").read_text(encoding="utf-8")
    for method in METHODS:
        cells = " | ".join(str(value) for value in largest_of(everything, method.name))
        assert f"| {method.name} | {cells} |" in page
    cells = " | ".join(str(v) for v in largest_of(keep_none, "policy all + chunked loss"))
    assert f"| policy all + chunked loss, no layer kept | {cells} |" in page


def test_the_pages_say_what_was_estimated() -> None:
    package = REPOSITORY / "hf_pyao"
    estimates_page = (package / "tools" / "estimate" / "README.md").read_text(encoding="utf-8")
    sequences = package / "engine" / "recompute" / "LONG_SEQUENCES.md"
    sequences_page = sequences.read_text(encoding="utf-8")
    estimates = [
        json.loads((RESULTS / f"estimate_{model}_rtx4070.json").read_text(encoding="utf-8"))
        for model in PAPER_MODELS
    ]
    rows = [{row["method"]: row for row in each["rows"]} for each in estimates]
    for method in ("policy all", "policy all + chunked loss", "long context"):
        found = [each[method] for each in rows]
        if method != "policy all":
            text = " / ".join(str(row["largest_micro_batch"]) for row in found)
            assert text in sequences_page
        cells = [
            f"{row['largest_micro_batch']} ({row['largest_with_expandable_segments']})"
            f" · {row['tokens_per_s']:,.0f}"
            for row in found
        ]
        assert " | ".join(cells) in estimates_page


def test_the_chunked_loss_is_the_largest_step() -> None:
    document = published("predicted_micro_batch.json")
    none, offloaded, chunked, both, checkpointed = (
        largest_of(document, name)
        for name in (
            "none",
            "policy all",
            "chunked loss",
            "policy all + chunked loss",
            "checkpointing + chunked loss",
        )
    )
    for a, b, c, d, e in zip(none, offloaded, chunked, both, checkpointed, strict=True):
        assert a < b and a < c and d > 4 * b and d > 4 * c and d > e
