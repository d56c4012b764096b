"""A plan says how many layers stay on the device, where ``stream_weights`` is ``"auto"``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.plan.documents.plan import KEEP, Plan
from hf_pyao.plan.documents.plan_facts import PlanFacts
from hf_pyao.plan.documents.schema import write_json
from hf_pyao.plan.step.streamed_step import streamed_layers
from tests.helpers import tiny_batch
from tests.helpers.adapters import tiny_lora


@pytest.mark.parametrize(
    ("value", "resident", "expected"), [("auto", 1, 3), (0, 1, 4), ("auto", 4, 0)]
)
def test_auto_streams_what_the_plan_says(
    value: int | str, resident: int, expected: int, tmp_path: Path
) -> None:
    model = tiny_lora("llama", num_hidden_layers=4)
    num_layers = 4
    plan = Plan(source="test", slots=[], otherwise=KEEP, facts=PlanFacts(resident_blocks=resident))
    write_json(tmp_path / "plan.json", plan)
    path = str(tmp_path / "plan.json")
    config = PyAOConfig(policy="plan", plan=path, stream_weights=value)
    with attach(model, config) as offloader:
        blocks = [] if offloader.weights is None else offloader.weights.blocks
        layers = [int(block.layer.rpartition(".")[2]) for block in blocks]
        assert len(layers) == expected
        if expected < num_layers:
            assert layers == list(streamed_layers(num_layers, expected)), "as it was predicted"
        loss = model(**tiny_batch()).loss
        loss.backward()
    assert torch.isfinite(loss)


def test_without_such_a_plan_all_weights_stay_on_a_cpu(tmp_path: Path) -> None:
    model = tiny_lora("llama", num_hidden_layers=4)
    path = tmp_path / "plan.json"
    write_json(path, Plan(source="test", slots=[], otherwise=KEEP))
    config = PyAOConfig(policy="plan", plan=str(path), stream_weights="auto")
    with attach(model, config) as offloader:
        assert offloader.weights is None
