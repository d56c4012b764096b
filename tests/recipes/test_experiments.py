"""The papers' experiments: their arithmetic, their files, and the page that is made of these."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import hiding, modules, published, run, write_page
from experiments.catalogue import EXPERIMENTS
from experiments.communication import (
    COUNTINGS,
    ENGINES,
    Cluster,
    Work,
    find_engine,
    sent_bytes,
    step_time,
    time_to,
)
from experiments.page_values import fitting_others
from experiments.rows import MODES, RESULTS, one, read_document, select
from experiments.systems import (
    AUTO,
    AUTO_CHUNKED,
    BASELINE,
    CHECKPOINTING,
    GIVEN,
    LONG_CONTEXT,
    MODELS,
    OFFLOAD_ALL,
    PYAO,
    PYAO_CHUNKED,
    PYAO_INT8,
    SYSTEMS,
)
from tests.recipes.conftest import RECIPES

FIVE = Cluster(num_nodes=5, link_gbit_per_s=1.0)
QUICK = ("neurocache_table1", "communication_grid")


# ---- the communication model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "one", "four"),
    [("ddp", 2, 2), ("zero1", 3, 3), ("zero2", 3, 9), ("zero2-rs", 2, 5), ("zero3", 3, 12)],
)
def test_what_an_engine_sends(engine: str, one: float, four: float) -> None:
    found = ENGINES[engine]
    assert (found.passes(1), found.passes(4)) == (one, four)
    assert sent_bytes(found, 5, 1e9, 4) == pytest.approx(four * 0.8e9)
    assert sent_bytes(found, 1, 1e9) == 0


def test_the_slowest_node_and_its_host_hold_all_up() -> None:
    engine, work = find_engine("zero2"), Work(gradient_bytes=1e9, compute_s=1.0, host_bytes=40e9)
    plain = step_time(engine, FIVE, work)
    half = step_time(engine, dataclasses.replace(FIVE, slowest_link=0.5), work)
    assert half.communication_s == pytest.approx(2 * plain.communication_s)
    slow = step_time(engine, dataclasses.replace(FIVE, slowest_device=0.5), work)
    assert slow.waiting_s == pytest.approx(1.0)
    shared = step_time(engine, dataclasses.replace(FIVE, host_gb_per_s=20.0), work)
    assert shared.compute_s == pytest.approx(2.0)
    late = step_time(engine, dataclasses.replace(FIVE, latency_us=1000.0, bucket_bytes=5e8), work)
    assert late.communication_s - plain.communication_s == pytest.approx(3 * 4 * 2 * 1e-3)


def test_no_counting_of_rounds_explains_gpt2() -> None:
    """Even with a step that is communication alone, the ratio is that of the micro-batches."""
    small, large = published.MICRO_BATCHES["gpt2"]
    work, engine = Work(gradient_bytes=1.5e9, compute_s=0.0), find_engine("zero2")
    for counting in COUNTINGS:
        ratio = time_to(256, small, engine, FIVE, work, counting) / time_to(
            256, large, engine, FIVE, work, counting
        )
        assert ratio < large / small < published.SPEEDUPS["gpt2"]


# ---- prediction ----------------------------------------------------------------------------------


def test_the_guides_own_example_comes_out() -> None:
    for row in hiding._guides_own():
        assert row.value == pytest.approx(row.published, rel=0.02)
    assert hiding.overlapped_ms(20, 2**31, 25) == pytest.approx(80)
    assert hiding.overlapped_ms(20, 2**31, 900) == 20


# ---- scripts -------------------------------------------------------------------------------------


def smoke(name: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / f"{name}.json"
    run.main([name, "--smoke", "--result", str(path), "--models", "opt", *options])
    return read_document(path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in run.BY_NAME
    ],
)
def test_smoke_of_every_experiment(name: str, tmp_path: Path) -> None:
    document = smoke(name, tmp_path)
    assert document["rows"]
    assert all(row["mode"] == "predict" and row["status"] for row in document["rows"])
    assert not document["is_measured"]
    if run.BY_NAME[name].plots:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.thorough
def test_smoke_of_a_miniature_counts_what_each_module_lets_go(tmp_path: Path) -> None:
    rows = smoke("megatron_modules", tmp_path, "--miniature")["rows"]
    less = {row["system"]: row["value"] for row in rows}
    moved = {row["system"]: row["detail"]["offloaded_mb"] for row in rows}
    everything = less["offload everything"]
    roles = [f"offload {role}" for role in modules.ROLES]
    assert less["nothing"] == moved["nothing"] == moved["checkpointing"] == 0
    assert 0 < max(less[name] for name in roles) < everything <= less["checkpointing"]
    assert moved["offload mlp_act"] > 0
    both = "both: recompute these, offload the rest"
    assert 0 < moved[both] < moved["offload everything"]
    assert less[both] > less["recompute norms + mlp_act"] > 0
    assert (tmp_path / "megatron_modules.png").stat().st_size > 5000


@pytest.mark.parametrize("name", list(run.BY_NAME))
def test_real_names_what_measures_it_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main([name, "--real"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith(f"{name}: error: ") and said.err.count("\n") == 1


# ---- results and the page ------------------------------------------------------------------------

FILES = sorted(RESULTS.glob("*.json"))


def test_every_row_names_its_mode_and_every_file_its_origin() -> None:
    for path in FILES:
        document = read_document(path)
        assert path.stem == f"{document['name']}_{document['mode']}"
        assert document["mode"] in MODES and document["assumptions"]
        provenance = document["provenance"]
        assert provenance["commit"] and not provenance["is_dirty"], path.name
        assert document["name"] in provenance["command"]
        for row in document["rows"]:
            assert row["mode"] == document["mode"]
            assert row["value"] is not None or row["status"] != "ok"


def test_the_papers_figures_have_rows_for_all_systems() -> None:
    for name in ("figure1_predict", "figure4_predict", "figure5_predict", "figure6_predict"):
        rows = read_document(RESULTS / f"{name}.json")["rows"]
        of = GIVEN if name == "figure1_predict" else SYSTEMS
        wanted = {system.name for system in of}
        assert {row["system"] for row in rows} >= wanted - (
            {PYAO_INT8.name} if name == "figure1_predict" else set()
        )


def test_auto_is_never_slower_than_others_that_fit() -> None:
    """Against every other lossless system with the same loss that fits the same memory."""
    peaks = read_document(RESULTS / "figure4_predict.json")["rows"]
    num_compared = 0
    for auto in (AUTO, AUTO_CHUNKED):
        for row in select(peaks, system=auto.name, unit="GB"):
            others = fitting_others(peaks, row, auto.head_loss)
            assert row["status"] == "ok" or not others
            for other in others:
                num_compared += 1
                assert row["detail"]["step_ms"] <= other["detail"]["step_ms"] * (1 + 1e-6)
    assert num_compared > 60
    rows = select(read_document(RESULTS / "table2_predict.json")["rows"], quantity="step")
    for model in MODELS.values():
        chosen = one(rows, model=model, system=AUTO.name)
        assert chosen["detail"]["fits"]
        for other in (PYAO, CHECKPOINTING, OFFLOAD_ALL):
            assert chosen["value"] <= one(rows, model=model, system=other.name)["value"]
    figure_6 = read_document(RESULTS / "figure6_predict.json")["rows"]
    for row in select(figure_6, quantity="speedup over ZeRO-2"):
        if row["system"] in (PYAO.name, CHECKPOINTING.name):
            same = [
                each
                for each in select(
                    figure_6,
                    quantity=row["quantity"],
                    model=row["model"],
                    system=AUTO.name,
                )
                if each["detail"]["counting"] == row["detail"]["counting"]
                and each["detail"]["speed"] == row["detail"]["speed"]
            ]
            assert len(same) == 1
            assert same[0]["micro_batch"] == row["micro_batch"]
            assert same[0]["value"] >= row["value"] * (1 - 1e-6)


def test_sentences_without_numbers_hold_too() -> None:
    """What the page says in words about Megatron's modules and about checkpointing."""

    def value(model: str, system: str, quantity: str) -> float:
        found = one(rows, model=model, system=system, quantity=quantity)["value"]
        assert isinstance(found, float)
        return found

    rows = read_document(RESULTS / "megatron_modules_predict.json")["rows"]
    less, slower = "peak device memory, less", "throughput, less"
    both, everything = "both: recompute these, offload the rest", "offload everything"
    for model in MODELS.values():
        for role in modules.ROLES:
            if value(model, f"offload {role}", less) >= published.MEGATRON_MEMORY_CUT[0]:
                assert value(model, f"offload {role}", slower) > published.MEGATRON_SLOWDOWN[1]
        assert value(model, both, slower) < value(model, everything, slower)
        assert value(model, both, less) < value(model, everything, less)
        assert value(model, "checkpointing", less) > value(model, both, less)
    gpt2 = MODELS["gpt2"]
    assert value(gpt2, "checkpointing", slower) < value(gpt2, both, slower)

    rows = select(read_document(RESULTS / "table2_predict.json")["rows"], quantity="step")
    for model in MODELS.values():
        peaks = {r["system"]: r["detail"]["peak_gb"] for r in select(rows, model=model)}
        assert min(peaks, key=lambda name: peaks[name]) == LONG_CONTEXT.name
        chunked = (PYAO_CHUNKED.name, LONG_CONTEXT.name)
        least = max(peaks[PYAO.name] - peaks[name] for name in chunked)
        assert peaks[PYAO.name] - peaks[PYAO_CHUNKED.name] > least / 2

    rows = read_document(RESULTS / "figure4_predict.json")["rows"]
    largest = "largest micro-batch in 8.68 GB of tensors"
    for model in MODELS.values():
        plain, again = (value(model, each.name, largest) for each in (PYAO, CHECKPOINTING))
        assert abs(plain - again) <= 1
        chunked = value(model, "PyAO, identity, chunked loss", largest)
        assert chunked > 4 * plain


def test_by_the_rule_of_estimates_pyaos_limit_is_a_smaller_multiple_of_the_baselines() -> None:
    rows = read_document(RESULTS / "figure4_predict.json")["rows"]
    largest = "largest micro-batch in 8.68 GB of tensors"
    for key, model in MODELS.items():
        (path,) = RESULTS.parent.glob(f"estimate_{key}-*_rtx4070.json")
        estimated = json.loads(path.read_text(encoding="utf-8"))
        assert not estimated["setup"]["alloc_conf"], "the page says: the default allocator"
        ours, theirs = (
            one(estimated["rows"], method=method)["largest_micro_batch"]
            for method in ("policy pyao", "none")
        )
        papers_ours, papers_theirs = (
            one(rows, model=model, system=each.name, quantity=largest)["value"]
            for each in (PYAO, BASELINE)
        )
        assert theirs > papers_theirs
        assert ours / theirs < papers_ours / papers_theirs


def test_the_page_is_what_the_files_say() -> None:
    """Every number of the page is read from a file: writing it anew changes nothing."""
    text = (RECIPES / "experiments" / "README.md").read_text(encoding="utf-8")
    assert write_page.page() == text
    assert text.count("*Mode: ") >= len(EXPERIMENTS)
    for image in re.findall(r"\]\((\.\./results/[^)]+)\)", text):
        assert (RECIPES / "experiments" / image).is_file(), image
