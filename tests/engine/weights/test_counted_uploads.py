"""What crosses the link for streamed weights, counted where copies are queued."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.transport import BlockingTransport
from tests.engine.weights.test_streaming import loss_of, ring_of
from tests.helpers import tiny_batch, train
from tests.helpers.adapters import tiny_lora

NUM_SLOTS = 2


class CountingTransport(BlockingTransport):
    """Counts the copies whose source or target is as large as a slot, by direction."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_bytes = 0
        self.uploads = 0
        self.num_offloads = 0
        self.read_on_device: list[StorageWeakRef] = []

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> Any:
        self.uploads += src.nbytes == self.slot_bytes
        return super().reload(src, dst, **options)

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> Any:
        self.num_offloads += 1
        self.read_on_device.append(StorageWeakRef(src.untyped_storage()))
        return super().offload(src, dst, **options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("policy", ["off", "all"])
@pytest.mark.parametrize(("num_layers", "stay"), [(1, 0), (2, 0), (3, 0), (4, 1), (6, 3), (7, 2)])
def test_each_step_uploads_what_the_ring_does_not_hold_and_copies_nothing_back(
    num_layers: int, stay: int, policy: str
) -> None:
    """Of N blocks, B are in the ring at each turn: 2N - B uploads at first, 2(N - B) later."""
    transport = CountingTransport()
    model = tiny_lora("llama", num_hidden_layers=num_layers)
    config = PyAOConfig(
        policy=policy, min_bytes=0, keep_last_layers=0, host_memory_gib=0.1, stream_weights=stay
    )
    with attach(model, config, transport=transport) as offloader:
        ring = ring_of(offloader)
        transport.slot_bytes = ring.slot_bytes
        counts = []
        for _ in range(4):
            before = transport.uploads
            train(model, [[tiny_batch(0)]])
            counts.append(transport.uploads - before)
        num_blocks = num_layers - stay
        held = min(NUM_SLOTS, num_blocks)
        assert counts == [2 * num_blocks - held, *[2 * (num_blocks - held)] * 3]
        assert sum(each.is_full for each in ring.on_device) == held
        copied_back = {ref.cdata for ref in transport.read_on_device} & set(ring._by_key)
        assert not copied_back
        assert (transport.num_offloads == 0) == (policy == "off")


def test_each_micro_batch_uploads_again_and_evaluation_uploads_each_block_once() -> None:
    transport = CountingTransport()
    model = tiny_lora("llama", num_hidden_layers=5)
    config = PyAOConfig(policy="off", host_memory_gib=0.1, stream_weights=0)
    with attach(model, config, transport=transport) as offloader:
        transport.slot_bytes = ring_of(offloader).slot_bytes
        train(model, [[tiny_batch(0), tiny_batch(1), tiny_batch(2)]])
        assert transport.uploads == 8 + 6 + 6
        with torch.no_grad():
            loss_of(model)
            before = transport.uploads
            loss_of(model)
            assert transport.uploads - before <= 5
