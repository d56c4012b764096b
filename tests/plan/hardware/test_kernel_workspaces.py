"""What kernels allocate inside, against the allocations of their sources written out here by hand."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.plan.hardware import attention_workspaces
from hf_pyao.plan.hardware.attention_workspaces import ATTENTION, AttentionShape
from hf_pyao.plan.hardware.kernel_settings import KernelSettings, settings_of
from hf_pyao.plan.hardware.kernel_workspaces import call_of, parts_of, workspace_of
from hf_pyao.plan.hardware.operation_costs import cost_of
from tests.helpers.ledger import AllocationLedger

ADA = KernelSettings(num_multiprocessors=46, capability=89)
HOPPER = KernelSettings(num_multiprocessors=132, capability=90)


def shape(batch: int, heads: int, tokens: int, width: int, **other: int) -> AttentionShape:
    kind = AttentionShape(batch, heads, heads, tokens, tokens, width, width, 2)
    return kind._replace(**other)


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "tokens", "width", "multiprocessors"),
    [
        (1, 32, 8, 1000, 128, 132),
        (3, 5, 5, 129, 72, 46),
        (2, 8, 1, 64, 100, 128),
        (7, 4, 2, 1, 256, 82),
    ],
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_flash_2_backward_allocates_what_mha_bwd_does(
    batch: int,
    heads: int,
    key_heads: int,
    tokens: int,
    width: int,
    multiprocessors: int,
    is_deterministic: bool,
) -> None:
    """Bytes are those of torch tensors of the shapes that the C++ source gives."""
    head_size = ceil(width / 8) * 8
    multiple = 32 if head_size <= 128 else 64
    head_size_rounded = ceil(head_size / multiple) * multiple
    rounded = ceil(tokens / 128) * 128
    nsplits = (multiprocessors + batch * heads - 1) // (batch * heads) if is_deterministic else 1
    with torch.device("meta"):
        made = [
            torch.empty(batch, heads, rounded),
            torch.empty(nsplits, batch, rounded, heads, head_size_rounded),
        ]
        if heads != key_heads:
            made += [torch.empty(batch, tokens, heads, head_size, dtype=torch.bfloat16)] * 2
    settings = KernelSettings(multiprocessors, 89, is_deterministic)
    sizes = shape(batch, heads, tokens, width, key_heads=key_heads)
    found = attention_workspaces.flash_backward(sizes, settings)
    assert sum(found.values()) == sum(tensor.nbytes for tensor in made)


def test_packed_sequences_take_128_rows_more_for_each() -> None:
    packed = shape(5, 8, 1003, 64, key_heads=2, is_packed=1)
    found = attention_workspaces.flash_backward(packed, ADA)
    rows = 1003 + 128 * 5
    assert found == {
        "dq_accum": 4 * rows * 8 * 64,
        "softmax_d": 4 * rows * 8,
        "dk_expanded": 2 * 1003 * 8 * 64,
        "dv_expanded": 2 * 1003 * 8 * 64,
    }


def test_flash_forward_splits_keys_only_where_blocks_are_too_few() -> None:
    forward = attention_workspaces.flash_forward
    assert forward(shape(16, 32, 512, 64), ADA) == {}  # 4,096 blocks of queries for 92 slots
    assert forward(shape(1, 4, 256, 64, has_dropout=1), HOPPER) == {}  # never with dropout
    # 16 blocks of 64 queries for 264 slots, 4 blocks of 256 keys: up to 4 splits, all eligible but
    # none of 3 (4 / 3 and 4 / 2 blocks are both 2). 64 blocks fill 0.24 of a wave, the most.
    found = forward(shape(1, 1, 1024, 64), HOPPER)
    assert found == {"softmax_lse_accum": 4 * 4 * 1024, "out_accum": 4 * 4 * 1024 * 64}


def test_the_efficient_kernel_rounds_its_sums_to_its_blocks() -> None:
    backward = attention_workspaces.efficient_backward
    # 16 bits, heads of 64: one tile of 64 x 64 floats and a lock of 16 bytes for 64 queries.
    tiles = 2 * 3 * ceil(100 / 64)
    assert backward(shape(2, 3, 100, 64), ADA) == {
        "workspace": tiles * (64 * 64 * 4 + 16),
        "delta": 4 * 2 * 3 * 100,
    }
    # 32 bits: the product of gradient and output is there with its sum, before the kernel runs.
    wide = shape(2, 3, 128, 64, itemsize=4)
    assert backward(wide, ADA) == {"workspace": 4 * 6 * 128 * (64 + 1), "delta": 4 * 6 * 128}
    # Heads of 256 do not fit registers: sums of keys and values too, split where there are few.
    large = backward(shape(1, 4, 1024, 256), ADA)["workspace"]
    gq = ceil(1024 / 64) * ceil(256 / 64) * (4 + 64 * 64)
    splits = min(1024 // 64, 200 // 4)
    assert large == 4 * 4 * (gq + splits * 64 * (256 + 256))
    settled = ADA._replace(is_deterministic=True)
    assert backward(shape(1, 4, 1024, 256), settled)["workspace"] < large


def test_the_efficient_forward_needs_sums_where_rows_do_not_fit() -> None:
    forward = attention_workspaces.efficient_forward
    assert forward(shape(2, 3, 100, 128), ADA) == {}
    assert forward(shape(2, 3, 100, 192), ADA) == {"output_accum": 4 * 2 * 3 * 100 * 192}
    assert forward(shape(2, 3, 100, 192, itemsize=4), ADA) == {}


def test_flash_3_sums_grouped_keys_for_their_own_heads_in_32_bits() -> None:
    settings = HOPPER._replace(flash_version=3)
    found = attention_workspaces.flash_backward(shape(1, 32, 4096, 64, key_heads=8), settings)
    assert found["dq_accum"] == 4 * 4096 * 32 * 64
    assert found["dk_accum"] == found["dv_accum"] == 4 * 4096 * 8 * 64
    assert "dk_expanded" not in found


def test_cudnn_asks_for_its_sums_and_a_margin() -> None:
    found = attention_workspaces.cudnn_backward(shape(2, 4, 100, 128), HOPPER)
    assert found["dQ_accum"] == 4 * 2 * 4 * 100 * 128
    assert found["plan (assumed)"] == attention_workspaces.CUDNN_MARGIN


def test_calls_are_noted_with_what_they_copy() -> None:
    """Queries, keys and values as transformers gives them; the gradient in another order."""
    with torch.device("meta"):
        query = torch.empty(2, 10, 8, 24, dtype=torch.bfloat16).transpose(1, 2)
        key = torch.empty(2, 10, 2, 24, dtype=torch.bfloat16).transpose(1, 2)
        gradient = torch.empty(2, 8, 10, 24, dtype=torch.bfloat16)
        statistic = torch.empty(2, 8, 10)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rest = (None, None, 10, 10, 0.0, True, statistic, statistic)
    call = call_of(backward, (gradient, query, key, key, query, statistic, *rest), {})
    assert call is not None
    sizes = AttentionShape(*call.sizes)
    assert sizes == AttentionShape(2, 8, 2, 10, 10, 24, 24, 2, copied_bytes=gradient.nbytes)
    assert parts_of(call, ADA)["contiguous copies"] == gradient.nbytes
    in_order = (gradient.transpose(1, 2).contiguous().transpose(1, 2), query, key, key)
    call = call_of(backward, (*in_order, query, statistic, *rest), {})
    assert call is not None and AttentionShape(*call.sizes).copied_bytes == 0


def test_an_embedding_sums_rows_in_a_tensor_of_its_own_from_3073_tokens_on() -> None:
    backward = torch.ops.aten.embedding_dense_backward.default

    def inside(tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        with torch.device("meta"):
            gradient = torch.empty(1, tokens, 32, dtype=dtype)
            indices = torch.empty(1, tokens, dtype=torch.int64)
        return workspace_of(call_of(backward, (gradient, indices, 100, -1, False), {}), ADA)

    assert inside(3072) == 0
    assert inside(3073) == 3073 * (32 * 4 + 6 * 8)
    assert inside(4000, torch.float64) == 4000 * (32 * 8 + 6 * 8)


def test_every_operator_of_the_table_is_torchs() -> None:
    for name in ATTENTION:
        assert hasattr(torch.ops.aten, name)


def test_settings_follow_the_process() -> None:
    cpu = torch.device("cpu")
    assert settings_of(cpu) == KernelSettings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not settings_of(cpu).is_deterministic  # kernels only warn then
        torch.use_deterministic_algorithms(True)
        assert settings_of(cpu).is_deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def recorded(run: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Run *run*; return the one call of an operator of bitsandbytes in it."""
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "bitsandbytes":
                found.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Seen():
        run()
    (call,) = found
    return call


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_four_bit_product_takes_what_the_allocator_hands_out(
    nested: bool, dtype: torch.dtype
) -> None:
    """Without its result; a result, and what is dequantised of it, are as large as here or less."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight, state = functional.quantize_4bit(
        torch.randn(192, 256), quant_type="nf4", compress_statistics=nested
    )
    inputs = torch.randn(5, 256, dtype=dtype)
    scales = (
        {
            "absmax_8bit": state.absmax,
            "absmax_code": state.state2.code,
            "absmax_offset": state.offset,
        }
        if nested
        else {}
    )
    absmax = state.state2.absmax if nested else state.absmax

    def run() -> Any:
        return torch.ops.bitsandbytes.gemm_4bit.default(
            inputs, weight, state.shape, absmax, state.blocksize, state.quant_type, **scales
        )

    func, args, kwargs = recorded(run)
    call = call_of(func, args, kwargs)
    assert call is not None
    parts = parts_of(call, ADA)
    assert parts["dequantized weight"] == 192 * 256 * dtype.itemsize
    assert parts.get("scales", 0) == (2 * 4 * (192 * 256 // 64) if nested else 0)
    run()
    with AllocationLedger() as ledger:
        result = run()
    assert ledger.largest_bytes >= parts["dequantized weight"]
    assert ledger.peak_bytes - result.nbytes >= parts["dequantized weight"]
    assert cost_of(func, args, kwargs, result, args[:2], [result]).flops == 2 * 5 * 192 * 256


def test_an_eight_bit_product_sums_in_32_bits() -> None:
    pytest.importorskip("bitsandbytes")
    inputs, weight = (torch.randint(-5, 5, (n, 64), dtype=torch.int8) for n in (3, 16))
    rows, columns = torch.rand(3), torch.rand(16)
    for dtype, half in ((torch.float16, 0), (torch.bfloat16, 2 * 3 * 16)):
        func, args, kwargs = recorded(
            lambda dtype=dtype: torch.ops.bitsandbytes.int8_scaled_mm.default(
                inputs, weight, rows, columns, dtype=dtype
            )
        )
        call = call_of(func, args, kwargs)
        assert workspace_of(call, ADA) == 4 * 3 * 16 + half
