"""In one process: parameters are recognised by value, and the audit finds what it is meant to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.parameters import is_parameter
from tests.distributed.audit import RecogniserAudit
from tests.distributed.models import batch_of, build_model
from tests.distributed.scenarios import LAYER_CLASSES
from tests.distributed.wrapping import full_parameters

# Peft reads the name that transformers 5.23 warns about.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def audited_step(
    judge: Callable[..., bool], name: str = "llama", tuning: str = "full", *, autocast: bool = True
) -> dict[str, Any]:
    model = build_model(name, tuning, "")
    audit = RecogniserAudit(judge)
    config = PyAOConfig(policy="all", min_bytes=0, keep_last_layers=0, host_memory_gib=0.0625)
    with attach(model, config), audit.watching():
        audit.learn(full_parameters(model))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**batch_of(0, 0)).loss.backward()
    return audit.findings()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tuning", ["full", "lora", "frozen_below", "frozen_inside"])
@pytest.mark.parametrize("name", LAYER_CLASSES)
def test_parameters_and_nothing_else_are_recognised(name: str, tuning: str, autocast: bool) -> None:
    findings = audited_step(is_parameter, name, tuning, autocast=autocast)
    assert findings["num_parameters_saved"] > 0
    assert findings["offloaded_bytes"] > 0
    assert findings["misses"] == findings["false_positives"] == findings["parameters_moved"] == []


def test_the_audit_sees_every_parameter() -> None:
    findings = audited_step(is_parameter)
    assert findings["num_parameters_saved"] == 27  # 2 norms and 7 projections in 3 layers


def test_a_recogniser_of_parameter_objects_alone_is_caught() -> None:
    findings = audited_step(lambda tensor, *_: isinstance(tensor, torch.nn.Parameter))
    assert len(findings["misses"]) == 21, "autocast copies of the projections"
    assert len(findings["parameters_moved"]) >= 21


def test_a_recogniser_of_shapes_alone_is_caught() -> None:
    findings = audited_step(lambda tensor, *_: tensor.dim() == 2)
    assert findings["false_positives"] != []
