"""Gradients stay bit-identical under every schedule that a pair of streams could produce.

2,000 seeded schedules run here: models x one and two streams x windows x scenarios; a few of each by
default, all of them among the thorough tests. A longer run is made, and taken up where it was cut
off on the same commit, by

    HF_PYAO_TEST_SCHEDULES=20000 HF_PYAO_TEST_SCHEDULES_RECORD=recipes/results/adversarial_schedules \\
        pytest -n 3 -m thorough tests/races/test_adversarial_schedules.py

which leaves one file for each architecture; those of the last such run are in the repository.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig, attach
from hf_pyao.plan.documents.provenance import collect_provenance
from races.models import ARCHITECTURES, SCENARIOS, make_pair
from tests.helpers.simulation.transport import SimulatedTransport

NUM_SCHEDULES = int(os.environ.get("HF_PYAO_TEST_SCHEDULES", "2000"))
RECORD = os.environ.get("HF_PYAO_TEST_SCHEDULES_RECORD")
RECORDED_EVERY = 500
PUBLISHED = Path(__file__).parents[2] / "recipes" / "results" / "adversarial_schedules"
WINDOWS = ("layer", 0, 3_000, 2**20)
VARIANTS = tuple(itertools.product(WINDOWS, (1, 2), SCENARIOS))


class Record:
    """How far a long run has come, in a file of *folder*; without one, nothing is kept."""

    def __init__(self, architecture: str, folder: str | None = None) -> None:
        self.path = Path(folder) / f"{architecture}.json" if folder else None
        self.architecture = architecture
        self.provenance = dataclasses.replace(  # of the code that runs, whatever changes meanwhile
            collect_provenance(),
            command=f"HF_PYAO_TEST_SCHEDULES={NUM_SCHEDULES} pytest {Path(__file__).name}",
        )
        self.num_schedules = 0
        self.num_copies = 0
        if self.path is not None and self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["provenance"]["commit"] == self.provenance.commit:  # else of other code
                self.num_schedules, self.num_copies = found["num_schedules"], found["num_copies"]

    def write(self) -> None:
        """Note that all schedules up to here gave the same gradients."""
        if self.path is None:
            return
        document = {
            "schema_version": 1,
            "kind": "adversarial_schedules",
            "provenance": dataclasses.asdict(self.provenance),
            "architecture": self.architecture,
            "num_schedules": self.num_schedules,
            "num_copies": self.num_copies,
            "num_failures": 0,
            "variants": [list(variant) for variant in VARIANTS],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(every=1000)
def test_gradients_are_bit_identical_under_adversarial_schedules(architecture: str) -> None:
    record = Record(architecture)
    run_schedules(record, len(VARIANTS))
    assert record.num_copies > record.num_schedules * 10  # they had something to get wrong


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_bit_identical_under_all_schedules(architecture: str) -> None:
    record = Record(architecture, RECORD)
    run_schedules(record, -(-NUM_SCHEDULES // len(ARCHITECTURES)))
    record.write()
    assert record.num_copies > record.num_schedules * 10


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("length", "is_nested"), [(2, False), (1, False), (2, True)], ids=["2", "1", "2 nested"]
)
@pytest.mark.sampled(every=1000)
def test_segments_under_adversarial_schedules(
    length: int, is_nested: bool, architecture: str
) -> None:
    """The input of the first of several layers leaves, and what attention returns."""
    record = Record(architecture)
    settings = {"checkpoint_every": length, "checkpoint_nested": is_nested}
    run_schedules(record, len(VARIANTS), save_attention=True, **settings)
    assert record.num_copies > record.num_schedules * 5


def run_schedules(record: Record, num_schedules: int, **settings: Any) -> None:
    """Go on with *record* until it has so many schedules."""
    model, plain = make_pair(record.architecture)
    expected = {name: run(plain) for name, run in SCENARIOS.items()}
    for seed in range(record.num_schedules, num_schedules):
        window, copy_streams, scenario = VARIANTS[seed % len(VARIANTS)]
        transport = SimulatedTransport(seed, copy_streams=copy_streams)
        config = PyAOConfig(
            policy="all", min_bytes=0, window=window, keep_last_layers=seed % 2, **settings
        )
        with attach(model, config, transport=transport) as offloader:
            result = SCENARIOS[scenario](model)
            where = f"seed {seed}, window {window}, {copy_streams} streams, {scenario}"
            difference = result.difference_from(expected[scenario])
            assert difference is None, f"{where}: {difference}"
            assert offloader.host_pool.settle() == 0, f"{where}: host buffers still in use"
            assert not transport.violations, f"{where}: {transport.violations}"
        record.num_schedules = seed + 1
        record.num_copies += sum(transport.num_copies.values())
        if record.num_schedules % RECORDED_EVERY == 0:
            record.write()


def test_the_long_run_is_on_record() -> None:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in PUBLISHED.glob("*.json")]
    assert sorted(document["architecture"] for document in found) == sorted(ARCHITECTURES)
    assert sum(document["num_schedules"] for document in found) >= 20_000
    assert all(document["num_failures"] == 0 for document in found)
    assert all(document["provenance"]["commit"] for document in found)
