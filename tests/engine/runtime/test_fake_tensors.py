"""The engine runs unchanged on fake tensors: that is how memory is estimated without a device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_pyao import attach
from tests.helpers import (
    EVERY_LAYER,
    FunctionLayer,
    Stack,
)


def test_what_comes_back_is_fake_and_nothing_was_allocated() -> None:
    seen: list[torch.Tensor] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            seen.extend(ctx.saved_tensors)
            return gradient, None

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        # 8 TiB: no machine that runs this test could hold it.
        return Probe.apply(x * layer.weight, torch.empty(2**40, 2).t())  # type: ignore[no-any-return]

    with FakeTensorMode():
        model = Stack(function)
        with attach(model, replace(EVERY_LAYER, host_memory_gib=2.0**14)) as offloader:
            model(torch.randn(4, 4)).sum().backward()
            assert offloader.metrics()["offloaded_bytes"] > 2**43
    assert type(seen[0]) is FakeTensor
    assert seen[0].shape == (2, 2**40)
    assert seen[0].stride() == (1, 2)
