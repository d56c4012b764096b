"""The parts of the GPU suite, in the order of their worth: see ``../gpu_suite.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_test_run import run_gpu_tests
from hf_pyao.plan.documents.bench import CRASHED, FAILED, NOT_REACHED, BenchReport, FactsReport
from hf_pyao.plan.documents.provenance import collect_provenance, source_digest
from hf_pyao.plan.documents.schema import ReportError, to_plain, write_json
from hf_pyao.tools.bench.arguments import SMOKE_METHODS
from hf_pyao.tools.bench.harness import Recorder, smoke, title_of
from hf_pyao.tools.bench.methods import known_methods
from hf_pyao.tools.bench.processes import Deadline, run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES
from hf_pyao.tools.estimate.model_specs import parse_model
from hf_pyao.tools.report.kinds import read_document

CAP_GIB = 12.0
"""Memory of the PyAO paper's GPU, an RTX 4070."""

BUCKET_GIB = 1e9 / 2**30
"""DeepSpeed's default bucket of 5e8 half-precision gradients, which the paper's runs had."""

TESTS_TIMEOUT_S = 480.0

SMOKE_SETTINGS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass
class Suite:
    """What one run of the suite was asked for, and how far it has come."""

    output: Path
    models: tuple[str, ...]
    methods: tuple[str, ...]
    is_smoke: bool
    resumes: bool
    deadline: Deadline
    device: dict[str, Any]
    link: dict[str, float | None]
    progress: Callable[[str], None]
    problems: list[str] = dataclasses.field(default_factory=list)
    """What went wrong, a line each."""
    is_cut_short: bool = False
    """Whether something was left for ``--resume``."""

    def earlier(self, path: Path) -> BenchReport | FactsReport | None:
        """Return the result of an earlier run of the same source, if it is to be gone on from."""
        if not self.resumes or not path.is_file():
            return None
        try:
            document = read_document(path)
        except ReportError as error:
            self.progress(f"{path.name}: measured again: {error}")
            return None
        if document.provenance.source_sha256 != source_digest():
            self.progress(f"{path.name}: measured again: hf_pyao has changed since")
            return None
        return document if isinstance(document, BenchReport | FactsReport) else None

    def write_facts(self, path: Path, title: str, facts: Mapping[str, Any]) -> None:
        """Write named facts as a document."""
        provenance = collect_provenance()
        write_json(path, FactsReport(title=title, facts=dict(facts), provenance=provenance))


@dataclass(frozen=True)
class Part:
    """One part of the suite."""

    summary: str
    run: Callable[[Suite], None]


# ---- tests -------------------------------------------------------------------------------------


def run_tests(suite: Suite) -> None:
    """Run the tests marked ``gpu``; in a smoke run, one case of each on their stand-in."""
    path = suite.output / "tests.json"
    earlier = suite.earlier(path)
    if isinstance(earlier, FactsReport) and earlier.facts.get("outcome") == "passed":
        suite.progress("tests: passed already")
        return
    if suite.deadline.left_s() <= 0:
        suite.is_cut_short = True
        return
    tested = run_gpu_tests(
        is_dry_run=suite.is_smoke, timeout_s=min(TESTS_TIMEOUT_S, suite.deadline.left_s())
    )
    facts = {"device": suite.device["name"], "is_dry_run": suite.is_smoke, **tested}
    suite.write_facts(path, "Tests on the device", facts)
    suite.progress(f"tests: {facts['outcome']}, {facts.get('num_passed', 0)} passed")
    if facts["outcome"] != "passed":
        suite.problems.append(f"tests: {facts['outcome']}; see {path.name}")


# ---- link --------------------------------------------------------------------------------------


def run_link(suite: Suite) -> None:
    """Write down what was measured of the link when the suite began."""
    suite.write_facts(suite.output / "link.json", "Device and link", {**suite.device, **suite.link})


# ---- benchmarks --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BenchPart:
    """A benchmark on each of the paper's models."""

    name: str
    settings: Mapping[str, Any]
    """Fields of ``BenchSetup``."""
    micro_batch: int
    """In a search, the largest to try."""
    is_search: bool = False
    timeout_s: float = 120.0
    """Most time for a row."""
    smoke_model: str
    """The one that a smoke run takes."""

    def __call__(self, suite: Suite) -> None:
        """Measure all methods on each model, in one process for each model."""
        for architecture in (self.smoke_model,) if suite.is_smoke else suite.models:
            self._measure(suite, architecture)

    def work(self, architecture: str, suite: Suite) -> tuple[BenchSetup, list[Trial]]:
        """Return what is measured on *architecture*'s model."""
        size = "micro" if suite.is_smoke else PAPER_SIZES[architecture]
        model = parse_model(f"{architecture}:{size}")
        limit = self.micro_batch
        if suite.is_smoke:
            model = dataclasses.replace(model, settings={**model.settings, **SMOKE_SETTINGS})
        setup = BenchSetup(model=model, gradients="release", **self.settings)
        if suite.is_smoke:
            setup = dataclasses.replace(smoke(setup), memory_cap_gib=None, dtype=setup.dtype)
            limit = 2
        trials = [
            Trial(method=method, micro_batch=limit, is_search=self.is_search)
            for method in suite.methods
        ]
        return setup, trials

    def _measure(self, suite: Suite, architecture: str) -> None:
        unit = f"{self.name}-{architecture}"
        path = suite.output / f"{unit}.json"
        setup, trials = self.work(architecture, suite)
        earlier = suite.earlier(path)
        rows = []
        if isinstance(earlier, BenchReport) and earlier.setup == to_plain(setup):
            rows = [row for row in earlier.rows if row.method in suite.methods]
        report = BenchReport(
            title=title_of(setup, trials),
            setup=to_plain(setup),
            device=suite.device,
            link=suite.link,
            provenance=collect_provenance(),
            rows=rows,
        )
        measured = {row.method for row in rows}
        todo = [trial for trial in trials if trial.method not in measured]
        suite.progress(f"{unit}: {len(todo)} of {len(trials)} rows to measure")
        recorder = Recorder(
            report, path, lambda line: suite.progress(f"{unit} {line}"), num_rows=len(trials)
        )
        for row in run_trials(setup, todo, timeout_s=self.timeout_s, deadline=suite.deadline):
            if row.status == NOT_REACHED:
                suite.is_cut_short = True
            else:
                recorder.add_all([row])
        suite.problems += problems_of(unit, recorder.report)


def problems_of(unit: str, report: BenchReport) -> list[str]:
    """Return what must not be in a result: failures, and gradients of ours that are not equal."""
    problems = [
        f"{unit}: {row.method} {row.status}: {row.reason}"
        for row in report.rows
        if row.status in (FAILED, CRASHED)
    ]
    return problems + [
        f"{unit}: {row.method} has other gradients than nothing"
        for row in report.rows
        if row.method.startswith("pyao") and row.are_gradients_equal is False
    ]


PARTS: Mapping[str, Part] = {
    "tests": Part("tests marked gpu: parity, races, memory, no synchronise", run_tests),
    "link": Part("bandwidth to the host, to the device, and both at once", run_link),
    "cap": Part(
        f"each method's largest micro-batch within {CAP_GIB:g} GiB, bf16",
        BenchPart(
            name="cap",
            settings={
                "dtype": "bfloat16",
                "memory_cap_gib": CAP_GIB,
                "ballast_gib": BUCKET_GIB,
                "num_warmup": 2,
                "num_steps": 5,
            },
            micro_batch=128,
            is_search=True,
            timeout_s=240.0,
            smoke_model="opt",
        ),
    ),
    "ratio": Part(
        "an RTX 4070's ratio of compute to link: fp32 without TF32",
        BenchPart(
            name="ratio",
            settings={"dtype": "float32", "num_warmup": 2, "num_steps": 7},
            micro_batch=8,
            smoke_model="gpt2",
        ),
    ),
    "bf16": Part(
        "bf16, uncapped",
        BenchPart(
            name="bf16",
            settings={"dtype": "bfloat16", "num_warmup": 3, "num_steps": 15},
            micro_batch=16,
            smoke_model="llama",
        ),
    ),
}
"""Name -> part, the most valuable first."""


def methods_of(is_smoke: bool) -> tuple[str, ...]:
    """Return the methods that are measured."""
    return SMOKE_METHODS if is_smoke else tuple(known_methods())
