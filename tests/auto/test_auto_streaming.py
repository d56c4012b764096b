"""``stream_weights="auto"``: as few layers are streamed as the device's memory needs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto import residency
from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.auto.machine.states import ALL_STREAMED, Mode
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.config import GIB
from hf_pyao.engine.recompute.verification import NUM_FIRST_FORWARDS
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS
from hf_pyao.engine.weights.blocks import Block
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.plan.step.resizes import sees_resizes
from hf_pyao.plan.weights.first_residents import FREE_SHARE, first_residents
from tests.auto.test_auto_policy import (
    AUTO,
    NUM_MEASURED,
    assert_same,
    batch_of,
    run_out,
    step,
    transport,
)
from tests.helpers.adapters import tiny_lora

NUM_LAYERS = 4
BATCH = batch_of(2)


def lora() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 176}
    return tiny_lora("llama", num_hidden_layers=NUM_LAYERS, **sizes).train()


def config_of(model: nn.Module, share: float, **settings: Any) -> PyAOConfig:
    """Return a configuration for a device of *share* times the bytes of *model*'s weights."""
    nbytes = share * sum(parameter.nbytes for parameter in model.parameters())
    settings = {"stream_weights": "auto", "host_memory_gib": 0.1, **settings}
    return replace(AUTO, device_memory_gib=nbytes / GIB, **settings)


def weights_of(offloader: Offloader) -> StreamedLayers:
    assert offloader.weights is not None
    return offloader.weights


def ends_of(offloader: Offloader) -> tuple[Block, ...]:
    """Return embeddings and head, if they are on the host."""
    source = weights_of(offloader)._ends.source
    return () if source is None else source.blocks


def uploads_of(offloader: Offloader) -> int:
    number: int = weights_of(offloader).figures()["num_uploads"]
    return number


def peak_bytes(model: nn.Module, offloader: Offloader, expected: list[torch.Tensor]) -> int:
    """Run a step and return its peak by a ledger of storages, which knows nothing of plans."""

    def is_host(storage: torch.UntypedStorage) -> bool:
        blocks = [*weights_of(offloader).blocks, *ends_of(offloader)]
        masters = {b.memory.untyped_storage()._cdata for b in blocks if b.memory is not None}
        return offloader.host_pool.owns(storage) or storage._cdata in masters

    model.zero_grad()
    ledger = MemoryLedger(is_host)
    ledger.note([*model.parameters(), *model.buffers()])
    with samples_unseen(), sees_resizes(ledger.resized), NotingMode(ledger):
        assert_same(step(model, BATCH, offloader), expected)
    return ledger.peak_bytes


@contextlib.contextmanager
def samples_unseen() -> Iterator[None]:
    """Count no samples of weights: they are on the host, which here is the device too."""

    def unseen(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return own(*args)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("note_content", "has_changed"):
            own = getattr(Block, name)
            stack.enter_context(mock.patch.object(Block, name, unseen(own)))
        yield


def run(share: float, num_steps: int, **settings: Any) -> tuple[list[int], list[int], list[float]]:
    """Return by step the resident layers, the uploads, and the peak's share of the device."""
    expected = step(lora(), BATCH)
    model = lora()
    config = config_of(model, share, **settings)
    assert config.device_memory_gib is not None
    residents, uploads, peaks = [], [0], []
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(num_steps):
            nbytes = peak_bytes(model, offloader, expected)
            peaks.append(nbytes / (config.device_memory_gib * GIB))
            residents.append(weights_of(offloader).num_resident)
            uploads.append(uploads_of(offloader))
    return residents, [b - a for a, b in itertools.pairwise(uploads)], peaks


@pytest.mark.parametrize("policy", ["auto", "all", "off"])
@pytest.mark.sampled(every=3)
def test_where_all_fits_nothing_is_streamed(policy: str) -> None:
    residents, uploads, _ = run(4.0, NUM_MEASURED + 2, policy=policy)
    assert set(residents) == {NUM_LAYERS}
    assert set(uploads) == {0}


@pytest.mark.parametrize("policy", ["all", "off"])
@pytest.mark.parametrize("share", [0.8, 1.1, 1.5])
@pytest.mark.sampled(every=3)
def test_by_the_first_batch_as_many_stay_as_fit(share: float, policy: str) -> None:
    residents, _, peaks = run(share, 3, policy=policy)
    assert len(set(residents)) == 1, "known before the first forward"
    assert peaks[2] <= 1 or residents[0] == 0
    model = lora()
    one_more = sum(p.nbytes for p in model.parameters() if not p.requires_grad) / NUM_LAYERS
    # Three streamed blocks take as much as two that stay, so that fewer make no sense.
    spare = (1 - peaks[2]) * share * sum(p.nbytes for p in model.parameters())
    spare -= 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # Adam's, to come
    fewest_streamed = NUM_LAYERS - residents[0] == NUM_SLOTS + 1
    assert residents[0] == NUM_LAYERS or spare < (3 if fewest_streamed else 1.05) * one_more


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.9, 1.0, 1.15, 1.3])
def test_plans_choose_layers_and_activations_together(share: float) -> None:
    residents, uploads, peaks = run(share, NUM_MEASURED + NUM_FIRST_FORWARDS + 2)
    assert residents[-1] < NUM_LAYERS
    assert uploads[-1] > 0
    assert peaks[-1] <= 1.03  # of a step this small, what is rebuilt is known to some kB


@pytest.mark.thorough
@pytest.mark.thorough
def test_a_larger_device_has_no_fewer_layers() -> None:
    shares = (0.65, 0.9, 1.2, 1.5, 2.5)
    residents = [run(share, NUM_MEASURED + 2)[0][-1] for share in shares]
    assert residents == sorted(residents)
    assert residents[0] == 0
    assert residents[-1] == NUM_LAYERS


@pytest.mark.thorough
def test_plans_stand_on_a_given_number_of_layers() -> None:
    expected = step(lora(), BATCH)
    model = lora()
    config = config_of(model, 0.9, stream_weights=1)
    with attach(model, config, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 2):
            assert_same(step(model, BATCH, offloader), expected)
        assert weights_of(offloader).num_resident == 1
        assert offloader.plan is not None
        assert offloader.plan.facts.resident_blocks == 1
        assert offloader.plan.facts.host_bytes >= weights_of(offloader).nbytes


def test_before_a_plan_running_out_streams_all_and_goes_on_measuring() -> None:
    expected = step(lora(), BATCH)
    model = lora()
    config = config_of(model, 4.0, stream_embeddings="off")
    with attach(model, config, transport=transport()) as offloader:
        assert offloader.auto is not None
        assert_same(step(model, BATCH, offloader), expected)
        assert weights_of(offloader).num_resident == NUM_LAYERS
        assert run_out(offloader) == ALL_STREAMED
        assert offloader.auto.driver.state.mode is Mode.MEASURING
        assert_same(step(model, BATCH, offloader), expected)
        assert weights_of(offloader).num_resident == 0
        assert "is offloaded" in str(run_out(offloader)) or "recomputed" in str(run_out(offloader))
        assert_same(step(model, BATCH, offloader), expected)
        assert weights_of(offloader).num_resident == 0


@pytest.mark.thorough
def test_with_another_policy_running_out_streams_all_first() -> None:
    expected = step(lora(), BATCH)
    model = lora()
    config = config_of(model, 4.0, policy="all")
    with attach(model, config, transport=transport()) as offloader:
        assert_same(step(model, BATCH, offloader), expected)
        assert run_out(offloader) == ALL_STREAMED
        assert_same(step(model, BATCH, offloader), expected)
        assert weights_of(offloader).num_resident == 0
        assert run_out(offloader) == ALL_STREAMED
        assert run_out(offloader) != ALL_STREAMED
        assert_same(step(model, BATCH, offloader), expected)
        assert len(ends_of(offloader)) == 2


@pytest.mark.thorough
def test_after_running_out_a_plan_streams_no_fewer_layers() -> None:
    expected = step(lora(), BATCH)
    model = lora()
    with attach(model, config_of(model, 1.4), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, BATCH, offloader)
        residents = [weights_of(offloader).num_resident]
        while run_out(offloader) is not None:
            assert_same(step(model, BATCH, offloader), expected)
            residents.append(weights_of(offloader).num_resident)
        assert residents == sorted(residents, reverse=True)
        assert residents[-1] == 0


def test_a_step_that_cannot_be_recorded_streams_as_at_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = lora()
    refuses = mock.patch.object(residency, "record_fake_step", side_effect=CopyError("it is odd."))
    config = config_of(model, 1.2, policy="all")
    with refuses, attach(model, config, transport=transport()) as offloader:
        before = weights_of(offloader).num_resident
        step(model, BATCH, offloader)
        assert weights_of(offloader).num_resident == before
    assert "it is odd" in caplog.text


def test_the_recorded_step_is_that_of_a_resident_model() -> None:
    """Weights of a layer that lie in one piece of host memory are recorded one by one."""
    seen = seen_forward((), BATCH)
    expected, _ = record_fake_step(CopiedStep(lora(), seen))
    model = lora()
    with attach(model, PyAOConfig(stream_weights=1, policy="off")):
        found, _ = record_fake_step(CopiedStep(model, seen))
    assert found.to_dict() == expected.to_dict()


@pytest.mark.parametrize("other_bytes", [0, 300, 900])
def test_first_layers_that_stay_leave_a_share_of_the_device(other_bytes: int) -> None:
    sizes = [100] * 8
    for limit in range(100, 3000, 50):
        number, fits = first_residents(sizes, sizes[0], other_bytes, limit)
        needed = {
            n: 100 * n + (0 if n == len(sizes) else NUM_SLOTS * 100) + other_bytes
            for n in (*range(len(sizes) - NUM_SLOTS), len(sizes))
        }
        fitting = [n for n, nbytes in needed.items() if nbytes <= (1 - FREE_SHARE) * limit]
        assert number == max(fitting, default=0)
        assert fits is bool(fitting)


@pytest.mark.thorough
def test_embeddings_and_head_leave_last_by_the_first_batch() -> None:
    """Where no layer stays, and the step does not fit; and where there is room they stay."""
    expected = step(lora(), BATCH)
    for share, leave in ((0.2, True), (4.0, False)):
        model = lora()
        with attach(
            model, config_of(model, share, policy="all"), transport=transport()
        ) as offloader:
            before = model.get_input_embeddings().weight.detach().clone()
            assert_same(step(model, BATCH, offloader), expected)
            assert bool(ends_of(offloader)) == leave
            assert torch.equal(model.get_input_embeddings().weight, before)
        model = lora()
        config = config_of(model, share, policy="all", stream_embeddings="off")
        with attach(model, config, transport=transport()) as offloader:
            assert_same(step(model, BATCH, offloader), expected)
            assert not ends_of(offloader)


@pytest.mark.thorough
def test_the_host_may_have_no_room_for_embeddings_and_head() -> None:
    expected = step(lora(), BATCH)
    model = lora()
    with attach(model, config_of(model, 4.0, policy="all"), transport=transport()) as offloader:
        assert_same(step(model, BATCH, offloader), expected)
        assert run_out(offloader) == ALL_STREAMED
        assert_same(step(model, BATCH, offloader), expected)
        offloader.host_pool.capacity_bytes = 0
        assert run_out(offloader) == ALL_STREAMED
        assert_same(step(model, BATCH, offloader), expected)
        assert not ends_of(offloader)
        assert run_out(offloader) != ALL_STREAMED
