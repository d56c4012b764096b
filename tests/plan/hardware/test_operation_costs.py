"""What operations cost: arithmetic that kernels skip is not counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.plan.hardware.operation_costs import cost_of

SHAPE = (2, 4, 64, 16)


class Costs(TorchDispatchMode):
    """Adds up the arithmetic of attention, forward and backward."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "attention" in func.__name__:
            cost = cost_of(func, args, kwargs, result, [], [])
            assert cost is not None
            self.flops.append(cost.flops)
        return result


def flops_of(kernel: str, num_key_heads: int = SHAPE[1], **options: Any) -> list[float]:
    heads = SHAPE[1], num_key_heads, num_key_heads
    query, key, value = (
        torch.empty(SHAPE[0], n, *SHAPE[2:], device="meta", requires_grad=True) for n in heads
    )
    with Costs() as costs:
        attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        more = (None, True) if kernel == "efficient" else ()
        result: Tensor = attention(query, key, value, *more, **options)[0]
        result.sum().backward()
    return costs.flops


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_causal_attention_computes_half_of_the_scores(kernel: str) -> None:
    full, causal = flops_of(kernel), flops_of(kernel, is_causal=True)
    scores = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] ** 2 * SHAPE[3]  # one product of this size
    assert full == [2 * scores, 5 * scores]  # what is not saved is computed again in backward
    assert causal == [flops / 2 for flops in full]


def test_queries_that_share_keys_compute_as_much() -> None:
    """Formulas of torch refuse them up to 2.11."""
    assert flops_of("flash", num_key_heads=2) == flops_of("flash")


def test_the_place_of_the_argument_does_not_matter() -> None:
    query = torch.empty(SHAPE, device="meta")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    named = cost_of(attention, (query, query, query), {"is_causal": True}, (query,), [], [])
    placed = cost_of(attention, (query, query, query, 0.0, True), {}, (query,), [], [])
    assert named is not None and named == placed
    assert named.flops == 2 * 2 * 4 * 64 * 64 * 16


def test_products_compute_what_torch_counts() -> None:
    left, right = torch.empty(5, 3), torch.empty(3, 7)
    calls: tuple[tuple[Any, tuple[Tensor, ...], dict[str, Tensor]], ...] = (
        (torch.ops.aten.mm.default, (left, right), {}),
        (torch.ops.aten.mm.out, (left, right), {"out": torch.empty(5, 7)}),
        (torch.ops.aten.addmm.default, (torch.empty(7), left, right), {}),
        (torch.ops.aten.bmm.default, (left[None].expand(4, 5, 3), right.expand(4, 3, 7)), {}),
    )
    for func, args, kwargs in calls:
        with FlopCounterMode(display=False) as counter:
            result = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, result, [], tensors_in(result))
        assert cost is not None and cost.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # in elements, counted by hand: a is 6 x 4, b is 4 x 5, row is 4
        ("a + a", 24 + 24),
        ("a + 1", 24 + 24),
        ("a.add_(row)", 24 + 4 + 24),
        ("a.copy_(a2)", 24 + 24),
        ("a.zero_()", 24),
        ("torch.mm(a, b, out=product)", 24 + 20 + 30),
        ("torch.addmm(product, a, b, out=product)", 24 + 20 + 30 + 30),
        ("torch.sum(a, 0, out=row)", 24 + 4),
        ("torch.addcmul(a, a, a2)", 24 + 24 + 24),
    ],
)
def test_traffic_is_what_is_read_once_and_what_is_written(name, expected):
    tensors = {"a": torch.randn(6, 4), "a2": torch.randn(6, 4), "b": torch.randn(4, 5)}
    tensors |= {"row": torch.randn(4), "product": torch.randn(6, 5), "torch": torch}
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
            cost = cost_of(func, args, kwargs, result, inputs, outputs)
            found.append(0 if cost is None else cost.nbytes)
            return result

    with Seen():
        eval(name, tensors)

    assert sum(found) == 4 * expected
