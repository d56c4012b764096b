"""Operations of CUDA on a CPU; what is replaced for the whole process is put back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.model.fake_cuda.cuda_operations import Replacement, operations_of_cuda, replaced
from hf_pyao.model.fake_cuda.quiet import FAKE_TENSORS, quiet
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode

PLACE = SimpleNamespace(name=len)


def replace_name() -> AbstractContextManager[None]:
    return replaced(Replacement(PLACE, "name", abs))


def state() -> tuple[object, ...]:
    names = "hf_pyao", "torch._subclasses.fake_tensor"
    return PLACE.name, *(logging.getLogger(name).level for name in names)


@pytest.mark.parametrize("change", [replace_name, quiet, partial(quiet, FAKE_TENSORS)])
def test_two_threads_put_back_what_was_there(
    change: Callable[[], AbstractContextManager[None]],
) -> None:
    before = state()
    has_entered, may_leave = threading.Event(), threading.Event()

    def second() -> None:
        with change():
            has_entered.set()
            may_leave.wait(30)

    thread = threading.Thread(target=second)
    with change():
        assert state() != before
        thread.start()
        assert not has_entered.wait(0.1), "two at a time"
    assert has_entered.wait(30)
    may_leave.set()
    thread.join()
    assert state() == before


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of attention, and the width of their queries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "attention" in name:
            queries = args[1] if name.endswith("backward") else args[0]
            self.found.append((name.removeprefix("_scaled_dot_product_"), queries.shape[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "width", "settings", "kernel", "seen_width"),
    [
        (torch.bfloat16, 20, KernelSettings(46, 89), "flash_attention", 24),
        (torch.float32, 20, KernelSettings(46, 89), "efficient_attention", 20),
        (torch.bfloat16, 64, KernelSettings(132, 90, prefers_cudnn=True), "cudnn_attention", 64),
        (torch.bfloat16, 264, ANY_DEVICE, "efficient_attention", 264),
    ],
)
def test_attention_runs_the_kernel_of_the_device(
    dtype: torch.dtype, width: int, settings: KernelSettings, kernel: str, seen_width: int
) -> None:
    with FakeTensorMode(), operations_of_cuda(kernels=settings):
        tensors = [torch.empty(2, 4, 32, width, dtype=dtype, requires_grad=True) for _ in "qkv"]
        with Names() as seen:
            result = F.scaled_dot_product_attention(*tensors, is_causal=True)
            result.sum().backward()
    assert result.shape == tensors[0].shape
    assert [each.grad.shape for each in tensors if each.grad is not None] == [result.shape] * 3
    assert seen.found == [(kernel, seen_width), (f"{kernel}_backward", seen_width)]


def test_attention_gets_what_autocast_casts_on_cuda() -> None:
    with FakeTensorMode(), operations_of_cuda(kernels=KernelSettings(108, 80)):
        tensors = [torch.empty(3, 2, 16, 40, requires_grad=True) for _ in "qkv"]
        with Names() as seen, torch.autocast("cpu", torch.bfloat16):
            result = F.scaled_dot_product_attention(*tensors, is_causal=True)
    assert result.dtype == torch.bfloat16
    assert seen.found == [("flash_attention", 40)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_layer_norm_saves_its_statistics_in_float32(dtype: torch.dtype) -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    norm = torch.nn.LayerNorm(64, dtype=dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, operations_of_cuda():
        ledger = MemoryLedger()
        with NotingMode(ledger, fake_mode):
            x = torch.zeros(5, 7, 64, dtype=dtype, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = norm(x)
            statistics = [each for each in saved if each.numel() == 35]
            assert [each.dtype for each in statistics] == [torch.float32] * 2
            assert ledger.live_bytes == 2 * 5 * 7 * 64 * dtype.itemsize + 2 * 35 * 4
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.dtype == dtype
