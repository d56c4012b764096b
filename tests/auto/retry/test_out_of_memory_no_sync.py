"""Out of memory where gradients are accumulated under ``no_sync()``, entered by the micro-batch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import OutOfDeviceMemoryError, attach
from tests.auto.retry.test_out_of_memory_cases import Bomb, plant
from tests.helpers import EVERYTHING, assert_same_tensors, tiny_batch, tiny_model

NUM_MICRO_BATCHES = 3
NUM_STEPS = 2


class NumberedBomb(Bomb):
    """Goes off once, at the micro-batch with a number."""

    number = -1
    now = -1

    def check(self) -> None:
        if self.now == self.number:
            self.number = -1
            raise self.error()


def train(number: int, *, in_backward: bool, offloads: bool = True, **options: Any) -> Any:
    """Train, out of memory at the micro-batch *number*; return the parameters."""
    bomb = NumberedBomb()
    model = plant(tiny_model("llama", dropout=0.1), bomb, layer=1, in_backward=in_backward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
        wrapped = DistributedDataParallel(model, **options)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    attached = attach(wrapped, EVERYTHING) if offloads else contextlib.nullcontext()
    bomb.number = number
    with attached as offloader:
        for bomb.now in range(NUM_STEPS * NUM_MICRO_BATCHES):
            is_last = bomb.now % NUM_MICRO_BATCHES == NUM_MICRO_BATCHES - 1
            batch = tiny_batch(bomb.now)

            def micro_batch(is_last: bool = is_last, batch: Any = batch) -> None:
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    wrapped(**batch, use_cache=False).loss.backward()

            if offloader is None:
                micro_batch()
            else:
                offloader.run_micro_batch(micro_batch)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    assert bomb.number == -1
    return {name: p.detach().clone() for name, p in copy.copy(model).named_parameters()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("number", [0, 1, 3, 4])
@pytest.mark.sampled(every=4)
def test_accumulated_micro_batches_run_again(
    number: int, options: dict[str, Any], in_backward: bool
) -> None:
    expected = train(-1, in_backward=in_backward, offloads=False, **options)
    assert_same_tensors(train(number, in_backward=in_backward, **options), expected, "")


@pytest.mark.usefixtures("one_rank")
def test_a_micro_batch_that_exchanges_says_so() -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="has begun to reduce its gradients"):
        train(5, in_backward=True)
    expected = train(-1, in_backward=False, offloads=False)
    assert_same_tensors(train(5, in_backward=False), expected, "forward of the exchange")
