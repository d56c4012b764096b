"""A host that runs ahead of its device: it never learns in time that a copy is done.

Tensors come back ahead of their use all the same, and what is in flight in the device's order is
bounded by the window. What is in flight is told from the transport's calls and from which storages
live, not from the engine's own counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.backward_order import OldestFirst
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket, LinkTimes
from tests.helpers import EVERY_LAYER, Stack, gradients_of, linear_relu, tiny_batch, tiny_model

SLOT_BYTES = 4 * 16 * 4
"""Of each tensor that a layer of :func:`stack` saves."""


@dataclass(eq=False)
class Copy(DoneTicket):
    """A copy, and the device memory that it uses."""

    label: Any = None
    memory: StorageWeakRef | None = None
    num_unpacks: int = 0
    """Tensors that backward had asked for when it was queued."""
    is_in_use: bool = False
    """Backward has asked for what was copied, and uses it until it dies."""
    is_dead: bool = False


@dataclass(eq=False)
class FarAhead(BlockingTransport, Observer):
    """The host asks whether a copy is done, and it never is. Keeps the books of the device.

    Device memory counts from the copy that uses it on until no one holds it and, for a copy to the
    host, compute was ordered behind that copy. It does not count while the operation that asked for
    it uses it.
    """

    most_bytes: int = 0
    """Most that was in flight when a reload was queued, without that reload."""
    num_ahead: int = 0
    """Reloads after which backward asked for something else before it waited for them."""
    num_on_demand: int = 0
    num_unpacks: int = 0
    freed_early: list[str] = field(default_factory=list)
    _offloads: list[Copy] = field(default_factory=list)
    _reloads: list[Copy] = field(default_factory=list)
    _ordered: int = -1
    """Compute is ordered behind the copies to the host up to this one."""

    name = "far ahead"

    def __post_init__(self) -> None:
        BlockingTransport.__init__(self)
        self._orders = itertools.count()

    # ---- transport -----------------------------------------------------------------------------

    def offload(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        *,
        after: Sequence[Any] = (),
        label: object = "",
        times: LinkTimes | None = None,
    ) -> Copy:
        self._look()
        return self._note(self._offloads, "offload", src, dst, src, label)

    def reload(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        *,
        after: Sequence[Any] = (),
        label: object = "",
        times: LinkTimes | None = None,
    ) -> Copy:
        self._look()
        self.most_bytes = max(self.most_bytes, self.in_flight_bytes)
        return self._note(self._reloads, "reload", src, dst, dst, label)

    def wait(self, ticket: DoneTicket) -> None:
        self._look()
        assert isinstance(ticket, Copy)
        if ticket.queue == "offload":
            self._ordered = max(self._ordered, ticket.order)
        elif not ticket.is_in_use:
            ticket.is_in_use = True
            is_ahead = ticket.num_unpacks < self.num_unpacks
            self.num_ahead += is_ahead
            self.num_on_demand += not is_ahead

    def is_done(self, ticket: DoneTicket) -> bool:
        return False

    # ---- observer ------------------------------------------------------------------------------

    def on_unpack(self, slot: Any) -> None:
        self._look()
        self.num_unpacks += 1
        for copy in self._offloads:  # of several micro-batches the oldest comes first
            if copy.label is slot and not copy.is_dead:
                copy.is_in_use = True
                break

    # ---- the books -----------------------------------------------------------------------------

    @property
    def in_flight_bytes(self) -> int:
        total = 0
        for copy in (*self._offloads, *self._reloads):
            is_ordered = copy.queue == "reload" or copy.order <= self._ordered
            is_free = copy.is_dead and is_ordered
            is_used = copy.is_in_use and not copy.is_dead
            total += 0 if is_free or is_used else copy.nbytes
        return total

    def _note(
        self,
        copies: list[Copy],
        direction: str,
        src: torch.Tensor,
        dst: torch.Tensor,
        memory: torch.Tensor,
        label: object,
    ) -> Copy:
        self._copy(direction, src, dst, {})
        copy = Copy(src.nbytes, queue=direction, order=next(self._orders), label=label)
        copy.num_unpacks = self.num_unpacks
        copy.memory = StorageWeakRef(memory.untyped_storage())
        copies.append(copy)
        return copy

    def _look(self) -> None:
        """Notice what has died since; a source must not have before compute was ordered."""
        for copy in (*self._offloads, *self._reloads):
            assert copy.memory is not None
            if not copy.is_dead and copy.memory.expired():
                copy.is_dead = True
                if copy.queue == "offload" and copy.order > self._ordered:
                    self.freed_early.append(str(copy.label))


def stack(num_layers: int = 8) -> nn.Module:
    return Stack(*[linear_relu] * num_layers, size=16)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def one_step(model: nn.Module) -> None:
    model(batch()).sum().backward()


def accumulated(model: nn.Module) -> None:
    for seed in range(3):
        model(batch(seed)).sum().backward()


def in_turns(model: nn.Module) -> None:
    """One forward and one backward in turns, as on the first stage of a pipeline."""
    losses = [model(batch(0)).sum(), model(batch(1)).sum()]
    for seed in range(2, 5):
        losses.pop(0).backward()
        losses.append(model(batch(seed)).sum())
    for loss in losses:
        loss.backward()


def run_counting(
    model: nn.Module, config: PyAOConfig, step: Callable[[nn.Module], None], **options: Any
) -> FarAhead:
    transport = FarAhead()
    with attach(model, config, transport=transport, **options) as offloader:
        offloader.engine.observe_too(transport)
        step(model)
        assert offloader.link.waiting_bytes == 0
        assert offloader.engine.mover.ahead_bytes == 0
        assert offloader.host_pool.settle() == 0
    return transport


def run(*args: Any, **options: Any) -> FarAhead:
    transport = run_counting(*args, **options)
    assert transport.freed_early == []
    return transport


STEPS: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any]]] = {
    "one step": (one_step, {}),
    "accumulated": (accumulated, {}),
    "in turns": (in_turns, {"backward_order": OldestFirst()}),
}


@pytest.mark.parametrize("num_slots", [2, 3, 5])
@pytest.mark.parametrize("name", STEPS)
def test_tensors_come_back_before_they_are_asked_for(name: str, num_slots: int) -> None:
    step, options = STEPS[name]
    plain, model = stack(), stack()
    step(plain)
    window = num_slots * SLOT_BYTES
    transport = run(model, replace(EVERY_LAYER, window=window), step, **options)
    assert transport.num_ahead > 0
    assert transport.num_on_demand == 0
    # A reload may begin while less than the window is in flight.
    assert window // 2 <= transport.most_bytes < window
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, gradients_of(plain)[name]), name


def test_what_the_window_holds_at_the_turn_is_read_in_place() -> None:
    """It is needed first: it is not let go to make room for what is needed later."""
    model = stack()
    with attach(model, replace(EVERY_LAYER, window=4 * SLOT_BYTES), transport=FarAhead()) as each:
        one_step(model)
        figures = each.metrics()
    assert figures["offloaded_bytes"] - figures["reloaded_bytes"] == 4 * SLOT_BYTES


def test_what_another_forward_left_in_the_window_makes_room() -> None:
    """The newest forward fills the window, and the backward of the oldest one comes first."""
    model = stack()
    transport = FarAhead()
    config = replace(EVERY_LAYER, window=4 * SLOT_BYTES)
    with attach(model, config, transport=transport, backward_order=OldestFirst()) as offloader:
        offloader.engine.observe_too(transport)
        first, second = model(batch(0)).sum(), model(batch(1)).sum()
        assert offloader.link.waiting_bytes == 4 * SLOT_BYTES
        first.backward()
        assert transport.num_on_demand == 0
        second.backward()
    assert transport.most_bytes < 4 * SLOT_BYTES
    assert transport.freed_early == []


def test_two_models_on_one_link_share_the_window() -> None:
    early, late = stack(), stack()
    config = replace(EVERY_LAYER, window=4 * SLOT_BYTES)
    transport = FarAhead()
    with (
        attach(early, config, transport=transport) as one,
        attach(late, config, link=one.link) as other,
    ):
        for each in (one, other):
            each.engine.observe_too(transport)
        for seed in range(2):
            late(early(batch(seed))).sum().backward()
    assert transport.num_on_demand <= 2  # each model's first, whose window was the other's
    assert transport.num_ahead > 20
    assert transport.most_bytes < 4 * SLOT_BYTES
    assert transport.freed_early == []


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"codec": "int8"},
        {"checkpoint_every": 1, "save_attention": True},
        {"recompute_modules": ("pointwise",)},
    ],
    ids=str,
)
def test_models(architecture: str, settings: dict[str, Any]) -> None:
    window = 4_000 if "checkpoint_every" in settings else 30_000

    def step(model: nn.Module) -> None:
        for seed in range(2):
            model(**tiny_batch(seed), use_cache=False).loss.backward()

    config = replace(EVERY_LAYER, window=window, **settings)
    transport = run(tiny_model(architecture), config, step)
    assert transport.num_ahead > 5 * transport.num_on_demand
    assert transport.most_bytes < window


def wait_for_none(self: LinkContext, items: Sequence[int]) -> None:
    pass


def wait_for_the_oldest(self: LinkContext, items: Sequence[int]) -> None:
    if items:
        oldest = next(iter(self._leaving.values()))
        oldest.transport.wait(oldest.ticket)


@pytest.mark.parametrize("wait", [wait_for_none, wait_for_the_oldest])
def test_room_that_is_made_without_its_wait_is_noticed(wait: Any) -> None:
    config = replace(EVERY_LAYER, window=4 * SLOT_BYTES)
    with mock.patch.object(LinkContext, "await_copies", wait):
        transport = run_counting(stack(), config, one_step)
    assert transport.freed_early


def test_room_that_is_never_made_is_noticed() -> None:
    config = replace(EVERY_LAYER, window=4 * SLOT_BYTES)
    with mock.patch.object(LinkContext, "make_room", return_value=False):
        transport = run(stack(), config, one_step)
    assert transport.num_on_demand > transport.num_ahead


def test_a_window_of_a_layer_needs_no_answer_of_the_host() -> None:
    transport = run(stack(), replace(EVERY_LAYER, window="layer"), accumulated)
    assert transport.num_on_demand == 0
