"""Streamed weights under hostile schedules, and on watched streams."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights
from hf_pyao.engine.rerun.weight_samples import have_changed, samples_of
from hf_pyao.engine.transfer.stream_transport import StreamTicket, StreamTransport
from hf_pyao.engine.weights.ring import WeightRing
from tests.helpers import FunctionLayer, Stack
from tests.helpers.simulation.transport import SimulatedTransport
from tests.races.fake_streams import FakeStreamTransport, World, backward, fake_streams

NO_FUSED_EXPERTS = "transformers has fused experts from release 5 on"
SIZE = 8
NUM_SCHEDULES = 2000
SETTINGS: tuple[dict[str, Any], ...] = (
    {"policy": "all"},
    {"policy": "off"},
    {"policy": "all", "window": "layer", "keep_last_layers": 0},
    {"policy": "all", "window": 600, "keep_last_layers": 0},
    {"policy": "all", "window": 0},
    {"policy": "all", "checkpoint_every": 2},
    {"policy": "all", "stream_weights": 2},
)


def adapted(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ layer.weight)
    return torch.relu(hidden @ layer.weight.t()) * layer.scale + x


def frozen_stack(num_layers: int = 5) -> Stack:
    torch.manual_seed(1)
    stack = Stack(*[adapted] * num_layers, size=SIZE)
    stack.requires_grad_(False)
    for layer in stack.modules():
        if isinstance(layer, FunctionLayer):
            layer.scale = nn.Parameter(torch.rand(SIZE))
    return stack


def streamed(settings: dict[str, Any]) -> PyAOConfig:
    return PyAOConfig(**{"stream_weights": 0, "min_bytes": 0, "host_memory_gib": 0.05, **settings})


def steps(model: nn.Module) -> list[torch.Tensor]:
    """Two steps, the second of two micro-batches, with an evaluation between."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for count in (1, 2):
        for _ in range(count):
            loss = model(torch.randn(3, SIZE, generator=generator)).square().sum()
            loss.backward()
            found.append(loss.detach())
        with torch.no_grad():
            found.append(model(torch.ones(2, SIZE)))
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def run(
    seed: int,
    expected: list[torch.Tensor],
    settings: dict[str, Any],
    make: Callable[[], nn.Module] = frozen_stack,
) -> None:
    model = make()
    transport = SimulatedTransport(seed, copy_streams=1 + seed % 2)
    with attach(model, streamed(settings), transport=transport):
        found = steps(model)
    assert transport.violations == []
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs), (seed, settings)


@pytest.mark.parametrize(
    "num_schedules", [28, pytest.param(NUM_SCHEDULES, marks=pytest.mark.thorough)]
)
def test_bits_are_those_of_the_resident_run_under_every_schedule(num_schedules: int) -> None:
    expected = steps(frozen_stack())
    for seed, settings in zip(range(num_schedules), itertools.cycle(SETTINGS), strict=False):
        run(seed, expected, settings)


class Experts(nn.Module):
    """A layer with fused experts, as transformers' are: its forward is that of transformers."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate, self.has_bias = False, False
        self.has_post_expert_norm = self.is_transposed = self._is_expert_parallel = False
        self.is_concatenated = True
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.act_fn = torch.tanh
        self.up_proj = nn.Parameter(torch.rand(num_experts, SIZE, SIZE), requires_grad=False)
        self.down_proj = nn.Parameter(torch.rand(num_experts, SIZE, SIZE), requires_grad=False)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        moe = pytest.importorskip("transformers.integrations.moe", reason=NO_FUSED_EXPERTS)
        return moe.grouped_mm_experts_forward(self, x, chosen, shares)  # type: ignore[no-any-return]


class MixtureLayer(GradientCheckpointingLayer):
    """Chooses two experts for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(SIZE, 5, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(SIZE))
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        out: torch.Tensor = torch.relu(self.experts(x, chosen, shares)) * self.scale + x
        return out


def mixture(num_layers: int = 3) -> nn.Module:
    torch.manual_seed(1)
    model = Stack()
    model.layers = nn.ModuleList(MixtureLayer() for _ in range(num_layers))
    return model


@pytest.mark.parametrize(
    "num_schedules", [14, pytest.param(NUM_SCHEDULES // 4, marks=pytest.mark.thorough)]
)
def test_groups_of_experts_under_every_schedule(
    num_schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "largest_block_bytes", lambda layers: 2 * 4 * SIZE * SIZE)
    expected = steps(mixture())
    for seed, settings in zip(range(num_schedules), itertools.cycle(SETTINGS), strict=False):
        run(seed, expected, settings, mixture)


def test_every_access_to_a_slot_of_experts_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "largest_block_bytes", lambda layers: 2 * 4 * SIZE * SIZE)
    for program in PROGRAMS.values():
        assert races_of(program, {"policy": "all"}, mixture()) == []


def caught(settings: dict[str, Any], num_seeds: int = 14) -> bool:
    """Say whether any of some schedules tells the faulty engine from a resident run."""
    expected = steps(frozen_stack())
    for seed in range(num_seeds):
        try:
            run(seed, expected, settings)
        except (AssertionError, RuntimeError):
            return True
    return False


def test_mutant_without_a_wait_for_the_upload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimulatedTransport.wait

    def wait(transport: SimulatedTransport, ticket: Any) -> None:
        if "weights of" not in str(ticket.label):
            own(transport, ticket)

    monkeypatch.setattr(SimulatedTransport, "wait", wait)
    assert caught({"policy": "off"})


def test_mutant_that_brings_the_block_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    own = WeightRing.upload

    def upload(ring: WeightRing, block: int, slot: int) -> None:
        before = ring.blocks[max(0, block - 1)] if ring.num_uploads > 6 else ring.blocks[block]
        with mock.patch.object(ring.blocks[block], "masters", before.masters):
            own(ring, block, slot)

    monkeypatch.setattr(WeightRing, "upload", upload)
    assert caught({"policy": "off"})


# ---- watched streams -------------------------------------------------------------------------------


def one_stream(world: World, model: Stack) -> None:
    for _ in range(2):
        backward(world, model(torch.randn(4, SIZE)).sum())


def forward_elsewhere(world: World, model: Stack) -> None:
    """Forward under one stream, evaluation under another, backward called under a third."""
    one, other, third = world.stream(), world.stream(), world.stream()
    for _ in range(2):
        one.wait_stream(world.current)
        with one:
            loss = model(torch.randn(4, SIZE)).sum()
        other.wait_stream(one)
        with other, torch.no_grad():
            model(torch.randn(4, SIZE))
        third.wait_stream(other)
        with third:
            backward(world, loss)
        world.current.wait_stream(third)


PROGRAMS = {"one stream": one_stream, "forward elsewhere": forward_elsewhere}


@contextlib.contextmanager
def samples_of_masters_are_on_the_host() -> Iterator[None]:
    """Leave samples of weights out of what is watched: they are host memory, which has no stream."""

    def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                return function(*args)

        return run

    functions = {each.__name__: unwatched(each) for each in (samples_of, have_changed)}
    with mock.patch.multiple("hf_pyao.engine.weights.blocks", **functions):
        yield


def races_of(
    program: Callable[[World, Any], None], settings: dict[str, Any], model: nn.Module | None = None
) -> list[str]:
    model = frozen_stack() if model is None else model
    with samples_of_masters_are_on_the_host(), fake_streams(1) as world:
        with attach(model, streamed(settings), transport=FakeStreamTransport()):
            program(world, model)
        world.bury()
        return list(world.races)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=["all", "off"])
def test_every_access_to_a_slot_is_ordered(program: str, settings: dict[str, Any]) -> None:
    assert races_of(PROGRAMS[program], settings) == []


def test_mutant_that_uploads_before_the_slots_readers_are_done_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy_at_once(
        transport: StreamTransport, kind: str, stream: Any, device: Any, src: Any, dst: Any, *_: Any
    ) -> StreamTicket:
        compute = torch.accelerator.current_stream(device)
        start, end = torch.Event(device), torch.Event(device)
        with stream:
            start.record(stream)
            dst.copy_(src, non_blocking=True)
            end.record(stream)
        order = next(transport._orders)
        times = transport._own_times
        return StreamTicket(kind, src.nbytes, times, start, end, [], stream, order, device, compute)

    monkeypatch.setattr(StreamTransport, "_copy", copy_at_once)
    assert races_of(one_stream, {"policy": "off"})


def test_mutant_that_reads_a_slot_before_it_is_filled_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StreamTransport, "wait", lambda transport, ticket: None)
    assert races_of(one_stream, {"policy": "off"})
