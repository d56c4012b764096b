"""Autograd runs a thread for each device: two of them may ask for one saved storage at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from hf_pyao import attach
from hf_pyao.runtime.transport import BlockingTransport, DoneTicket
from tests.helpers import EVERY_LAYER, Stack, linear_relu


class SlowReloads(BlockingTransport):
    """Lets other threads in between the start of a copy back and its end."""

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> DoneTicket:
        dst.fill_(0xFF)
        time.sleep(0.05)
        return super().reload(src, dst, **options)


def test_two_threads_may_unpack_one_storage_at_once() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, EVERY_LAYER, transport=SlowReloads()):
        output = model(torch.randn(4, 4))
        node, expected = output.grad_fn, output.detach().clone()
        seen: list[torch.Tensor] = []
        errors: list[BaseException] = []
        barrier = threading.Barrier(4)

        def look() -> None:
            barrier.wait()
            try:
                seen.append(node._saved_result)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(seen) == 4
        assert all(torch.equal(tensor, expected) for tensor in seen)
        output.sum().backward()
