"""On two ranks, under every kind of data parallelism: same bits as without hf_pyao, and no
parameter moved, gathered, cast and transposed ones included.

The two ranks run once for the few scenarios of the default run, and once for the others, over gloo on
the CPU; each test reads what they saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from tests.distributed.conftest import ResultsOf
from tests.distributed.scenarios import (
    DDP,
    GROUPS,
    LAYER_CLASSES,
    SCENARIOS,
    TRAINER,
    WORLD_SIZE,
    Scenario,
)

pytestmark = pytest.mark.distributed


def each_of(scenarios: Iterable[Scenario]) -> pytest.MarkDecorator:
    """Run a test with each of *scenarios*, by default with one for each way to share out a model."""
    cases = []
    for scenario in scenarios:
        marks = () if scenario in GROUPS["default"] else (pytest.mark.thorough,)
        cases.append(pytest.param(scenario, id=scenario.name, marks=marks))
    return pytest.mark.parametrize("scenario", cases)


of_all = each_of(SCENARIOS)


def seen(results_of: ResultsOf, scenario: Scenario) -> list[dict[str, Any]]:
    """Return what each rank saw in *scenario*."""
    group = "default" if scenario in GROUPS["default"] else "thorough"
    ranks = [result[scenario.name] for result in results_of(group)]
    for rank, facts in enumerate(ranks):
        if "error" in facts:
            pytest.fail(f"rank {rank} failed:\n{facts['error']}", pytrace=False)
    return ranks


@pytest.mark.thorough
@of_all
def test_the_model_is_wrapped_as_the_scenario_says(
    results_of: ResultsOf, scenario: Scenario
) -> None:
    plain = LAYER_CLASSES[scenario.model]
    for facts in seen(results_of, scenario):
        assert facts["world_size"] == WORLD_SIZE
        if scenario.wrapper.endswith("fsdp2"):
            assert facts["layer_classes"] == [f"FSDP{plain}"]
            assert facts["model_class"].startswith("FSDP")
        elif scenario.wrapper.startswith("fsdp1"):
            assert facts["layer_classes"] == [plain]
            assert facts["layer_parents"] == ["FullyShardedDataParallel"]
            assert facts["model_class"] == "FullyShardedDataParallel"
        else:
            assert facts["layer_classes"] == [plain]
            assert facts["model_class"] == "DistributedDataParallel"


@of_all
@pytest.mark.sampled(every=1000)
def test_losses_and_gradients_are_bit_identical(results_of: ResultsOf, scenario: Scenario) -> None:
    for rank, facts in enumerate(seen(results_of, scenario)):
        assert facts["offloading_losses"] == facts["losses"], f"rank {rank}"
        assert len(facts["losses"]) >= 2
        assert all(math.isfinite(loss) for loss in facts["losses"])
        assert facts["different"] == [], f"rank {rank}"
        assert facts["num_tensors"] > 0


@each_of([*DDP, *TRAINER])
@pytest.mark.sampled(every=1000)
def test_ranks_exchange_gradients(results_of: ResultsOf, scenario: Scenario) -> None:
    first, second = seen(results_of, scenario)
    assert first["digest"] == second["digest"], "the ranks trained independently"
    if scenario in DDP:
        assert first["losses"] != second["losses"], "the ranks saw the same data"


@of_all
def test_no_parameter_is_moved(results_of: ResultsOf, scenario: Scenario) -> None:
    for rank, facts in enumerate(seen(results_of, scenario)):
        assert facts["parameters_moved"] == [], f"rank {rank} copied the values of parameters"


@of_all
def test_parameters_and_nothing_else_are_recognised(
    results_of: ResultsOf, scenario: Scenario
) -> None:
    for rank, facts in enumerate(seen(results_of, scenario)):
        assert facts["misses"] == [], f"rank {rank} took parameters for activations"
        assert facts["false_positives"] == [], f"rank {rank} took activations for parameters"
        # A checkpointed layer saves its inputs only.
        is_checkpointed = scenario.option.startswith("checkpoint")
        assert (facts["num_parameters_saved"] > 0) == (not is_checkpointed)


@of_all
def test_all_layers_but_the_last_offload(results_of: ResultsOf, scenario: Scenario) -> None:
    for facts in seen(results_of, scenario):
        # Hooks that are inside of what is recomputed must do nothing. (Accelerate 1.11 wrapped the
        # sub-modules of layers, which is inside our hooks; later releases wrap the layers.)
        is_inside = "FSDPCheckpointWrapper" in facts.get("layer_parents", ())
        if is_inside and scenario.attach == "before":
            assert facts["offloaded_layers"] == []
            continue
        assert facts["offloaded_layers"] == scenario.offloaded_layers
        metrics = facts["metrics"]
        assert metrics["offloaded_bytes"] == metrics["reloaded_bytes"] > 0
        is_recomputed = scenario.option in ("recompute", "checkpoint_every")
        assert (metrics["recomputed_bytes"] > 0) == is_recomputed
        is_kept = metrics.get("kept_bytes/last layer", 0) > 0
        assert is_kept == (scenario.keep_last_layers > 0)


@pytest.mark.thorough
@of_all
def test_no_host_memory_stays_busy(results_of: ResultsOf, scenario: Scenario) -> None:
    for facts in seen(results_of, scenario):
        assert facts["busy_host_bytes"] == 0
