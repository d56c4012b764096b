"""Policy auto where layers are frozen and thawed, parts change their mode, and adapters come and go
in the middle of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto import deciding
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.plans.trained import STRIDE, TrainedParameters
from hf_pyao.auto.policy import PLAN_FILE
from hf_pyao.config import GIB
from tests.auto.test_auto_policy import (
    AUTO,
    NUM_MEASURED,
    assert_same,
    step,
    transport,
    warnings_in,
)
from tests.helpers import tiny_model

TIGHT = replace(AUTO, device_memory_gib=700 * 2**10 / GIB)
"""Below what keeping everything takes: something is to be decided."""


@contextmanager
def attached(model: nn.Module, config: PyAOConfig = TIGHT) -> Iterator[Offloader]:
    with attach(model, config, transport=transport()) as offloader:
        yield offloader


def llama(num_frozen: int = 1) -> nn.Module:
    model = tiny_model("llama").train()
    freeze(model, num_frozen)
    return model


def freeze(model: nn.Module, num_layers: int) -> None:
    """Freeze the embedding and the first layers; thaw all others."""
    model.requires_grad_(True)
    model.get_input_embeddings().requires_grad_(not num_layers)  # type: ignore[operator]
    for layer in model.model.layers[:num_layers]:  # type: ignore[union-attr, index]
        layer.requires_grad_(False)


def run(model: nn.Module, offloader: Offloader, number: int = 1) -> None:
    """Run steps; each must come to the gradients of the same model without an offloader."""
    offloaded = [step(model, None, offloader) for _ in range(number)]
    bare = tiny_model("llama").train()
    bare.load_state_dict(model.state_dict())
    for own, other in zip(model.parameters(), bare.parameters(), strict=True):
        other.requires_grad_(own.requires_grad)
    expected = step(bare)
    for found in offloaded:
        assert_same(found, expected)


@pytest.mark.thorough
def test_thawed_layers_are_planned_for_and_their_plan_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = llama(num_frozen=1)
    with attached(model) as offloader:
        run(model, offloader, 2 * NUM_MEASURED)
        frozen = offloader.plan
        assert frozen is not None
        freeze(model, 0)
        run(model, offloader)
        assert offloader.plan is None
        assert offloader.metrics()["offloaded_bytes"] > 0  # all of it, while it measures
        run(model, offloader, NUM_MEASURED)
        thawed = offloader.plan
        assert thawed is not None
        assert thawed.facts.trained != frozen.facts.trained
        peak = "kept_peak_bytes"
        assert thawed.numbers()[peak] > frozen.numbers()[peak]
        assert thawed.facts.peak_bytes <= TIGHT.device_memory_gib * GIB
        run(model, offloader, NUM_MEASURED)
        num_packs = offloader.engine.num_packs
        freeze(model, 1)
        run(model, offloader)
        assert offloader.plan is not None
        assert offloader.plan.facts.trained == frozen.facts.trained
        assert [s.action for s in offloader.plan.slots] == [s.action for s in frozen.slots]
        assert offloader.engine.num_packs > num_packs
    lines = [record.getMessage() for record in caplog.records]
    assert sum("measures anew: other parameters are trained" in line for line in lines) == 1
    assert not warnings_in(caplog)


def test_which_parameters_are_trained_is_seen_at_a_glance() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(5 * STRIDE)])
    trained = TrainedParameters(model)
    assert not any(trained.have_changed() for _ in range(2 * STRIDE))
    before = trained.mark
    for first in range(5 * STRIDE - STRIDE + 1):
        for layer in model[first : first + STRIDE]:
            layer.requires_grad_(False)
        assert trained.have_changed()  # at once: a run of them
        model.requires_grad_(True)
        assert not trained.have_changed()
    model[7].requires_grad_(False)
    assert sum(trained.have_changed() for _ in range(STRIDE)) == 1
    trained.look_again()
    assert trained.mark != before
    assert not any(trained.have_changed() for _ in range(STRIDE))


@pytest.mark.thorough
def test_what_is_streamable_between_attaching_and_the_first_forward_is_no_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = llama(num_frozen=0)
    with attached(model) as offloader:
        freeze(model, 1)
        run(model, offloader, NUM_MEASURED + 1)
        assert offloader.plan is not None
    assert not any("measures anew" in record.getMessage() for record in caplog.records)


@pytest.mark.thorough
def test_layers_that_are_thawed_while_it_measures_are_measured() -> None:
    model = llama(num_frozen=1)
    with attached(model) as offloader:
        run(model, offloader, NUM_MEASURED - 1)
        freeze(model, 0)
        run(model, offloader)
        assert offloader.plan is None
        run(model, offloader)
        plan = offloader.plan
        assert plan is not None
        run(model, offloader, 3 * NUM_MEASURED)
        assert offloader.plan is not None
        assert offloader.plan.facts.trained == plan.facts.trained


@pytest.mark.thorough
def test_what_takes_turns_is_let_pass_until_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = llama(num_frozen=1)
    with attached(model) as offloader:
        for number in range(12):
            freeze(model, number % 2)
            run(model, offloader)
            assert (offloader.plan is None) == (number < NUM_MEASURED)
        lines = [record.getMessage() for record in caplog.records]
        assert not any("measures anew" in line for line in lines)
        for num_frozen in (0, 1):  # one of them is not what the plan is for
            freeze(model, num_frozen)
            run(model, offloader, 4 * NUM_MEASURED)
        assert offloader.plan is not None
    lines = [record.getMessage() for record in caplog.records]
    assert sum("measures anew" in line for line in lines) == 1


@pytest.mark.thorough
def test_what_changes_all_the_time_is_offloaded_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "MOST_ROUNDS", 2)
    model = llama(num_frozen=0)
    with attached(model, replace(TIGHT, profile_steps=1)) as offloader:  # a change counts at once
        for number in range(12):
            freeze(model, (2, 1, 0)[number // 2 % 3])
            run(model, offloader)
        assert offloader.plan is None
        assert offloader.metrics()["offloaded_bytes"] > 0
        assert "too often" in offloader.describe()
    assert len([line for line in warnings_in(caplog) if "too often" in line]) >= 1


@pytest.mark.thorough
def test_a_kept_plan_for_other_parameters_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = replace(TIGHT, plan=str(path))
    marks = []
    for num_frozen in (1, 0, 0):
        model = llama(num_frozen)
        with attached(model, config) as offloader:
            run(model, offloader)
            if len(marks) < 2:
                assert offloader.plan is None
            run(model, offloader, NUM_MEASURED)
            assert offloader.plan is not None
            marks.append(offloader.plan.facts.trained)
    assert marks[0] != marks[1] == marks[2]


@pytest.mark.thorough
def test_the_kept_plan_stays_that_of_the_runs_beginning(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = llama(num_frozen=1)
    with attached(model, replace(TIGHT, plan=str(path))) as offloader:
        run(model, offloader, 2 * NUM_MEASURED)
        kept = path.read_text()
        freeze(model, 0)
        run(model, offloader, NUM_MEASURED + 2)
        assert offloader.plan is not None
        assert offloader.auto is not None
        offloader.auto.save(tmp_path / PLAN_FILE)
        saved = offloader.plan
    assert path.read_text() == kept
    model = llama(num_frozen=0)
    with attached(model) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(tmp_path / PLAN_FILE)
        run(model, offloader)
        assert offloader.plan is not None
        assert offloader.plan.slots == saved.slots
    model = llama(num_frozen=1)
    with attached(model) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(tmp_path / PLAN_FILE)
        run(model, offloader)
        assert offloader.plan is None  # it is for others


@pytest.mark.thorough
def test_parts_that_change_their_mode_do_no_harm() -> None:
    def gradients(config: PyAOConfig | None) -> list[list[torch.Tensor]]:
        model = tiny_model("gpt2", dropout=0.1).train()
        found = []
        with attached(model, config or PyAOConfig(policy="off")) as offloader:
            for number in range(10):
                blocks = model.transformer.h
                blocks[0].train(number not in (4, 5))
                blocks[1].mlp.train(number < 6)
                found.append(step(model, None, offloader))
            assert (offloader.plan is None) == (config is None)
        return found

    for found, expected in zip(gradients(TIGHT), gradients(None), strict=True):
        assert_same(found, expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_that_come_merge_and_go_do_no_harm() -> None:
    peft = pytest.importorskip("peft")

    def gradients(config: PyAOConfig | None) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        inner = tiny_model("llama").train()
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        found = []
        with attached(inner, config or PyAOConfig(policy="off")) as offloader:
            found += [step(inner, None, offloader) for _ in range(NUM_MEASURED + 1)]
            torch.manual_seed(1)
            model = peft.get_peft_model(inner, lora).train()
            inner.model.embed_tokens.requires_grad_(True)  # what is merged is not trained
            found += [step(model, None, offloader) for _ in range(NUM_MEASURED + 2)]
            model.merge_adapter()
            found += [step(model, None, offloader) for _ in range(2)]
            model.unmerge_adapter()
            torch.manual_seed(2)
            model.add_adapter("second", lora)
            model.set_adapter("second")
            found += [step(model, None, offloader) for _ in range(NUM_MEASURED + 2)]
            merged = model.merge_and_unload()
            merged.requires_grad_(True)
            found += [step(merged, None, offloader) for _ in range(NUM_MEASURED + 2)]
            assert (offloader.plan is None) == (config is None)
        return found

    for found, expected in zip(gradients(TIGHT), gradients(None), strict=True):
        assert_same(found, expected)
