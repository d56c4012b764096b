"""On the device: attention in groups against torch's own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.attention.kernels import (
    AttentionCall,
    NoKernel,
    attention_in_groups,
    chosen_kernel,
)
from hf_pyao.plan.options.group_plan import plan_groups
from tests.gpu.device import Device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("samples", "heads", "kv_heads", "length", "setting", "is_deterministic"),
    [
        (6, 16, 16, 512, 3, False),
        (6, 16, 4, 511, 6, False),
        (1, 8, 2, 40_000, 2, False),
        (64, 16, 16, 512, 4, False),
        (64, 16, 4, 512, 4, True),
    ],
)
def test_bits_and_random_numbers(
    gpu: Device,
    samples: int,
    heads: int,
    kv_heads: int,
    length: int,
    setting: int,
    is_deterministic: bool,
    dropout_p: float,
) -> None:
    """Of everything but dq, which the kernel adds up in no fixed order unless told to."""
    device = gpu.torch_device
    if device.type != "cuda":
        pytest.skip("flash attention is CUDA's")
    torch.use_deterministic_algorithms(is_deterministic)  # the fixture puts it back
    torch.manual_seed(0)

    def tensor(num_heads: int) -> Tensor:
        options: Any = {"dtype": torch.bfloat16, "device": device}
        return torch.randn(samples, length, num_heads, 64, **options).transpose(1, 2)

    tensors = [tensor(n).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    grad = tensor(heads)
    is_grouped = heads != kv_heads
    call = AttentionCall(*tensors, None, dropout_p, is_causal=True, enable_gqa=is_grouped)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        kernel = chosen_kernel(call)
        assert not isinstance(kernel, NoKernel)
        plan = plan_groups(
            setting,
            num_samples=samples,
            num_heads=kv_heads,
            pair_bytes=kernel.pair_bytes(call),
            least_pairs=-(-kernel.least_pairs(call, is_auto=False) * kv_heads // heads),
            least_pairs_of_auto=1,
        )
        assert plan.num_groups > 1
        found = []
        for in_groups in (False, True):
            torch.manual_seed(7)
            if in_groups:
                out = attention_in_groups(kernel, plan, call)
            else:
                out = F.scaled_dot_product_attention(
                    *tensors, is_causal=True, dropout_p=dropout_p, enable_gqa=is_grouped
                )
            grads = torch.autograd.grad(out, tensors, grad)
            drawn = torch.rand(4, device=device)
            found.append((out, grads[1], grads[2], drawn, grads[0]))
    num_exact = 5 if is_deterministic else 4
    for ours, theirs in zip(found[1][:num_exact], found[0][:num_exact], strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert torch.allclose(found[1][4], found[0][4], rtol=2e-2, atol=2e-2)
