"""Plans that others wrote or changed: checked when they are read, and named with file and field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.documents.plan import FOLLOWED, PREDICTED, Plan, PlanError
from hf_pyao.errors import PyAOError
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
@pytest.mark.parametrize("value", [None, -1.0, "absent"])
@pytest.mark.sampled(every=3)
def test_a_figure_of_a_prediction_that_is_none(
    name: str, value: Any, policy: str, planned: dict[str, Any], tmp_path: Path
) -> None:
    document = copy.deepcopy(planned)
    if value == "absent":
        del document["figures"][name]
    else:
        document["figures"][name] = value
    found = follow(document, tmp_path / "forged.json", policy=policy)
    assert repr(name) in found
    assert "forged.json" in found


@pytest.mark.parametrize("name", FOLLOWED)
def test_other_figures_that_it_is_followed_by(
    name: str, planned: dict[str, Any], tmp_path: Path
) -> None:
    document = copy.deepcopy(planned)
    document["figures"][name] = -1.0
    found = follow(document, tmp_path / "forged.json")
    assert repr(name) in found
    assert "forged.json" in found
    del document["figures"][name]
    assert follow(document, tmp_path / "less.json") == ""


def test_a_plan_without_any_figure_is_followed(planned: dict[str, Any], tmp_path: Path) -> None:
    assert follow({**planned, "figures": {}}, tmp_path / "plan.json") == ""


def test_a_plan_that_the_library_makes_itself_is_complete() -> None:
    with pytest.raises(PlanError, match="lack 'peak_bytes'"):
        Plan(slots=[], figures={"step_ms": 1.0})
    Plan(slots=[], figures={"link_gib_per_s": 1.0, "measured_compute_ms": -0.1})


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
