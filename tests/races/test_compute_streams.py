"""Several compute streams: what one of them lets go is not yet the other's, and the reverse.

The real :class:`StreamTransport` runs on streams that are watched (``fake_streams``). As for copies,
engines with one deliberate fault each show that the watching has teeth.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.backward_order import Reversed
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.mover import Mover
from hf_pyao.engine.transfer.stream_transport import StreamTransport
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.metrics import MicroBatchStats
from tests.helpers import FunctionLayer, Stack
from tests.races.fake_streams import (
    FakeEvent,
    FakeStream,
    FakeStreamTransport,
    World,
    backward,
    fake_streams,
)

WINDOWS = ("layer", 0, 2_000, 2**20)
SIZE = 16


def inputs(count: int) -> list[torch.Tensor]:
    return [torch.randn(4, SIZE) for _ in range(count)]


def plain_layer(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ layer.weight)
    return torch.relu(hidden @ layer.weight) * hidden + x


def one_stream(world: World, model: Stack) -> None:
    for x in inputs(3):
        backward(world, model(x).sum())


def micro_batches(world: World, model: Stack) -> None:
    """Each micro-batch on a stream of its own, and one backward over all; two steps."""
    streams, xs = [world.stream() for _ in range(3)], inputs(3)
    for _ in range(2):
        losses = []
        for stream, x in zip(streams, xs, strict=True):
            stream.wait_stream(world.current)
            with stream:
                losses.append(model(x).sum())
        for stream in streams:
            world.current.wait_stream(stream)
        backward(world, sum(losses))  # type: ignore[arg-type]


def backward_under_another(world: World, model: Stack) -> None:
    """Forward under one stream; backward is called under another, and runs on the first."""
    one, other, xs = world.stream(), world.stream(), inputs(3)
    for x in xs:
        one.wait_stream(world.current)
        with one:
            loss = model(x).sum()
        other.wait_stream(one)
        with other:
            backward(world, loss)
        world.current.wait_stream(other)


def retained(world: World, model: Stack) -> None:
    """A graph of one stream, gone through again after a micro-batch of another."""
    one, other = world.stream(), world.stream()
    first, second = inputs(2)
    for stream in (one, other):
        stream.wait_stream(world.current)
    with one:
        kept = model(first).sum()
        backward(world, kept, retain_graph=True)
    other.wait_stream(one)
    with other:
        backward(world, model(second).sum())
    one.wait_stream(other)
    with one:
        backward(world, kept)
    world.current.wait_stream(one)


def abandoned(world: World, model: Stack) -> None:
    """A forward whose graph goes while its copies are under way, then a step on another stream."""
    one, other = world.stream(), world.stream()
    first, second = inputs(2)
    for stream in (one, other):
        stream.wait_stream(world.current)
    with one:
        model(first)
    with other:
        backward(world, model(second).sum())
    for stream in (one, other):
        world.current.wait_stream(stream)


class Forked:
    """A layer of which a part runs on a side stream, on an input that both parts save."""

    def __init__(self, world: World, num_parts: int) -> None:
        self.world = world
        self.side = world.stream()
        self.num_parts = num_parts

    def parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what main and side stream read: the same, or a half each."""
        parts = hidden.chunk(self.num_parts, dim=1)
        return parts[0], parts[-1]

    def __call__(self, layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        world, side, main = self.world, self.side, self.world.current
        hidden = x + 1.0  # saves nothing: the parts alone ask for it in backward
        side.wait_stream(main)
        world.record_stream(hidden, side)
        ours, theirs = self.parts(hidden)
        weight = layer.weight[: ours.shape[1]]
        right = torch.sigmoid(ours @ weight)
        with side:
            left = torch.relu(theirs @ weight)
        main.wait_stream(side)
        world.record_stream(left, main)
        return left * right + x


def forked(world: World, model: Stack, num_parts: int = 1) -> None:
    part = Forked(world, num_parts)
    for layer in model.layers:
        layer.function = part  # type: ignore[assignment]
    for _ in range(2):
        (x,) = inputs(1)
        loss = model(x).sum()
        backward(world, loss, retain_graph=True)
        backward(world, loss)


def forked_parts(world: World, model: Stack) -> None:
    """Two streams save parts of one storage, which is copied at the end of the layer."""
    forked(world, model, num_parts=2)


def looked_at(world: World, model: Stack) -> None:
    """Another stream reads what stands for a saved tensor, and a step uses its memory again."""
    one, other, xs = world.stream(), world.stream(), inputs(2)
    for stream in (one, other):
        stream.wait_stream(world.current)
    for x in xs:
        with one:
            loss = model(x).sum()
        node: Any = loss.grad_fn
        while not hasattr(node, "_saved_result"):
            node = node.next_functions[0][0]
        with other:
            _ = node._saved_result * 2.0
        del node
        with one:
            loss.backward()
            torch.zeros(1)  # by now the memory may be another tensor's
    for stream in (one, other):
        world.current.wait_stream(stream)


def two_models(world: World, model: Stack) -> None:
    """Two models on two streams take host buffers from one pool; some graphs are given up."""
    owner = next(iter(model._forward_pre_hooks.values())).owner  # type: ignore[attr-defined]
    other = Stack(plain_layer, plain_layer, size=SIZE)
    with attach(other, owner.config, transport=FakeStreamTransport(), host_pool=owner.host_pool):
        xs, streams = inputs(6), [world.stream(), world.stream()]
        for stream in streams:
            stream.wait_stream(world.current)
        for step, x in enumerate(xs):
            for stream, one in zip(streams, (model, other), strict=True):
                with stream:
                    loss = one(x).sum()
                    if step % 3:
                        backward(world, loss)
                    del loss
        for stream in streams:
            world.current.wait_stream(stream)


Scenario = Callable[[World, Any], None]
SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        one_stream,
        micro_batches,
        backward_under_another,
        retained,
        abandoned,
        forked,
        forked_parts,
        looked_at,
        two_models,
    )
}
PLAIN_IS_ORDERED = {
    "one_stream",
    "micro_batches",
    "backward_under_another",
    "retained",
    "abandoned",
}
"""In the others a saved tensor crosses streams; autograd lets go of those as it pleases."""


def races(
    scenario: str,
    window: str | int,
    seed: int,
    *,
    is_attached: bool = True,
    copy_streams: int = 2,
    **options: Any,
) -> list[str]:
    """Return what was out of order in *scenario*."""
    torch.manual_seed(seed)
    with fake_streams(seed) as world:
        model = Stack(plain_layer, plain_layer, plain_layer, size=SIZE)
        settings = {"policy": "all", "min_bytes": 0, "window": window, "keep_last_layers": 0}
        config = PyAOConfig(**{**settings, "host_memory_gib": 2**-10, **options})
        offloader = None
        if is_attached:
            transport = FakeStreamTransport(copy_streams)
            order = Reversed(goes_on=seed % 2 == 0)
            offloader = attach(model, config, transport=transport, backward_order=order)
        SCENARIOS[scenario](world, model)
        gc.collect()
        if offloader is not None:
            assert offloader.totals()["offloaded_bytes"] > 0
            offloader.detach()
    return world.races


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", sorted(PLAIN_IS_ORDERED))
@pytest.mark.sampled(every=1000)
def test_without_offloading_all_is_in_order(scenario: str) -> None:
    assert races(scenario, "layer", 0, is_attached=False) == []


@pytest.mark.thorough
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("window", ["layer", 2_000])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_is_in_order(scenario: str, window: str | int) -> None:
    assert races(scenario, window, seed=0) == []


@pytest.mark.parametrize("recompute", [(), ("*",)])
def test_what_another_stream_saves_is_kept_with_its_reason(recompute: tuple[str, ...]) -> None:
    with fake_streams() as world:
        model, (x,) = Stack(plain_layer, plain_layer, size=SIZE), inputs(1)
        settings = {"policy": "all", "min_bytes": 0, "window": 0, "keep_last_layers": 0}
        config = PyAOConfig(host_memory_gib=2**-10, recompute_modules=recompute, **settings)
        part = Forked(world, num_parts=1)
        model.layers[1].function = part  # type: ignore[assignment]
        backward(world, model(x).sum())
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with attach(model, config, transport=FakeStreamTransport()) as offloader:
            backward(world, model(x).sum())
            metrics = offloader.metrics()
        # What both streams read was moved from the first; what the second returns is its own.
        assert metrics["kept_bytes/saved on another stream"] == 2 * x.nbytes
        assert metrics["offloaded_bytes"] > x.nbytes
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert world.races == []


def test_one_stream_waits_for_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one compute stream, no stream is made to wait for another one's compute."""
    monkeypatch.setattr(FakeStream, "wait_stream", lambda *_: pytest.fail("a needless wait"))
    monkeypatch.setattr(FakeStream, "record_event", lambda *_: pytest.fail("a needless event"))
    with fake_streams() as world, world.stream():
        model = Stack(plain_layer, plain_layer, size=SIZE)
        config = PyAOConfig(
            policy="all", min_bytes=0, window=500, keep_last_layers=0, host_memory_gib=2**-10
        )
        with attach(model, config, transport=FakeStreamTransport()) as offloader:
            for x in inputs(2):
                model(x).sum().backward()
            assert offloader.totals()["reloaded_bytes"] > 0


def test_a_later_micro_batch_makes_no_event_and_asks_for_memory_once() -> None:
    peaks = mock.patch("torch.accelerator.max_memory_allocated", return_value=2**20)
    with fake_streams() as world, peaks as asked:
        world.eagerness = 1.0  # the host sees all copies done
        model = Stack(plain_layer, plain_layer, plain_layer, size=SIZE)
        config = PyAOConfig(policy="all", min_bytes=0, window=0, host_memory_gib=2**-10)
        counted = mock.patch("torch.Event", side_effect=torch.Event)
        with counted as made, attach(model, config, transport=FakeStreamTransport()) as offloader:
            for x in inputs(4):
                before = made.call_count, asked.call_count
                model(x).sum().backward()
            assert (made.call_count, asked.call_count) == (before[0], before[1] + 1)
            assert before[0] > 10 and offloader.metrics()["device_peak_bytes"] == 2**20


def test_collecting_asks_no_further_than_the_first_copy_that_runs() -> None:
    with fake_streams() as world:
        world.eagerness = 0.0  # the host sees no copy done
        transport = FakeStreamTransport()
        _ = [transport.offload(torch.ones(3), torch.empty(3)) for _ in range(5)]
        queries = mock.patch.object(FakeEvent, "query", autospec=True, side_effect=FakeEvent.query)
        with queries as asked:
            transport.collect(MicroBatchStats(), LinkTimes())
    assert asked.call_count == 1


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_encoded_tensors_are_in_order(scenario: str) -> None:
    assert races(scenario, 2_000, seed=1, codec="int8") == []


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ["identity", "int8", "bitmask"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_is_in_order_whatever_the_host_sees(
    scenario: str, window: str | int, codec: str
) -> None:
    for seed in range(10):
        for copy_streams in (0, 1, 2):
            found = races(scenario, window, seed, codec=codec, copy_streams=copy_streams)
            assert found == [], f"seed {seed}, {copy_streams} copy streams"


# ---- engines with one fault ------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """Stand for a call that does nothing. A mock would keep its arguments alive."""


def _wait_on_the_current_stream() -> Any:
    """Whoever asks is ordered behind a copy, and not the stream whose memory it is."""

    def wait(self: StreamTransport, ticket: Any) -> None:
        torch.accelerator.current_stream().wait_event(ticket.end)

    return mock.patch.object(StreamTransport, "wait", wait)


def _target_on_the_current_stream() -> Any:
    """A prefetch takes memory of the stream that prefetches."""
    return mock.patch.object(Mover, "reload", Mover._queue_reload)


def _no_one_visits() -> Any:
    """Each stream is taken for the home of what it asks for."""
    return mock.patch("hf_pyao.engine.runtime.unpacking.visitor_of", _nothing)


def _visitors_do_not_wait() -> Any:
    """A second stream reads what the first was made to wait for."""

    def lend(tensor: torch.Tensor, home: Any, visitor: Any) -> torch.Tensor:
        tensor.record_stream(visitor)
        return tensor

    return mock.patch("hf_pyao.engine.runtime.unpacking.lend", lend)


def _visitors_are_not_awaited() -> Any:
    """Memory goes back to its home while a visitor reads it."""

    def lend(tensor: torch.Tensor, home: Any, visitor: Any) -> torch.Tensor:
        visitor.wait_stream(home)
        return tensor

    return mock.patch("hf_pyao.engine.runtime.unpacking.lend", lend)


def _newest_copy_stands_for_all() -> Any:
    """Where the layer ends, the newest copy's stream waits, and the others do not."""

    def wait(self: LinkContext, items: Sequence[int]) -> None:
        for item in items[-1:]:
            leaving = self._leaving[item]
            leaving.transport.wait(leaving.ticket)

    return mock.patch.object(LinkContext, "await_copies", wait)


def _buffers_return_before_they_are_written() -> Any:
    """A host buffer is another model's while a copy to it is under way."""
    release = Mover.release

    def early(self: Mover, moved: Any) -> None:
        if moved.reload_ticket is None:
            moved.offload_ticket = None
        release(self, moved)

    return mock.patch.object(Mover, "release", early)


def _events_are_used_again_at_once() -> Any:
    """An event is recorded anew while someone may yet wait for the copy before it."""
    copy = StreamTransport._copy

    def early(self: StreamTransport, *call: Any) -> Any:
        ticket = copy(self, *call)
        ticket.spare += (ticket.start, ticket.end)
        return ticket

    return mock.patch.object(StreamTransport, "_copy", early)


SHOWN_BY: dict[Callable[[], Any], str] = {
    _wait_on_the_current_stream: "micro_batches",
    _target_on_the_current_stream: "micro_batches",
    _no_one_visits: "looked_at",
    _visitors_do_not_wait: "looked_at",
    _visitors_are_not_awaited: "looked_at",
    _newest_copy_stands_for_all: "micro_batches",
    _buffers_return_before_they_are_written: "two_models",
    _events_are_used_again_at_once: "micro_batches",
}


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", SHOWN_BY, ids=lambda mutant: mutant.__name__.replace("_", " "))
@pytest.mark.sampled(every=1000)
def test_mutant_is_caught(mutant: Callable[[], Any]) -> None:
    cases = [("layer", {}), (2_000, {}), (2**20, {}), (2_000, {"codec": "int8"})]
    for seed in range(3):
        for window, options in cases:
            with mutant():
                if races(SHOWN_BY[mutant], window, seed, **options):
                    return
    pytest.fail("no case shows it")
