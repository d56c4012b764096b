"""Which layers are streamed changes between micro-batches; bits do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.auto.offloader import Offloader
from hf_pyao.engine.weights.masters import Masters
from tests.helpers import gradients_of, tiny_batch, tiny_model
from tests.helpers.adapters import tiny_lora, with_adapters
from tests.helpers.quantised import quantise_
from tests.helpers.simulation.transport import SimulatedTransport

NUM_LAYERS = 5
ORDERS = ((0, 5, 2), (5, 0, 5), (3, 1, 4, 0), (0, 1, 2, 3, 4, 5, 0))


def llama(quantised_as: str = "") -> nn.Module:
    if not quantised_as:
        return tiny_lora("llama", num_hidden_layers=NUM_LAYERS)
    model = tiny_model("llama", num_hidden_layers=NUM_LAYERS, hidden_size=64, intermediate_size=128)
    return with_adapters(quantise_(model, quantised_as))


def streamed(model: nn.Module, **settings: Any) -> Offloader:
    transport = settings.pop("transport", None)
    settings = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, **settings}
    return attach(model, PyAOConfig(stream_weights=0, **settings), transport=transport)


def weights_of(offloader: Offloader) -> StreamedLayers:
    assert offloader.weights is not None
    return offloader.weights


def trained(
    model: nn.Module, num_steps: int, before: Callable[[int], None] = lambda step: None
) -> list[torch.Tensor]:
    """Return losses, and the adapters after some steps of two micro-batches each."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(num_steps):
        for micro_batch in range(2):
            before(2 * step + micro_batch)
            loss = model(**tiny_batch(2 * step + micro_batch)).loss
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("policy", ["all", "off"])
def test_bits_are_those_of_the_resident_run(order: tuple[int, ...], policy: str) -> None:
    expected = trained(llama(), 4)
    model = llama()
    with streamed(model, policy=policy) as offloader:
        weights = weights_of(offloader)
        seen = []

        def ask(micro_batch: int) -> None:
            seen.append(weights.num_resident)
            weights.ask_for(order[micro_batch % len(order)])

        found = trained(model, 4, ask)
    assert same(found, expected)
    assert seen[1:] == list(itertools.islice(itertools.cycle(order), 7)), "as asked for"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_weights_change_places_with_their_scales(kind: str) -> None:
    expected = trained(llama(kind), 2)
    model = llama(kind)
    with streamed(model) as offloader:
        weights = weights_of(offloader)
        found = trained(model, 2, lambda number: weights.ask_for((0, 5, 3, 1)[number]))
    assert same(found[:4], expected[:4])


def test_a_graph_that_waits_is_not_disturbed() -> None:
    """Its backward runs under another choice of layers than its forward did."""
    expected, model = llama(), llama()
    for a, b in itertools.pairwise((0, 3, 5, 1)):
        losses = [expected(**tiny_batch(n)).loss for n in (a, b)]
        sum(losses).backward()
    with streamed(model) as offloader:
        weights = weights_of(offloader)
        for a, b in itertools.pairwise((0, 3, 5, 1)):
            losses = []
            for number in (a, b):
                weights.ask_for(number)
                losses.append(model(**tiny_batch(number)).loss)
            sum(losses).backward()
    found = gradients_of(model)
    assert all(torch.equal(found[name], g) for name, g in gradients_of(expected).items())


@pytest.mark.parametrize("num_schedules", [6, pytest.param(400, marks=pytest.mark.thorough)])
def test_under_adversarial_schedules(num_schedules: int) -> None:
    expected = trained(llama(), 2)
    for seed in range(num_schedules):
        model = llama()
        transport = SimulatedTransport(seed, copy_streams=1 + seed % 2)
        with streamed(model, transport=transport) as offloader:
            weights = weights_of(offloader)
            order = ORDERS[seed % len(ORDERS)]
            found = trained(model, 2, lambda n: weights.ask_for(order[n % len(order)]))
        assert transport.violations == []
        assert same(found, expected), seed


def test_the_host_gets_its_memory_back() -> None:
    model = llama()
    with streamed(model) as offloader:
        weights, pool = weights_of(offloader), offloader.host_pool
        nbytes, before = weights.nbytes, pool.capacity_bytes
        for resident, expected in ((5, before + nbytes), (0, before), (5, before + nbytes)):
            weights.ask_for(resident)
            model(**tiny_batch())
            assert pool.capacity_bytes == expected


def test_what_the_host_has_no_room_for_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, expected = llama(), llama()
    with streamed(model) as offloader:
        weights = weights_of(offloader)
        block_bytes = weights.blocks[0].nbytes
        weights.ask_for(NUM_LAYERS)
        model(**tiny_batch())
        pool = offloader.host_pool
        pool.capacity_bytes = pool.pool_bytes + 2 * block_bytes
        weights.ask_for(0)
        loss = model(**tiny_batch()).loss
        assert weights.num_resident == NUM_LAYERS - 2
        assert "the host has no room" in caplog.text
    assert torch.equal(loss, expected(**tiny_batch()).loss)


def test_what_the_device_has_no_room_for_is_streamed(caplog: pytest.LogCaptureFixture) -> None:
    model, expected = llama(), llama()
    own, calls = Masters.copies_on, itertools.count()

    def copies_on(block: Masters, device: torch.device) -> list[torch.Tensor]:
        if next(calls) >= 2:
            raise torch.OutOfMemoryError("no more")
        return own(block, device)

    with streamed(model) as offloader, mock.patch.object(Masters, "copies_on", copies_on):
        weights = weights_of(offloader)
        weights.ask_for(NUM_LAYERS)
        loss = model(**tiny_batch()).loss
        assert weights.num_resident == 2
        assert "the device has no room" in caplog.text
    assert torch.equal(loss, expected(**tiny_batch()).loss)


class Interrupted(BaseException):
    pass


def interrupts(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls: Iterator[int] = itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise Interrupted
        return function(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("method", ["move_to", "leave_for", "copies_on"])
def test_an_interrupt_loses_no_weight(method: str, at: int) -> None:
    model, expected = llama(), llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with streamed(model) as offloader:
        weights = weights_of(offloader)
        first, second = (NUM_LAYERS, 0) if method == "move_to" else (0, NUM_LAYERS)
        weights.ask_for(first)
        model(**tiny_batch())
        weights.ask_for(second)
        patch = mock.patch.object(Masters, method, interrupts(getattr(Masters, method), at))
        with patch, pytest.raises(Interrupted):
            model(**tiny_batch())
        loss = model(**tiny_batch()).loss
        assert torch.equal(loss, expected(**tiny_batch()).loss)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(type(module._parameters) is dict for module in model.modules())
