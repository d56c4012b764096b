"""Modes answer what C++ code asks about fake tensors, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from hf_pyao.engine.recompute.dispatch_modes import device_asked_for

ASKS: Any = torch.ops.prim.device.default


def test_the_device_of_a_fake_tensor_is_the_one_that_it_stands_for() -> None:
    mode = FakeTensorMode()
    fake = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    assert device_asked_for(ASKS, (fake,)) == fake.device == torch.device("cpu")
    with in_kernel_invocation_manager(mode):  # there it is the meta device's, as torch says itself
        assert device_asked_for(ASKS, (fake,)) is None


def test_all_else_is_run_as_ever() -> None:
    assert device_asked_for(ASKS, (torch.empty(2),)) is None
    assert device_asked_for(torch.ops.aten.add.Tensor, (torch.empty(2), 1)) is None
