"""Streamed weights under Trainer and the plugin: the same bits, and nothing moved as a whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from hf_pyao import PyAOConfig, PyAOPlugin, PyAOTrainer, attach
from hf_pyao.hf.accumulation import said_of_accumulation
from hf_pyao.model.weights.places import has_streamed
from tests.helpers import tiny_batch
from tests.helpers.adapters import cast_base_, tiny_lora
from tests.hf.test_trainer import arguments, examples

STREAMED = PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1, stream_weights=0)


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def is_streamed(model: nn.Module) -> bool:
    return any(map(has_streamed, model.modules()))


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, {}),
        ({}, {"stream_embeddings": "on"}),
        ({"bf16": True, "gradient_accumulation_steps": 2}, {}),
        ({"bf16": True, "gradient_accumulation_steps": 2}, {"stream_embeddings": "on"}),
    ],
)
@pytest.mark.sampled(every=4)
def test_trainer_trains_evaluates_and_saves_as_without(
    more: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(STREAMED, **settings)
    model = tiny_lora("llama", dropout=0.1)
    if more.get("bf16"):
        cast_base_(model, torch.bfloat16)
    plain = copy.deepcopy(model)
    strategies = {"eval_strategy": "steps", "save_strategy": "steps"}
    more = {**strategies, "eval_steps": 2, "save_steps": 2, **more}
    data: dict[str, Any] = {"train_dataset": examples(), "eval_dataset": examples(4)}
    reference = Trainer(model=plain, args=arguments(tmp_path / "plain", **more), **data)
    expected = reference.train()
    moved: list[object] = []
    own = Trainer._move_model_to_device

    def note(trainer: Any, model: nn.Module, device: torch.device) -> None:
        moved.append(device)
        own(trainer, model, device)

    monkeypatch.setattr(Trainer, "_move_model_to_device", note)
    trainer = PyAOTrainer(
        model=model, args=arguments(tmp_path / "ours", **more), pyao_config=config, **data
    )
    found = trainer.train()
    assert found.training_loss == expected.training_loss
    assert_same(model, plain)
    assert not is_streamed(model)
    assert not moved, "the model is not moved as a whole"
    ours, theirs = trainer.evaluate(), reference.evaluate()
    assert ours["eval_loss"] == theirs["eval_loss"]
    assert not is_streamed(model)
    logs = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert logs == [e["eval_loss"] for e in reference.state.log_history if "eval_loss" in e]
    resumed = PyAOTrainer(
        model=tiny_lora("llama", dropout=0.1),
        args=arguments(tmp_path / "ours", **more),
        pyao_config=config,
        **data,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same(resumed.model, plain)


@pytest.mark.thorough
def test_what_larger_micro_batches_would_save_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Module:
        return tiny_lora("llama", num_hidden_layers=6, hidden_size=512, intermediate_size=512)

    model = build()
    with attach(model, STREAMED) as offloader:
        counts = []
        for seed in range(3):
            model(**tiny_batch(seed)).loss.backward()
            counts.append(offloader.weights.figures()["uploaded_bytes"])
        gib = (counts[2] - counts[1]) / 2**30
        line = said_of_accumulation(offloader, 5)
        assert not said_of_accumulation(offloader, 1)
    assert f"each of the 5 micro-batches of a step uploads {gib:.3f} GiB" in line
    assert f"would save {2 * gib:.3f} GiB" in line
    with attach(model, replace(STREAMED, stream_weights=5)) as offloader:
        assert not said_of_accumulation(offloader, 5), "one block comes once and stays"
    caplog.set_level("INFO", "hf_pyao")
    args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=5)
    data = examples(2)
    PyAOTrainer(model=build(), args=args, train_dataset=data, pyao_config=STREAMED).train()
    assert caplog.messages.count(line) == 1
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=5)
    PyAOPlugin(policy="all", stream_weights=0).bind(accelerator)
    accelerator.prepare(model)
    accelerator.free_memory()
    assert caplog.messages.count(line) == 2


def test_the_plugin_attaches_before_accelerate_moves_the_model() -> None:
    model = tiny_lora("llama")
    plain = copy.deepcopy(model)
    losses = []
    for each, is_ours in ((plain, False), (model, True)):
        accelerator = Accelerator(cpu=True)
        if is_ours:
            plugin = PyAOPlugin(policy="all", min_bytes=0, stream_weights=0).bind(accelerator)
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        prepared, optimizer = accelerator.prepare(each, optimizer)
        assert is_streamed(each) == is_ours
        for seed in range(3):
            loss = prepared(**tiny_batch(seed)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(plugin.offloaders) == 1
    accelerator.end_training()
    assert losses[:3] == losses[3:]
    assert_same(model, plain)
    assert not is_streamed(model)
