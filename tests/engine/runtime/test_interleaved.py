"""Forwards that wait for their backward while others run: pipelines, and models that share a link."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_pyao import Offloader, attach
from hf_pyao.engine.runtime.backward_order import BackwardOrder, OldestFirst, Reversed
from hf_pyao.errors import ConfigError
from tests.helpers import EVERY_LAYER, Stack, gradients_of, linear_relu, tiny_batch, tiny_model
from tests.helpers.simulation.transport import SimulatedTransport

CONFIGS = {
    "meeting": EVERY_LAYER,
    "window": replace(EVERY_LAYER, window=2_000),
    "no window": replace(EVERY_LAYER, window=0),
    "all in flight": replace(EVERY_LAYER, window=2**20),
}
ORDERS: dict[str, BackwardOrder | None] = {
    "default": None,
    "oldest first": OldestFirst(),
    "always on": Reversed(goes_on=True),
}
SCHEDULE = ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3")
"""Four micro-batches on the first of two stages, one forward and one backward in turns."""


def run(model: torch.nn.Module, schedule: tuple[str, ...], offloader: Offloader | None) -> list:
    """Run *schedule*; return the metrics after each backward."""
    losses = {}
    seen = []
    for step in schedule:
        index = int(step[1])
        if step[0] == "F":
            losses[index] = model(**tiny_batch(index), use_cache=False).loss
        else:
            losses.pop(index).backward()
            if offloader is not None:
                seen.append(offloader.metrics())
    return seen


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_four_micro_batches_in_turns(config, order) -> None:  # type: ignore[no-untyped-def]
    plain, model = tiny_model("llama"), tiny_model("llama")
    serial = tuple(f"{kind}{index}" for index in range(4) for kind in "FB")
    run(plain, serial, None)
    expected = gradients_of(plain)
    with attach(model, config) as alone:
        (single,) = run(model, ("F0", "B0"), alone)
    model.zero_grad()
    transport = SimulatedTransport(0)
    with attach(model, config, transport=transport, backward_order=order) as offloader:
        seen = run(model, SCHEDULE, offloader)
        transport.finish()
        totals = offloader.totals()
        assert totals["num_micro_batches"] == len(seen) == 4
        for metrics in seen:
            for key in ("would_hold_bytes", "offloaded_bytes", "num_slots"):
                assert metrics[key] == single[key], key
        assert totals["offloaded_bytes"] == 4 * single["offloaded_bytes"]
        if order is None:
            for metrics in seen:
                assert metrics["reloaded_bytes"] == single["reloaded_bytes"]
            assert totals["reloaded_bytes"] == 4 * single["reloaded_bytes"]
        # Two micro-batches are on the host at once, never three.
        assert totals["host_peak_bytes"] == 2 * single["host_peak_bytes"]
        assert offloader.engine.mover.ahead_bytes == 0
        assert offloader.host_pool.settle() == 0
    assert transport.violations == []
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, expected[name]), name


def test_what_waits_to_leave_is_not_waited_for_by_the_backward_of_another() -> None:
    """Its device copies stay in the window; they go as their own turn comes."""
    model = Stack(linear_relu, linear_relu, linear_relu)
    transport = SimulatedTransport(0)
    transport._eagerness = 0.0  # nothing leaves before it must
    with attach(model, replace(EVERY_LAYER, window=2**20), transport=transport) as offloader:
        first, second = model(torch.randn(4, 4)).sum(), model(torch.randn(4, 4)).sum()
        waiting_bytes = offloader.link.waiting_bytes
        first.backward()
        assert offloader.link.waiting_bytes == waiting_bytes // 2
        second.backward()
        assert offloader.link.waiting_bytes == 0
        assert offloader.metrics()["reloaded_bytes"] == 0, "it was read where it was"


# ---- two models on one link --------------------------------------------------------------------------


def test_two_models_on_one_link_report_their_own_figures() -> None:
    small, large = tiny_model("opt"), tiny_model("llama")
    config = replace(EVERY_LAYER, window=4_000)
    alone = {}
    for model in (small, large):
        with attach(model, config) as offloader:
            model(**tiny_batch(), use_cache=False).loss.backward()
            alone[model] = offloader.metrics()
            model.zero_grad()
    assert alone[small] != alone[large]
    keys = (
        "would_hold_bytes",
        "offloaded_bytes",
        "reloaded_bytes",
        "link_bytes",
        "host_peak_bytes",
    )
    with attach(small, config) as one, attach(large, config, link=one.link) as other:
        assert other.host_pool is one.host_pool
        assert other.transport is one.transport
        for _ in range(2):
            losses = [model(**tiny_batch(), use_cache=False).loss for model in (small, large)]
            for loss in losses:
                loss.backward()
            for model, offloader in ((small, one), (large, other)):
                metrics = offloader.metrics()
                for key in keys:
                    assert metrics[key] == alone[model][key], key
                assert metrics["transfer_ms"] > 0
        assert one.host_pool.settle() == 0


def test_a_link_and_its_parts_are_not_given_together() -> None:
    with attach(tiny_model("opt"), EVERY_LAYER) as offloader:
        with pytest.raises(ConfigError, match="link is given together with"):
            attach(
                tiny_model("gpt2"),
                EVERY_LAYER,
                link=offloader.link,
                host_pool=offloader.host_pool,
            )
