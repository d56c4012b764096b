"""The device under test, on deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import Device, Gpu, StandIn, is_dry_run

# cuBLAS reads it when its handle is made, which no fixture comes before for certain.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def gpu() -> Iterator[Device]:
    """The accelerator, or its stand-in in a dry run; kernels are deterministic meanwhile."""
    device: Device = StandIn() if is_dry_run(dict(os.environ)) else Gpu()
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield device
    device.finish()  # copies of a test that waits for none must not reach into the next one
    torch.use_deterministic_algorithms(was_on)
