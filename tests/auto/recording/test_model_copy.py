"""A step of a live model on fake tensors: the same operations, and nothing of the model changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import torch
import transformers
from packaging.version import Version
from torch import library, nn
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_pyao import attach
from hf_pyao.auto import profiling
from hf_pyao.auto.recording.forward_watch import ForwardWatch
from hf_pyao.auto.recording.model_copy import CopyError
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from tests.helpers import ARCHITECTURES, EVERY_LAYER, Batch, tiny_batch, tiny_model

VALUES_MATTER = ("mixtral", "qwen3_moe") if Version(transformers.__version__).major < 5 else ()
"""Models that do not run on fake tensors: older releases look at what routers choose."""


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


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "bart"])
@pytest.mark.sampled(every=1000)
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


@pytest.mark.thorough
def test_the_model_and_the_random_numbers_are_as_before() -> None:
    model = tiny_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    watch = watched(model)
    state = torch.get_rng_state()
    record_fake_step(watch.step(), levers=Levers(head_loss="chunked"))
    watch.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert type(next(model.parameters())) is nn.Parameter


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class SeesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def refuse(tensor: Any) -> Any:
    raise AssertionError("a tensor was saved")


def test_what_the_thread_carries_is_off_and_comes_back() -> None:
    model = tiny_model("opt")
    watch = watched(model)
    expected = record_fake_step(watch.step())[0].whole()
    step = watch.step()
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
        SeesOperations(),
        SeesFunctions(),
    ):
        found = record_fake_step(step)[0].whole()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == (refuse, refuse)
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert found == expected
    watch.remove()


@pytest.mark.thorough
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


@pytest.mark.thorough
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


class Twice(nn.Module):
    """A layer with an operation that fake tensors refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        twice: torch.Tensor = torch.ops.hf_pyao_operatorss.twice(hidden.detach())
        return self.linear(hidden + twice)


@pytest.fixture
def twice() -> Iterator[None]:
    """Define the operation, whose shape cannot be told."""

    def refuse(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not of this shape.")

    operators = library.Library("hf_pyao_operatorss", "DEF")
    operators.define("twice(Tensor hidden) -> Tensor")
    operators.impl("twice", lambda hidden: 2 * hidden, "CPU")
    operators.impl("twice", refuse, "Meta")
    yield
    operators._destroy()


@pytest.mark.usefixtures("twice")
def test_torch_s_own_words_on_an_operation_are_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(Twice(), Twice())
    config = replace(
        EVERY_LAYER, profile=tmp_path / "profile.json", profile_steps=1, layers=("0", "1")
    )
    with attach(model, config) as offloader:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        assert offloader.profile_writer is not None
        profile = offloader.profile_writer.profile
    assert profile is not None
    assert profile.why_no_program.endswith("no values: RuntimeError: not of this shape")
    assert not [record for record in caplog.records if record.name.startswith("torch")]


class Draws(nn.Module):
    """A layer that draws from the generators of Python and of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = random.random() + numpy.random.rand()
        return self.linear(hidden).relu() * scale


class Remembers(nn.Module):
    """A layer that changes a tensor which only a function holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        mean = torch.zeros(4)
        self.follow = lambda hidden: mean.mul_(0.5).add_(hidden.detach().mean(0)).clone()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden).relu() + self.follow(hidden)


class CopiesNothing(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Given:
    """What a model is called with, and changes."""

    def __init__(self) -> None:
        self.before = torch.zeros(3, 4)


class Chain(nn.Module):
    """Layers of a kind, which may be reached otherwise than through it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        makers = {"draws": Draws, "remembers": Remembers}
        self.layers = nn.ModuleList(makers.get(kind, nn.Tanh)() for _ in range(2))
        self.first = CopiesNothing(4, 4) if kind == "its own copy" else nn.Linear(4, 4)
        weight = nn.Parameter(torch.ones(4))
        if kind.startswith("a function"):
            self.weight = weight

        def scale(hidden: torch.Tensor) -> torch.Tensor:
            return hidden * weight

        self.scale = scale if kind.startswith("a function") else nn.Identity()
        self.goes_on = kind.endswith("is caught")

    def forward(self, hidden: torch.Tensor, given: Given) -> torch.Tensor:
        hidden = self.first(hidden) + given.before
        try:
            hidden = self.scale(hidden)
        except CopyError:
            if not self.goes_on:
                raise
        for layer in self.layers:
            hidden = layer(hidden) * 2
        given.before = hidden.detach()
        return hidden


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("draws", ""),
        ("remembers", "changes tensors that a copy of it does not have"),
        ("a function", "trains tensors that a copy of it does not have"),
        ("a function, whose error is caught", "trains tensors that a copy of it does not have"),
        ("its own copy", "'first' is its own copy"),
    ],
)
def test_nothing_leads_from_the_copy_to_the_model(kind: str, words: str, tmp_path: Path) -> None:
    """Each step is what it is without a profile, whatever the copy is made of."""
    found = []
    for profile in (None, tmp_path / "profile.json"):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Chain(kind)
        given = Given()
        calls: list[bool] = []
        model.first.register_forward_hook(
            lambda *_, to=calls: to.append(active_fake_mode() is None)
        )
        everywhere = nn.modules.module.register_module_forward_hook(
            lambda *_, to=calls: to.append(active_fake_mode() is None)
        )
        config = replace(EVERY_LAYER, profile=profile, profile_steps=1, layers=("layers.*",))
        inputs = torch.randn(3, 4)
        with attach(model, config) as offloader:
            for _ in range(4):
                model(inputs, given).pow(2).sum().backward()
                found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            writer = offloader.profile_writer
        everywhere.remove()
        assert all(calls)
        assert len(model.first._forward_hooks) == 1
        found.append([given.before, torch.rand(1), torch.tensor([random.random()])])
    half = len(found) // 2
    for before, after in zip(found[:half], found[half:], strict=True):
        assert len(before) == len(after)
        assert all(map(torch.equal, before, after))
    assert writer is not None
    assert writer.profile is not None
    assert words in writer.profile.why_no_program
    assert (writer.profile.program is None) == bool(words)


def test_other_threads_get_the_answers_of_transformers() -> None:
    """What a copy is told, for want of values, holds for the copy alone."""
    model = tiny_model("llama")
    batch = tiny_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 2:] = 0
    expected = model(**batch, use_cache=False).loss
    watch = watched(model, tiny_batch())
    found: list[torch.Tensor] = []
    with watch.step().model():
        thread = Thread(target=lambda: found.append(model(**batch, use_cache=False).loss))
        thread.start()
        thread.join()
    watch.remove()
    assert torch.equal(found[0], expected)


def test_an_interrupted_recording_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    config = replace(EVERY_LAYER, profile=tmp_path / "profile.json", profile_steps=1)
    begun: list[bool] = []

    def interrupted(*_: object, **__: object) -> None:
        begun.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "record_fake_step", interrupted)
    with pytest.raises(KeyboardInterrupt), attach(model, config):
        for _ in range(2):
            model(**tiny_batch(), use_cache=False).loss.backward()
    assert begun == [True]


@pytest.mark.thorough
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
