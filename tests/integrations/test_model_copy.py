"""A step of a live model on fake tensors: the same operations, and nothing of the model changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import attach
from hf_pyao.integrations.model_copy import CopyError, ForwardWatch, SeenForward
from hf_pyao.integrations.step_recording import record_fake_step
from hf_pyao.planning.recorded_step import RecordedStep
from hf_pyao.planning.step_program import StepProgram
from hf_pyao.report.profile_report import Profile
from tests.helpers import ARCHITECTURES, EVERY_LAYER, Batch, tiny_batch, tiny_model

VALUES_MATTER = ("mixtral", "qwen3_moe")
"""Models that may not run on fake tensors: grouped products take bfloat16 alone there, and older
releases look at what routers choose."""


def watched(model: nn.Module, batch: Batch | None = None) -> ForwardWatch:
    """Run a forward of *model* under a watch."""

    def before(seen: SeenForward, *, is_first: bool) -> None:
        del seen, is_first

    watch = ForwardWatch(model, None, before)
    model(**(batch or tiny_batch()), use_cache=False)
    return watch


def program_of(model: nn.Module, batch: Batch | None = None, **options: Any) -> StepProgram:
    watch = watched(model, batch)
    recorded, _ = record_fake_step(watch.step(), **options)
    watch.remove()
    return recorded.whole()


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "bart"])
def test_it_saves_what_the_model_saves(architecture: str) -> None:
    model = tiny_model(architecture)
    try:
        program = program_of(model)
    except CopyError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "fake tensors" in refusal
        assert architecture in VALUES_MATTER
        return
    with attach(model, EVERY_LAYER) as offloader:
        model(**tiny_batch(), use_cache=False).loss.backward()
        figures = offloader.metrics()
    moved = sum(slot.link_bytes for slot in program.slots)
    assert moved == figures["offloaded_bytes"]


def test_the_model_and_the_random_numbers_are_as_before() -> None:
    model = tiny_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    watch = watched(model)
    state = torch.get_rng_state()
    record_fake_step(watch.step(), head_loss="chunked")
    watch.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert type(next(model.parameters())) is nn.Parameter


def test_padding_needs_a_mask() -> None:
    """Attention with an explicit mask saves other tensors than without one."""
    model = tiny_model("llama")
    batch = tiny_batch()
    whole = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    padded = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    padded["attention_mask"][0, -2:] = 0
    for case in (whole, padded):
        program = program_of(model, case)
        with attach(model, EVERY_LAYER) as offloader:
            model(**case, use_cache=False).loss.backward()
            moved = offloader.metrics()["offloaded_bytes"]
        assert sum(slot.link_bytes for slot in program.slots) == moved
    assert program_of(model, whole).slots != program_of(model, padded).slots


def test_autocast_and_loss_of_ones_own() -> None:
    model = tiny_model("llama")
    batch = {"input_ids": tiny_batch()["input_ids"]}

    def before(seen: SeenForward, *, is_first: bool) -> None:
        del seen, is_first

    watch = ForwardWatch(model, None, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch, use_cache=False)
    assert watch.seen is not None
    assert watch.seen.shapes() == ["input_ids int64[2, 8]", "autocast bfloat16"]
    program = record_fake_step(watch.step())[0].whole()
    watch.remove()
    with attach(model, EVERY_LAYER) as offloader, torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch, use_cache=False).logits.float().sum().backward()
        moved = offloader.metrics()["offloaded_bytes"]
    assert sum(slot.link_bytes for slot in program.slots) == moved


class LooksAtValues(nn.Module):
    """A layer whose operations depend on what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.sum().item() > 0:
            hidden = hidden * 2
        return self.linear(hidden)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LooksAtValues() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Uncopyable(Stack):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("there is only one of me")


@pytest.mark.parametrize(("make", "words"), [(Stack, "no values"), (Uncopyable, "only one of me")])
def test_what_cannot_be_recorded_says_why_and_trains_on(
    make: type[Stack], words: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(3, 4)
    model(inputs).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    path = tmp_path / "profile.json"
    config = replace(EVERY_LAYER, profile=path, profile_steps=1, layers=("layers.0", "layers.1"))
    with attach(model, config) as offloader:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(inputs).sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
        assert offloader.profile_writer is not None
        profile = offloader.profile_writer.profile
    assert profile is not None
    assert profile.program is None
    assert words in profile.why_no_program
    assert profile.layer_forward is not None


def test_a_recorded_step_comes_back_from_its_document() -> None:
    model = tiny_model("gpt2")
    watch = watched(model)
    recorded, _ = record_fake_step(watch.step())
    assert RecordedStep.from_dict(recorded.to_dict()) == recorded
    graph = recorded.program.graph
    assert graph is not None
    by_slot = {value.slot: number for number, value in enumerate(graph.values) if value.slot}
    producers = graph.producers()
    activation = producers[by_slot["mlp.c_proj:0"]]
    names = [recorded.program.operations[each.number].name for each in graph.operations]
    assert names.count("addmm") == 4
    assert recorded.program.operations[activation.number].path == "mlp.act"
    assert activation.reads


def test_it_is_of_the_model_that_is_called(tmp_path: Path) -> None:
    """Which may have no loss of its own."""
    model = tiny_model("llama")
    path = tmp_path / "profile.json"
    config = replace(EVERY_LAYER, profile=path, profile_steps=1)
    with attach(model.model, config) as offloader:
        for _ in range(2):
            model(**tiny_batch(), use_cache=False).loss.backward()
        assert offloader.profile_writer is not None
        profile = offloader.profile_writer.profile
    assert isinstance(profile, Profile)
    assert profile.program is not None, profile.why_no_program
    program = RecordedStep.from_dict(profile.program).whole()
    assert sum(slot.link_bytes for slot in program.slots) == profile.metrics["offloaded_bytes"]
