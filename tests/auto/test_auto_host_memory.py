"""Policy ``auto`` and host memory that changes in a run: a plan is made for what is there now."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.plans.host_and_disk import MeasuredHostAndDisk
from hf_pyao.config import GIB
from hf_pyao.plan.hardware.speeds import DiskModel
from hf_pyao.plan.options.plan_request import PlanRequest
from tests.auto.test_auto_policy import AUTO, NUM_MEASURED, assert_same, batch_of, step, transport
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.adapters import tiny_lora

SHORT, LONG = batch_of(2), batch_of(16)
CONFIG = replace(AUTO, device_memory_gib=1.2e6 / GIB, checkpoint_every=0, keep_last_layers=0)


def host_peak_bytes(model: nn.Module, host_bytes: int | None) -> float:
    """Train on short batches, then on long ones, for which the host has *host_bytes*.

    None: what it had before. Return the most bytes that the last one had on the host, as counted.
    """
    expected = step(model, LONG)
    with attach(model, CONFIG, transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 3):
            step(model, SHORT, offloader)
        before = offloader.plan
        if host_bytes is not None:
            offloader.host_pool.capacity_bytes = host_bytes
        for _ in range(3):
            assert_same(step(model, LONG, offloader), expected)
        assert before is not None
        assert offloader.plan not in (None, before)
        return offloader.metrics()["host_peak_bytes"]


def test_a_plan_is_made_for_the_host_memory_that_is_there() -> None:
    model = tiny_model("llama").train()
    host_bytes = 180_000
    assert host_peak_bytes(copy.deepcopy(model), None) > 2 * host_bytes
    assert host_peak_bytes(model, host_bytes) <= host_bytes


def test_streamed_weights_are_among_what_the_host_has_room_for() -> None:
    """What they take is theirs already, however many layers leave; another's is not."""
    model = tiny_lora("llama", num_hidden_layers=4).train()
    config = PyAOConfig(policy="off", stream_weights=2, host_memory_gib=0.1)
    with attach(model, config) as offloader:
        assert offloader.weights is not None
        below = MeasuredHostAndDisk(offloader.link.tiers, offloader.weights.memory)
        found = []
        for num_resident in (2, 0, 3):
            offloader.weights.ask_for(num_resident)
            model(**tiny_batch()).loss.backward()
            assert offloader.weights.num_resident == num_resident
            assert offloader.host_pool.capacity_bytes < int(0.1 * GIB)
            found.append(below.host_bytes)
        assert found == [int(0.1 * GIB)] * 3
        others = offloader.host_pool.reserve(4096)
        assert others is not None
        assert below.host_bytes == int(0.1 * GIB) - 4096


class Below:
    """A host, and a disk that may not have been measured."""

    def __init__(self, disk: DiskModel | None) -> None:
        self.has_disk = True
        self.host_bytes = 1000
        self.disk_bytes = 500
        self.placed_weights = None
        self._disk = disk

    def disk(self) -> DiskModel | None:
        return self._disk


def test_a_disk_counts_once_it_was_written() -> None:
    bound = PlanRequest.of_config(PyAOConfig())
    assert bound.host_limit_now_bytes == math.inf
    reads = DiskModel(read_gib_per_s=1.0)
    writes = DiskModel(read_gib_per_s=1.0, write_gib_per_s=1.0, host_bytes=1000)
    for disk, expected in ((None, 1000), (reads, 1000), (writes, 1500)):
        assert bound.on(below=Below(disk)).host_limit_now_bytes == expected
    assert writes.room_for_saved(300) == 700
    assert writes.room_for_saved(3000) == 0
