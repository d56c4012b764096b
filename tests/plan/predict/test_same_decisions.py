"""Engine, predictor and virtual clock take the same decisions, on steps drawn at random.

The engine runs: hooks, autograd, tensors, tickets of a transport whose copies take the time of a
virtual link. The step is written down a second time as numbers: for the predictor, and for a replay
on a virtual link of its own. What each of them decides is recorded, in order, where it is carried
out: which copies compute waits for, whose device copy is let go, and what is brought back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.moved_bytes import MovedBytes
from hf_pyao.engine.transfer.mover import Mover
from hf_pyao.engine.transfer.schedule import Window
from hf_pyao.engine.transfer.window import OffloadWindow
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, IN_STEP, HostModel
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predict.predicted_copies import PredictedOffloads, PredictedReloads
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Buffer,
    Operation,
    Segment,
    SlotUse,
    StepProgram,
)
from tests.helpers import Stack
from tests.helpers.simulation.clocked_transport import ClockedTransport
from tests.helpers.simulation.replayed_step import replay_step
from tests.helpers.simulation.virtual_link import VirtualLink

HOSTS = (
    FAR_AHEAD,
    FAR_AHEAD,
    IN_STEP,
    HostModel(queue_limit=3),
    HostModel(op_ms=0.3, queue_limit=5),
)

Decision = tuple[Any, ...]


@dataclass(frozen=True)
class Node:
    """One operation of a layer, and what it saves: a size in floats each."""

    sizes: tuple[int, ...]
    saves_again: int | None
    """Which tensor of its layer, saved before, it saves once more."""
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Trace:
    """A step, and the conditions that it runs under."""

    layers: tuple[tuple[Node, ...], ...]
    min_bytes: int
    keep_last_layers: int
    window: int | str
    link: LinkModel
    host: HostModel


def draw(random: Random) -> Trace:
    sizes = [random.choice([16, 100, 1000, 5000]) for _ in range(3)]

    def node(num_before: int) -> Node:
        return Node(
            tuple(random.choice(sizes) + random.randrange(4) for _ in range(random.randrange(4))),
            random.randrange(num_before) if num_before and random.random() < 0.3 else None,
            *(random.uniform(0.01, 2.0) for _ in range(2)),
        )

    layers = []
    for _ in range(random.randrange(2, 7)):
        nodes: list[Node] = []
        for _ in range(random.randrange(1, 5)):
            nodes.append(node(sum(len(each.sizes) for each in nodes)))
        layers.append(tuple(nodes))
    speed = 10 ** random.uniform(-3, -1)  # GiB/s: thousands of bytes take about a millisecond
    return Trace(
        tuple(layers),
        min_bytes=random.choice([0, 0, 0, 500]),
        keep_last_layers=random.choice([0, 0, 1]),
        window=random.choice(["layer", 0, 500, 4_000, 20_000, 20_000, 60_000, 2**30]),
        link=LinkModel(
            d2h_gib_per_s=speed,
            h2d_gib_per_s=speed * random.uniform(0.5, 2.0),
            copy_engines=random.choice([1, 2]),
        ),
        host=random.choice(HOSTS),
    )


# ---- the engine --------------------------------------------------------------------------------------


class Save(torch.autograd.Function):
    """Runs a node on the virtual clock."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, node: Node, saved: list[torch.Tensor], link: VirtualLink
    ) -> torch.Tensor:
        link.advance(node.forward_ms)
        ctx.node, ctx.link = node, link
        fresh = [torch.zeros(size) for size in node.sizes]
        again = [] if node.saves_again is None else [saved[node.saves_again]]
        saved += fresh
        ctx.save_for_backward(*fresh, *again)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        assert len(ctx.saved_tensors) >= len(ctx.node.sizes)
        ctx.link.advance(ctx.node.backward_ms)
        return gradient.clone(), None, None, None


def run_layer(nodes: Sequence[Node], link: VirtualLink, layer: object, x: Any) -> torch.Tensor:
    saved: list[torch.Tensor] = []
    for node in nodes:
        x = Save.apply(x, node, saved, link)
    return x


@contextmanager
def engine_recorded(decisions: list[Decision]) -> Iterator[None]:
    add, wait = OffloadWindow.add, OffloadWindow.await_copies
    let_go, reload = OffloadWindow.let_go, Mover.reload

    def note_add(self: OffloadWindow, moved: MovedBytes) -> None:
        add(self, moved)
        if moved.item not in self.waiting and ("release", moved.item) not in decisions:
            decisions.append(("release", moved.item))  # it had left when it was queued

    def note_wait(self: OffloadWindow, items: Sequence[int]) -> None:
        decisions.extend([("wait", *items)] if items else [])
        wait(self, items)

    def note_release(self: OffloadWindow, item: int) -> None:
        decisions.append(("release", item))
        let_go(self, item)

    def note_reload(self: Mover, moved: MovedBytes) -> None:
        decisions.append(("reload", moved.item))
        reload(self, moved)

    with ExitStack() as patches:
        for owner, name, noted in (
            (OffloadWindow, "add", note_add),
            (OffloadWindow, "await_copies", note_wait),
            (OffloadWindow, "let_go", note_release),
            (Mover, "reload", note_reload),
        ):
            patches.enter_context(mock.patch.object(owner, name, noted))
        yield


def decisions_of_engine(trace: Trace) -> tuple[list[Decision], float]:
    transport = ClockedTransport(trace.link, host=trace.host)
    stack = Stack(*[partial(run_layer, nodes, transport.link) for nodes in trace.layers])
    config = PyAOConfig(
        policy="all",
        min_bytes=trace.min_bytes,
        window=trace.window,
        keep_last_layers=trace.keep_last_layers,
        host_memory_gib=1,
    )
    decisions: list[Decision] = []
    with attach(stack, config, transport=transport), engine_recorded(decisions):
        stack(torch.zeros(1, requires_grad=True)).sum().backward()
    return decisions, transport.link.compute_ms


# ---- the predictor -----------------------------------------------------------------------------------


def program_of(trace: Trace) -> tuple[StepProgram, list[float]]:
    """Write the step down as numbers."""
    num_nodes = sum(map(len, trace.layers))
    times_ms: list[float] = []
    buffers: list[Buffer] = []
    slots: list[SlotUse] = []
    segments = []
    num_operations = 2 * num_nodes
    for layer, nodes in enumerate(trace.layers):
        start = len(times_ms)
        segments.append(Segment(FORWARD, layer, start, start + len(nodes)))
        first_slot, rank = len(slots), itertools.count()
        for node in nodes:
            backward_at = num_operations - 1 - len(times_ms)
            times_ms.append(node.forward_ms)
            for position, size in enumerate(node.sizes):
                buffers.append(Buffer(4 * size, backward_at, backward_at))
                slots.append(
                    SlotUse(
                        name=f":{next(rank)}",
                        layer=layer,
                        nbytes=4 * size,
                        link_bytes=4 * size,
                        stays=None,
                        source=-1,
                        packed_at=len(times_ms),
                        left_at=len(times_ms),
                        reloaded=len(buffers) - 1,
                        unpacked_at=backward_at,
                        # A node asks for its own in order, and then for an earlier node's.
                        unpack_rank=100 * backward_at + position,
                    )
                )
            if node.saves_again is not None:  # asked for sooner: backward runs in reverse
                number = first_slot + node.saves_again
                slot = slots[number]
                if slot.unpacked_at != backward_at:
                    moments = sorted({slot.unpacked_at, *slot.asked_again, backward_at})
                    slots[number] = slot._replace(
                        unpacked_at=moments[0], asked_again=tuple(moments[1:])
                    )
                    born = buffers[slot.reloaded]
                    buffers[slot.reloaded] = born._replace(birth=moments[0])
    for layer, nodes in reversed(list(enumerate(trace.layers))):
        start = len(times_ms)
        segments.append(Segment(BACKWARD, layer, start, start + len(nodes)))
        times_ms += [node.backward_ms for node in reversed(nodes)]
    segments.append(Segment(BACKWARD, OUTSIDE, num_operations, num_operations))
    return (
        StepProgram(
            operations=[Operation("node", "", 0.0, 0, is_kernel=True)] * num_operations,
            buffers=buffers,
            slots=slots,
            segments=segments,
            resident_bytes=0,
            layer_names=tuple(f"layers.{number}" for number in range(len(trace.layers))),
        ),
        times_ms,
    )


@contextmanager
def predictor_recorded(decisions: list[Decision], items: dict[int, int]) -> Iterator[None]:
    wait, let_go = PredictedOffloads.await_copies, PredictedOffloads.let_go
    reload = PredictedReloads.bring_back

    def note_wait(self: PredictedOffloads, numbers: Sequence[int]) -> None:
        decisions.extend([("wait", *(items[each] for each in numbers))] if numbers else [])
        wait(self, numbers)

    def note_release(self: PredictedOffloads, number: int) -> None:
        decisions.append(("release", items[number]))
        let_go(self, number)

    def note_reload(self: PredictedReloads, number: int) -> None:
        decisions.append(("reload", items[number]))
        reload(self, number)

    with (
        mock.patch.object(PredictedOffloads, "await_copies", note_wait),
        mock.patch.object(PredictedOffloads, "let_go", note_release),
        mock.patch.object(PredictedReloads, "bring_back", note_reload),
    ):
        yield


def decisions_of_predictor(trace: Trace) -> tuple[list[Decision], list[Decision], float]:
    """Return what is decided on the predictor's clock, and on a virtual link; the latter's time."""
    program, times_ms = program_of(trace)
    first_kept = program.num_layers - trace.keep_last_layers
    leaves = [slot.nbytes >= trace.min_bytes and slot.layer < first_kept for slot in program.slots]
    # Those that leave have the engine's ids: numbers from 0 on, in the order of packing.
    leaving = [number for number, does_leave in enumerate(leaves) if does_leave]
    items = {number: item for item, number in enumerate(leaving)}
    window_bytes = None if isinstance(trace.window, str) else trace.window
    options: dict[str, Any] = {"window_bytes": window_bytes, "link": trace.link, "host": trace.host}
    predicted: list[Decision] = []
    with predictor_recorded(predicted, items):
        predict(program, leaves, times_ms=times_ms, **options)
    replayed: list[Decision] = []
    with predictor_recorded(replayed, items):
        step = replay_step(program, leaves, times_ms=times_ms, **options)
    return predicted, replayed, step.step_ms


# ---- the comparison ----------------------------------------------------------------------------------


def differences(seeds: Sequence[int]) -> tuple[list[int], set[str]]:
    """Return the seeds of traces on which they differ, and the kinds of decisions that were met."""
    differ: list[int] = []
    kinds: set[str] = set()
    for seed in seeds:
        trace = draw(Random(seed))
        ran, ran_ms = decisions_of_engine(trace)
        predicted, replayed, replayed_ms = decisions_of_predictor(trace)
        kinds.update(str(each[0]) for each in ran)
        is_same_time = replayed_ms == pytest.approx(ran_ms, rel=1e-9)
        if not ran == predicted == replayed or not is_same_time:
            differ.append(seed)
    return differ, kinds


@pytest.mark.parametrize(
    "num_traces", [30, pytest.param(1000, marks=pytest.mark.thorough)], ids=["few", "thousand"]
)
def test_engine_and_predictor_decide_the_same(num_traces: int) -> None:
    differ, kinds = differences(range(num_traces))
    assert not differ
    assert kinds == {"wait", "release", "reload"}


def test_another_order_of_release_is_noticed() -> None:
    """Were the two schedules two pieces of code, this is what a slip in one would look like."""
    make_room = Window.make_room

    def newest_first(self: Window, nbytes: int, sooner: Any) -> bool:
        if isinstance(self, OffloadWindow):
            self._over.reverse()
        return make_room(self, nbytes, sooner)

    with mock.patch.object(Window, "make_room", newest_first):
        differ, _ = differences(range(60))
    assert differ
