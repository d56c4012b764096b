"""chunked_linear_cross_entropy against full logits: values, gradients, edges, contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.transforms import Cast, Divide, Scale
from tests.model.losses.reference import (
    Result,
    make_case,
    relative_error,
    run_chunked,
    run_own,
    run_truth,
)

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"with_bias": True},
    "scale": {"scale": 0.0625},
    "cap": {"cap": 5.0},
    "scale-cap-bias": {"scale": 0.3, "cap": 3.0, "with_bias": True},
    "padded": {"num_vocab": 50},
}


def assert_close(got: Result, expected: Result, tolerance: float) -> None:
    """Compare loss and every gradient in norm."""
    assert got.loss.dtype == expected.loss.dtype
    assert relative_error(got.loss, expected.loss) <= tolerance
    for mine, theirs in zip(got.grads, expected.grads, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert relative_error(mine, theirs) <= tolerance


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", HEADS)
def test_float64_matches_full_logits(head: str, smoothing: float, reduction: str) -> None:
    case = make_case(**HEADS[head], upcast=False)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    expected = run_own(case, torch.float64, **options)
    for chunk_tokens in (1, 7, 24, 1000):
        got = run_chunked(case, torch.float64, chunk_tokens=chunk_tokens, **options)
        assert_close(got, expected, 1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_float64_model_that_casts_its_logits_to_float32(head: str) -> None:
    # ForCausalLMLoss rounds to float32 in the middle; only the same roundings lead to 1e-12.
    case = make_case(**HEADS[head], upcast=True)
    assert_close(run_chunked(case, torch.float64), run_own(case, torch.float64), 1e-12)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    num_vocab=st.integers(1, 70),
    num_hidden=st.integers(1, 20),
    chunk_tokens=st.integers(1, 50),
    ignored=st.integers(0, 40),
    with_bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    smoothing=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    num_tokens: int, num_vocab: int, num_hidden: int, chunk_tokens: int, ignored: int,
    with_bias: bool, cap: float | None, smoothing: float, seed: int,
) -> None:  # fmt: skip
    case = make_case(
        num_tokens,
        num_vocab,
        num_hidden,
        seed=seed,
        ignored=ignored,
        with_bias=with_bias,
        cap=cap,
        upcast=False,
    )
    options = {"reduction": "sum", "label_smoothing": smoothing}
    got = run_chunked(case, torch.float64, chunk_tokens=chunk_tokens, factor=3.0, **options)
    expected = run_own(case, torch.float64, factor=3.0, **options)
    # A vocabulary of one has gradients of nothing but rounding: compare on the scale of the inputs.
    for mine, theirs in zip((got.loss, *got.grads), (expected.loss, *expected.grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_low_precision_matches_the_own_path_within_its_rounding(
    head: str, dtype: torch.dtype
) -> None:
    case = make_case(**HEADS[head])
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(run_chunked(case, dtype), run_own(case, dtype), tolerance)


def test_half_precision_logits_without_a_cast_give_a_half_precision_loss() -> None:
    case = make_case(upcast=False)
    got, expected = run_chunked(case, torch.bfloat16), run_own(case, torch.bfloat16)
    assert got.loss.dtype == expected.loss.dtype == torch.bfloat16
    assert_close(got, expected, 0.02)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tokens(dtype: torch.dtype, reduction: str) -> None:
    case = make_case(num_tokens=0, ignored=0, with_bias=True)
    got = run_chunked(case, dtype, reduction=reduction)
    expected = run_own(case, dtype, reduction=reduction)
    assert torch.equal(got.loss.isnan(), expected.loss.isnan())
    for mine, theirs in zip(got.grads, expected.grads, strict=True):
        assert torch.equal(mine, theirs)


def test_chunk_of_ignored_tokens_only() -> None:
    case = make_case(num_tokens=21, ignored=7)
    got = run_chunked(case, torch.float64, chunk_tokens=7)
    assert_close(got, run_own(case, torch.float64), 1e-12)
    assert not got.grads[0][:7].any()


def test_ignore_index_that_is_a_token() -> None:
    case = make_case(ignored=0)
    case.labels[::3] = 5
    options = {"ignore_index": 5}
    got = run_chunked(case, torch.float64, **options)
    assert_close(got, run_own(case, torch.float64, **options), 1e-12)


@pytest.mark.parametrize("factor", [2.0**16, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_scaling_and_accumulation_factors(dtype: torch.dtype, factor: float) -> None:
    case = make_case(num_tokens=64)
    truth = run_truth(case, dtype, factor=factor)
    got = run_chunked(case, dtype, factor=factor)
    for mine, theirs in zip(got.grads, truth.grads, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, theirs) <= 8 * torch.finfo(dtype).eps


def test_float16_gradients_below_its_range_survive_until_the_loss_scale() -> None:
    # 4096 labelled tokens over 512 words: probabilities / tokens is 5e-7, a subnormal of float16.
    case = make_case(num_tokens=4096, num_vocab=512, num_hidden=8, spread=0.1, ignored=0)
    truth = run_truth(case, torch.float16, factor=2.0**16)
    got = run_chunked(case, torch.float16, factor=2.0**16, chunk_tokens=256)
    for mine, theirs in zip(got.grads, truth.grads, strict=True):
        assert relative_error(mine, theirs) <= 2e-3


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_as_the_own_path_does(autocast: torch.dtype) -> None:
    case = make_case(with_bias=True, cap=4.0)
    with torch.autocast("cpu", dtype=autocast):
        got, expected = run_chunked(case, torch.float32), run_own(case, torch.float32)
    assert_close(got, expected, 4 * torch.finfo(autocast).eps)
    # The gradients of float32 parameters are float32, and not rounded to the autocast dtype.
    weight_grad = got.grads[1]
    assert weight_grad.dtype == torch.float32
    assert not torch.equal(weight_grad.to(autocast).float(), weight_grad)


def test_leading_dimensions_and_strided_hidden_states() -> None:
    case = make_case(num_tokens=24, upcast=False)
    expected = run_own(case, torch.float64)
    hidden = case.hidden.t().contiguous().t().view(4, 6, 16).detach().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    loss = chunked_linear_cross_entropy(hidden, weight, case.labels.view(4, 6), chunk_tokens=5)
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (4, 6, 16)
    assert relative_error(hidden.grad.view(24, 16), expected.grads[0]) <= 1e-12


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_gradients_only_where_they_are_wanted(frozen: str) -> None:
    case = make_case(with_bias=True, upcast=False)
    expected = run_own(case, torch.float64)
    assert case.bias is not None
    tensors = {"hidden": case.hidden, "weight": case.weight, "bias": case.bias}
    leaves = {k: v.detach().clone().requires_grad_(k != frozen) for k, v in tensors.items()}
    chunked_linear_cross_entropy(
        leaves["hidden"], leaves["weight"], case.labels, leaves["bias"], chunk_tokens=5
    ).backward()
    for (name, leaf), theirs in zip(leaves.items(), expected.grads, strict=True):
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert relative_error(leaf.grad, theirs) <= 1e-12


def test_nothing_to_train_and_no_grad() -> None:
    case = make_case(upcast=False)
    expected = F.cross_entropy(F.linear(case.hidden, case.weight), case.labels)
    loss = chunked_linear_cross_entropy(case.hidden, case.weight, case.labels, chunk_tokens=5)
    assert not loss.requires_grad
    with torch.no_grad():
        weight = case.weight.clone().requires_grad_()
        silent = chunked_linear_cross_entropy(case.hidden, weight, case.labels, chunk_tokens=5)
    assert relative_error(loss, expected) <= 1e-12
    assert torch.equal(silent, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_retained_graph_gives_the_same_gradients_again(dtype: torch.dtype) -> None:
    case = make_case()
    hidden = case.hidden.to(dtype).requires_grad_()
    weight = case.weight.to(dtype).requires_grad_()
    loss = chunked_linear_cross_entropy(hidden, weight, case.labels, chunk_tokens=5)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss * 2, [hidden, weight], retain_graph=True)
    third = torch.autograd.grad(loss, [hidden, weight])
    for kept, copy, doubled, last in zip(first, copies, second, third, strict=True):
        assert torch.equal(kept, copy)
        assert torch.equal(doubled, 2 * copy)
        assert torch.equal(last, copy)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, [hidden, weight])


def test_second_derivatives_are_refused_with_the_remedy() -> None:
    case = make_case()
    weight = case.weight.requires_grad_()
    loss = chunked_linear_cross_entropy(case.hidden, weight, case.labels)
    with pytest.raises(ConflictError, match="head_loss='off'"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_same_bits_every_time_and_no_random_numbers() -> None:
    case = make_case(num_tokens=64, num_vocab=301)
    state = torch.get_rng_state()
    first = run_chunked(case, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    second = run_chunked(case, torch.bfloat16)
    assert torch.equal(first.loss, second.loss)
    for one, other in zip(first.grads, second.grads, strict=True):
        assert torch.equal(one, other)


def test_saved_tensor_hooks_see_nothing() -> None:
    case = make_case()
    weight = case.weight.clone().requires_grad_()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chunked_linear_cross_entropy(case.hidden, weight, case.labels, chunk_tokens=5)
    loss.backward()
    assert not packed


def test_labels_outside_the_vocabulary_raise_as_in_cross_entropy() -> None:
    case = make_case()
    case.labels[-1] = 61
    with pytest.raises(IndexError, match="out of bounds"):
        run_own(case, torch.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        run_chunked(case, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "one per token"),
        ({"reduction": "none"}, "unknown reduction 'none'"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"chunk_tokens": 0}, "1 token at least"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    case = make_case()
    arguments: dict[str, Any] = {
        "hidden": case.hidden.float(),
        "weight": case.weight.float(),
        "labels": case.labels,
    }
    with pytest.raises(ConfigError, match=message):
        chunked_linear_cross_entropy(**{**arguments, **change})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_no_token_counts(
    dtype: torch.dtype, smoothing: float, factor: float, reduction: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(11, 6, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(11, generator=generator).to(dtype).requires_grad_()
    labels = torch.full((9,), -100)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    loss = chunked_linear_cross_entropy(hidden, weight, labels, bias, chunk_tokens=4, **options)
    own = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, **options)
    assert loss.isnan() == own.isnan()
    for grads in (
        torch.autograd.grad(each * factor, [hidden, weight, bias]) for each in (loss, own)
    ):
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("transform", [Scale(200.0), Divide(1 / 200.0)], ids=str)
def test_float16_logits_that_are_scaled_up_keep_finite_gradients(transform: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(9, 6, generator=generator) / 50).half().requires_grad_()
    weight = torch.randn(11, 6, generator=generator).half().requires_grad_()
    labels = torch.arange(9)
    own = F.cross_entropy(transform.forward(F.linear(hidden, weight))[0].float(), labels)
    steps = (transform, Cast(torch.float32))
    loss = chunked_linear_cross_entropy(hidden, weight, labels, transforms=steps)
    got = torch.autograd.grad(loss, [hidden, weight])
    expected = torch.autograd.grad(own, [hidden, weight])
    for mine, wanted in zip(got, expected, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted, rtol=0.01, atol=0.01 * scale)
