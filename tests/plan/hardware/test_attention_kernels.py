"""Which kernel attention runs: cases of torch's own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_pyao.plan.hardware.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionRequest,
    choose_attention,
)
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings

AMPERE, ADA = KernelSettings(108, 80), KernelSettings(46, 89)
VOLTA, HOPPER = KernelSettings(80, 70), KernelSettings(132, 90, prefers_cudnn=True)
HALF, WIDE = torch.bfloat16, torch.float32


def request(dtype: torch.dtype, width: int = 64, **other: Any) -> AttentionRequest:
    shape = (2, 8, 128, width)
    return AttentionRequest(dtype, shape, shape, shape)._replace(**other)


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize(
    ("asked", "settings", "kernel"),
    [
        (request(HALF), ANY_DEVICE, FLASH),
        (request(HALF, dropout_p=0.1), ADA, FLASH),
        (request(HALF, has_mask=True), ADA, EFFICIENT),
        (request(WIDE), ADA, EFFICIENT),
        (request(WIDE, has_mask=True), AMPERE, EFFICIENT),
        (request(torch.float64), AMPERE, MATH),
        (request(HALF, 260), AMPERE, MATH),  # too wide for flash, not a multiple of 8
        (request(HALF, 264), AMPERE, EFFICIENT),
        (request(HALF, 20), ADA, FLASH),  # torch pads it
        (request(HALF, 20, has_mask=True), ADA, MATH),
        (request(WIDE, 20), ADA, EFFICIENT),
        (request(WIDE, 21), ADA, MATH),
        # Backward of wide heads does not fit Ada's shared memory, unless they are the widest.
        (request(HALF, 200), ADA, EFFICIENT),
        (request(HALF, 200), AMPERE, FLASH),
        (request(HALF, 200, needs_gradient=False), ADA, FLASH),
        (request(HALF, 256), ADA, FLASH),
        (request(HALF, 256, dropout_p=0.1), ADA, EFFICIENT),
        (request(HALF, is_causal=True, key=(2, 8, 100, 64), value=(2, 8, 100, 64)), ADA, EFFICIENT),
        (request(HALF, key=(2, 2, 128, 64), value=(2, 2, 128, 64), is_grouped=True), ADA, FLASH),
        (request(torch.float16), VOLTA, EFFICIENT),
        (request(HALF), VOLTA, MATH),  # no bfloat16 before Ampere
        (request(HALF), HOPPER, CUDNN),
        (request(HALF, has_mask=True), HOPPER, CUDNN),
        (request(HALF, mask_needs_gradient=True, has_mask=True), HOPPER, EFFICIENT),
        (request(HALF), HOPPER._replace(is_deterministic=True), FLASH),
        (request(HALF, dropout_p=0.125), HOPPER, CUDNN),
        (request(HALF, 136), HOPPER, FLASH),
        (request(WIDE), HOPPER, EFFICIENT),
    ],
)
def test_the_kernel_is_torchs_choice(
    asked: AttentionRequest, settings: KernelSettings, kernel: str
) -> None:
    assert choose_attention(asked, settings) == kernel


@pytest.mark.parametrize(("release", "kernel"), [("2.11.0+cu130", CUDNN), ("2.12.0", FLASH)])
def test_dropout_that_cudnn_would_round(
    monkeypatch: pytest.MonkeyPatch, release: str, kernel: str
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
    assert choose_attention(request(HALF, dropout_p=0.1), HOPPER) == kernel
