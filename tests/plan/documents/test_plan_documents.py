"""Plans that others wrote or changed: checked when they are read, and named with file and field."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import NO_FACTS, PREDICTED, PlanError, PlanFacts
from hf_pyao.plan.documents.schema import ReportError
from tests.helpers import Stack, assert_same_tensors, gradients_of, linear_relu

CONFIG = PyAOConfig(
    min_bytes=0, host_memory_gib=0.05, keep_last_layers=0, profile_steps=1, device_memory_gib=4e-7
)
VALUES: list[Any] = [None, True, -1, -1e9, 0, 1.5, 1e99, 1e308, "x", "", [], {}, [1], {"a": 1}]
INPUT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(linear_relu, linear_relu, linear_relu).train()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(INPUT).sum().backward()
    return gradients_of(model)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan as policy auto keeps it."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    ours = model()
    with attach(ours, CONFIG.with_settings(plan=str(path))):
        for _ in range(3):
            step(ours)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def follow(document: dict[str, Any], path: Path, *, policy: str = "auto") -> str:
    """Train with the plan; return the error that names it, or nothing if bits are equal."""
    path.write_text(json.dumps(document))
    expected = step(model())
    ours = model()
    config = CONFIG.with_settings(plan=str(path), policy=policy)
    try:
        offloader = attach(ours, config)
    except PyAOError as error:
        return str(error)
    with offloader:
        try:
            assert_same_tensors(step(ours), expected, str(path))
        except PlanError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("policy", ["auto", "plan"])
@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.parametrize("value", [None, -1, "absent"])
@pytest.mark.sampled(every=3)
def test_a_figure_of_a_prediction_that_is_none(
    name: str, value: Any, policy: str, planned: dict[str, Any], tmp_path: Path
) -> None:
    document = copy.deepcopy(planned)
    if value == "absent":
        del document["facts"][name]
    else:
        document["facts"][name] = value
    found = follow(document, tmp_path / "forged.json", policy=policy)
    assert name in found
    assert "forged.json" in found


@pytest.mark.parametrize("name", sorted({*vars(NO_FACTS)} - {*PREDICTED}))
def test_a_fact_that_is_negative_or_absent(
    name: str, planned: dict[str, Any], tmp_path: Path
) -> None:
    document = copy.deepcopy(planned)
    document["facts"][name] = -1
    found = follow(document, tmp_path / "forged.json")
    assert name in found
    assert "forged.json" in found
    del document["facts"][name]
    assert follow(document, tmp_path / "less.json") == ""


def test_a_plan_without_any_figure_is_followed(planned: dict[str, Any], tmp_path: Path) -> None:
    assert follow({**planned, "facts": {}, "figures": {}}, tmp_path / "plan.json") == ""


def test_a_plan_that_the_library_makes_itself_is_complete() -> None:
    with pytest.raises(PlanError, match="lack 'peak_bytes'"):
        PlanFacts(step_ms=1.0)
    for value in (math.nan, math.inf):
        with pytest.raises(PlanError, match="'limit_bytes'"):
            PlanFacts(limit_bytes=value)  # type: ignore[arg-type]
    Plan(slots=[], figures={"link_gib_per_s": 1.0, "measured_compute_ms": -0.1})


# ---- files of schema version 1 -----------------------------------------------------------------------

VERSION_1 = Path(__file__).with_name("plan_version_1.json")
"""A plan that hf_pyao wrote before facts were apart from figures."""


def test_a_plan_of_version_1_is_read() -> None:
    written = json.loads(VERSION_1.read_text())
    figures = written["figures"]
    plan = Plan.from_json_file(VERSION_1)
    assert plan.facts == PlanFacts(
        num_elements=128,
        trained=2214730159,
        window_bytes=8192,
        limit_bytes=874412,
        device_limit_bytes=874412,
        beside_bytes=0,
        resident_bytes=127904,
        step_ms=4.895315136768285,
        peak_bytes=873388,
        needed_bytes=873388,
        host_bytes=0,
        kept_step_ms=4.728107382353761,
        kept_peak_bytes=1156012,
    )
    assert {each for each in vars(plan.facts).values() if each is not None} <= {*figures.values()}
    assert plan.figures == {
        name: figures[name]
        for name in figures
        if name in ("compute_ms", "rebuild_ms", "offloaded_bytes", "keep_last_layers")
        or name.startswith(("stall_", "bound_"))
        or ("/" in name and "keep everything" not in name)
    }
    assert [vars(slot) for slot in plan.slots] == written["slots"]
    assert plan.levers == written["levers"]
    assert plan.to_dict()["schema_version"] == 2
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_of_version_1_is_followed_like_the_same_of_version_2(
    planned: dict[str, Any], tmp_path: Path
) -> None:
    facts = {name: value for name, value in planned["facts"].items() if value is not None}
    names = {
        "trained": "trained_parameters",
        "kept_step_ms": "step_ms/keep everything",
        "kept_peak_bytes": "peak_bytes/keep everything",
    }
    figures = {names.get(name, name): float(value) for name, value in facts.items()}
    version_1 = {**planned, "schema_version": 1, "figures": {**planned["figures"], **figures}}
    del version_1["facts"]
    assert Plan.from_dict(version_1) == Plan.from_dict(planned)
    assert follow(version_1, tmp_path / "plan.json") == ""


@pytest.mark.parametrize("value", ["many", True, [1], {}, -1.0])
def test_a_bad_figure_of_version_1_is_refused_by_name(value: Any) -> None:
    written = json.loads(VERSION_1.read_text())
    written["figures"]["num_elements"] = value
    with pytest.raises(PyAOError, match=r"num_elements"):
        Plan.from_dict(written)


def test_a_version_that_is_neither_is_refused() -> None:
    written = json.loads(VERSION_1.read_text())
    for version in (0, 3, True, "1", None):
        with pytest.raises(ReportError, match="schema_version"):
            Plan.from_dict({**written, "schema_version": version})
    with pytest.raises(ReportError, match="schema_version"):
        Plan.from_dict({**written, "facts": {}})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, dict | list):
            found += places(item, (*path, key))
    return found


def check_places(chosen: list[tuple[Any, ...]], planned: dict[str, Any], folder: Path) -> None:
    for number, path in enumerate(chosen):
        for value in VALUES:
            document = copy.deepcopy(planned)
            *outer, key = path
            inside: Any = document
            for name in outer:
                inside = inside[name]
            inside[key] = value
            follow(document, folder / f"{number}.json")


def test_a_value_anywhere_is_refused_by_name_or_harmless(
    planned: dict[str, Any], tmp_path: Path
) -> None:
    check_places(places(planned)[::25], planned, tmp_path)


@pytest.mark.thorough
def test_every_value_is_refused_by_name_or_harmless(
    planned: dict[str, Any], tmp_path: Path
) -> None:
    check_places(places(planned), planned, tmp_path)
