"""Attention in groups against torch's own call, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.attention.kernels import AttentionCall, FlashKernel, attention_in_groups
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.options.group_plan import GroupPlan, plan_groups
from tests.helpers.ledger import AllocationLedger


class Shape(NamedTuple):
    """Of one call of attention."""

    samples: int
    heads: int
    kv_heads: int
    length: int
    kv_length: int
    width: int


SHAPES = [
    Shape(1, 4, 4, 16, 16, 8),
    Shape(3, 4, 2, 17, 17, 16),
    Shape(2, 6, 3, 33, 33, 8),
    Shape(5, 2, 1, 9, 9, 64),  # one key-value head: divided by samples alone
    Shape(1, 8, 2, 200, 200, 32),
    Shape(2, 3, 3, 7, 31, 24),  # cross attention
    Shape(1, 12, 12, 129, 65, 80),
    Shape(4, 5, 5, 800, 800, 8),
]

LAYOUTS: dict[str, Callable[[int, int, int, int, torch.dtype], Tensor]] = {
    "heads first": lambda b, h, n, d, t: torch.randn(b, h, n, d).to(t),
    "tokens first": lambda b, h, n, d, t: torch.randn(b, n, h, d).to(t).transpose(1, 2),
    "part of a projection": lambda b, h, n, d, t: (
        torch.randn(b, n, 3 * h * d).to(t).split(h * d, -1)[1].view(b, n, h, d).transpose(1, 2)
    ),
}


def inputs_of(shape: Shape, layout: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    make = LAYOUTS[layout]
    query = make(shape.samples, shape.heads, shape.length, shape.width, dtype)
    keys = [
        make(shape.samples, shape.kv_heads, shape.kv_length, shape.width, dtype) for _ in range(2)
    ]
    return [each.requires_grad_() for each in (query, *keys)]


class Groups(NamedTuple):
    """How a call runs."""

    plan: GroupPlan
    settings: dict[str, Any]
    kernel: FlashKernel = FlashKernel(None)

    def __call__(self, *tensors: Tensor) -> Tensor:
        return attention_in_groups(self.kernel, self.plan, AttentionCall(*tensors, **self.settings))


def call_of(shape: Shape, setting: int, **settings: Any) -> Groups:
    plan = plan_groups(
        setting,
        num_samples=shape.samples,
        num_heads=shape.kv_heads,
        pair_bytes=0,
        least_pairs=1,
        least_pairs_of_auto=1,
    )
    return Groups(plan, settings)


class Seen(NamedTuple):
    """What a call made."""

    out: Tensor
    grads: tuple[Tensor, ...]
    saved: list[tuple[Any, ...]]
    saved_tensors: list[Tensor]


def run(function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> Seen:
    saved: list[tuple[Any, ...]] = []
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
        kept.append(tensor.detach().clone())
        saved[-1] += (tensor.untyped_storage().nbytes(),)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*tensors)
    return Seen(out, torch.autograd.grad(out, tensors, grad), saved, kept)


def assert_equal(ours: Seen, theirs: Seen) -> None:
    assert ours.saved == theirs.saved
    pairs = zip(
        (ours.out, *ours.grads, *ours.saved_tensors),
        (theirs.out, *theirs.grads, *theirs.saved_tensors),
        strict=True,
    )
    for left, right in pairs:
        assert torch.equal(left, right)
        assert left.stride() == right.stride()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bits_strides_and_saved_tensors_are_those_of_one_kernel(
    shape: Shape, layout: str, dtype: torch.dtype, is_causal: bool
) -> None:
    if is_causal and shape.length != shape.kv_length:
        pytest.skip("causal attention between different lengths is not flash attention's")
    tensors = inputs_of(shape, layout, dtype)
    for scale in (None, 0.3):

        def theirs(q: Tensor, k: Tensor, v: Tensor, scale: float | None = scale) -> Tensor:
            is_grouped = shape.heads != shape.kv_heads
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
            )

        grad = torch.randn(shape.samples, shape.length, shape.heads, shape.width)
        grad = grad.to(dtype).transpose(1, 2)
        expected = run(theirs, tensors, grad)
        assert "FlashAttentionForCpu" in type(expected.out.grad_fn).__name__
        for setting in (2, 3, 100):
            call = call_of(shape, setting, is_causal=is_causal, scale=scale)
            assert call.plan.num_groups > 1
            found = run(call, tensors, grad)
            assert_equal(found, expected)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (False, False, True)])
def test_gradients_of_some_inputs(needs: tuple[bool, ...]) -> None:
    shape = Shape(2, 4, 2, 12, 12, 8)
    tensors = [
        each.detach().requires_grad_(need)
        for each, need in zip(inputs_of(shape, "heads first", torch.float32), needs, strict=True)
    ]
    wanted = [each for each in tensors if each.requires_grad]
    expected = torch.autograd.grad(
        F.scaled_dot_product_attention(*tensors, enable_gqa=True).sum(), wanted
    )
    found = torch.autograd.grad(call_of(shape, 3)(*tensors).sum(), wanted)
    assert all(map(torch.equal, found, expected))


def test_a_gradient_twice_is_refused_only_where_it_is_differentiated() -> None:
    shape = Shape(2, 4, 4, 12, 12, 8)
    tensors = inputs_of(shape, "heads first", torch.float32)
    out = call_of(shape, 2)(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    expected = F.scaled_dot_product_attention(*tensors)
    plain = torch.autograd.grad(expected.square().sum(), tensors, create_graph=True)
    assert all(map(torch.equal, grads, plain))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grads[0].sum().backward()
    with pytest.raises(RuntimeError, match="not implemented"):
        plain[0].sum().backward()


def test_a_saved_tensor_that_was_changed_is_noticed() -> None:
    shape = Shape(2, 4, 4, 12, 12, 8)
    tensors = inputs_of(shape, "heads first", torch.float32)
    out = call_of(shape, 2)(*tensors)
    out.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_kernel_that_fails_leaves_nothing_behind() -> None:
    class Failing(FlashKernel):
        def backward(self, *arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            super().backward(*arguments)

    calls: list[int] = []
    shape = Shape(2, 4, 4, 12, 12, 8)
    tensors = inputs_of(shape, "heads first", torch.float32)
    call = call_of(shape, 4)._replace(kernel=Failing(None))
    loss = call(*tensors).sum()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward(retain_graph=True)
    assert all(each.grad is None for each in tensors)
    loss.backward()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*tensors).sum(), tensors)
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected, strict=True))  # type: ignore[arg-type]


# ---- memory ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hungry(FlashKernel):
    """Allocates so many bytes inside of backward for each pair of a sample and a head."""

    inside_bytes: int = 0

    def backward(self, call: AttentionCall, *others: Any) -> None:
        num_pairs = call.query.shape[0] * call.query.shape[1]
        inside = torch.empty(num_pairs * self.inside_bytes, dtype=torch.uint8)
        super().backward(call, *others)
        del inside


@pytest.mark.parametrize("shape", [Shape(1, 8, 4, 256, 256, 64), Shape(8, 2, 2, 256, 256, 64)])
def test_the_peak_falls_by_what_a_kernel_allocates_for_the_others(shape: Shape) -> None:
    """By the allocator's own events."""
    tensors = inputs_of(shape, "tokens first", torch.float32)
    inside_bytes = 2**22
    num_pairs = shape.samples * shape.heads
    result_bytes = sum(each.nbytes for each in tensors)

    def peak_of(setting: int) -> int:
        call = call_of(shape, setting)._replace(kernel=Hungry(None, inside_bytes=inside_bytes))
        out = call(*tensors)
        grad = torch.ones_like(out)
        with AllocationLedger() as ledger:
            grads = torch.autograd.grad(out, tensors, grad)
        del grads
        return ledger.peak_bytes

    num_groups = 4
    whole, divided = peak_of(1), peak_of(num_groups)
    # Of one group at a time: what is inside, and the results before they are copied.
    expected = (num_pairs * inside_bytes + result_bytes) * (num_groups - 1) // num_groups
    assert abs((whole - divided) - expected) <= 2**18


# ---- dropout --------------------------------------------------------------------------------


class Philox:
    """A generator that numbers what it gives, as CUDA's does: a seed and an offset."""

    offset = 40


@dataclasses.dataclass(frozen=True)
class Dropping(FlashKernel):
    """Draws masks as FlashAttention-2 does: at the offset plus 32 times the pair's number."""

    def forward(self, call: AttentionCall) -> tuple[Tensor, ...]:
        q, k, v = call[:3]
        state = torch.tensor([7, Philox.offset]).to(torch.uint64)
        num_pairs = q.shape[0] * q.shape[1]
        Philox.offset += 32 * num_pairs
        out = self._scores(q, k, state) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return out, torch.zeros(q.shape[:3]), state, torch.zeros(()).to(torch.uint64)

    def _backward_of(self, call: AttentionCall, given: Any, state: Any, into: Any) -> None:
        with torch.enable_grad():
            tensors = [each.detach().requires_grad_() for each in call[:3]]
            v = tensors[2].repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
            out = self._scores(*tensors[:2], state[0]) @ v
        grads = torch.autograd.grad(out, tensors, given[0])
        for whole, part in zip(into, grads, strict=True):
            whole.copy_(part)

    def _scores(self, q: Tensor, k: Tensor, state: Tensor) -> Tensor:
        seed, offset = state.tolist()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        masks = []
        for number in range(q.shape[0] * q.shape[1]):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + offset + 32 * number)
            masks.append(torch.rand(scores.shape[-2:], generator=generator) > 0.3)
        return scores * torch.stack(masks).view_as(scores)


@dataclasses.dataclass(frozen=True)
class DroppingByHead(Dropping):
    """Runs the query heads of a key-value head one after the other."""

    def _is_filled_by(self, call: AttentionCall) -> bool:
        return True


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("setting", [2, 3, 4, 8, 12])
@pytest.mark.sampled(every=7)
def test_dropout_draws_the_masks_of_one_kernel(setting: int, by_head: bool, kv_heads: int) -> None:
    shape = Shape(3, 4, kv_heads, 6, 6, 8)
    kernel = (DroppingByHead if by_head else Dropping)(KernelSettings())
    tensors = inputs_of(shape, "heads first", torch.float64)
    found = []
    for groups in (1, setting):
        Philox.offset = 40
        call = call_of(shape, groups, dropout_p=0.3)._replace(kernel=kernel)
        assert (call.plan.num_groups == 1) == (groups == 1)
        out = call(*tensors)
        found.append(
            [out, *torch.autograd.grad(out.sin().sum(), tensors), torch.tensor(Philox.offset)]
        )
    assert all(torch.allclose(left, right, rtol=1e-12) for left, right in zip(*found, strict=True))
    plain = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    assert not torch.equal(found[0][0], plain)


# ---- grouped heads --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expanding(FlashKernel):
    """Computes dk and dv for each query head in 16 bits and sums them, as ``mha_bwd`` does."""

    by_head: bool = False

    def _is_filled_by(self, call: AttentionCall) -> bool:
        return self.by_head

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return FlashKernel(None).forward(*arguments)

    def _backward_of(self, call: AttentionCall, given: Any, state: Any, into: Any) -> None:
        num_heads = call.key.shape[1]
        ratio = call.query.shape[1] // num_heads
        expanded = [each.repeat_interleave(ratio, 1) for each in (call.key, call.value)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, *of_heads = backward(given[0], call.query, *expanded, *given[1:], 0.0, False)
        into[0].copy_(dq)
        for whole, each in zip(into[1:], of_heads, strict=True):
            by_token = each.transpose(1, 2).contiguous().unflatten(2, (num_heads, ratio))
            whole.copy_(by_token.sum(3).transpose(1, 2))


@pytest.mark.parametrize("shape", [Shape(1, 8, 2, 40, 40, 16), Shape(2, 6, 1, 33, 33, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_query_heads_one_by_one_have_the_bits_of_all_at_once(
    shape: Shape, dtype: torch.dtype
) -> None:
    tensors = inputs_of(shape, "tokens first", dtype)
    found = []
    for kernel, setting in (
        (Expanding(None), 1),
        (Expanding(None), 4),
        (Expanding(None, by_head=True), 4),
    ):
        call = call_of(shape, setting)._replace(kernel=kernel)
        out = call(*tensors)
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
        found.append([out, *grads])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
    truth = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    plain = torch.autograd.grad(truth, tensors, torch.ones_like(truth))
    bound = 3e-2 if dtype is torch.bfloat16 else 1e-5
    assert all(
        torch.allclose(x, y, atol=bound, rtol=bound)
        for x, y in zip(found[0][1:], plain, strict=True)
    )
