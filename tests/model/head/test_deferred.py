"""Logits that are put off behave as the tensor that they stand for."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy

VOCAB, HIDDEN = 11, 6


class LinearCall:
    """A head's call, put off, over one weight."""

    num_vocab = VOCAB
    device = torch.device("cpu")
    requires_grad = True
    loss_taken = False
    is_over = False
    without_gradients = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.dtype = weight.dtype
        self.reasons: list[str] = []
        self.num_losses = 0

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        self.reasons.append(reason)
        return F.linear(hidden, self.weight)

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        self.num_losses += 1
        self.loss_taken = True
        return chunked_linear_cross_entropy(hidden, self.weight, labels, chunk_tokens=4, **options)


def make(dtype: torch.dtype = torch.float64) -> tuple[DeferredLogits, Tensor, LinearCall, Tensor]:
    """Return deferred logits (3, 5, VOCAB), the same as a tensor, the call, the hidden states."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, HIDDEN, generator=generator).to(dtype).requires_grad_()
    call = LinearCall(torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_())
    return DeferredLogits(hidden, call), F.linear(hidden, call.weight), call, hidden


MASK = torch.tensor([[True, False, True, True, False]] * 3)

REMEMBERED: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: x * 0.5,
    "scale from the left": lambda x: 2 * x,
    "torch.mul": lambda x: torch.mul(x, 3.0),
    "divide": lambda x: x / 30.0,
    "torch.div": lambda x: torch.div(x, 4),
    "tanh": torch.tanh,
    "functional tanh": F.tanh,
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to dtype and device": lambda x: x.to(device="cpu", dtype=torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "shift": lambda x: x[..., :-1, :],
    "rows": lambda x: x[:, 1:],
    "one row": lambda x: x[1],
    "ellipsis only": lambda x: x[...],
    "masked": lambda x: x[MASK],
    "masked after a shift": lambda x: x[..., :-1, :][MASK[:, 1:]],
    "cut of the vocabulary": lambda x: x[..., :7],
    "cut from the end": lambda x: x[:, :, :-2],
    "view": lambda x: x.view(-1, x.size(-1)),
    "view by sequence": lambda x: x.view((15, x.shape[-1])),
    "reshape": lambda x: x.reshape(5, 3, -1, x.shape[-1]),
    "torch.reshape": lambda x: torch.reshape(x, (-1, x.shape[-1])),
    "flatten": lambda x: x.flatten(0, 1),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_remembered_steps_compute_nothing_and_mean_the_same(name: str) -> None:
    deferred, tensor, call, _ = make()
    step = REMEMBERED[name]
    result, expected = step(deferred), step(tensor)
    assert isinstance(result, DeferredLogits)
    assert not call.reasons
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert result.ndim == result.dim() == expected.ndim
    assert torch.equal(result.materialize(), expected)
    assert call.reasons == ["materialize"]


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "detach": lambda x: x.detach(),
    "add a tensor": lambda x: x + torch.ones(VOCAB),
    "divide a number": lambda x: 1 / x,
    "multiply a tensor": lambda x: x * torch.full((), 2.0),
    "torch.mul from the left": lambda x: torch.mul(torch.full((), 2.0), x),
    "floor division": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "negate": operator.neg,
    "equal": lambda x: x == 0,
    "matmul": lambda x: x @ torch.ones(VOCAB, 2, dtype=torch.float64),
    "concatenate": lambda x: torch.cat([x, x], dim=1),
    "gather words": lambda x: x[..., 3],
    "steps through words": lambda x: x[..., ::2],
    "list of rows": lambda x: x[[0, 2]],
    "merge all": lambda x: x.flatten(),
    "transpose": lambda x: x.transpose(0, 1),
    "attribute": lambda x: x.mT,
    "copy": lambda x: x.to(torch.float64, copy=True),
    "iterate": lambda x: torch.stack(list(x)),
    "keyword": lambda x: torch.sum(input=x),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_any_other_use_computes_the_logits(name: str) -> None:
    deferred, tensor, call, _ = make()
    use = COMPUTED[name]
    assert torch.equal(use(deferred), use(tensor))
    assert len(call.reasons) == 1
    assert torch.equal(use(deferred), use(tensor))
    assert len(call.reasons) == 1, "computed once"


def test_conversions() -> None:
    hidden, tensor = make()[3].detach(), make()[1].detach()
    call = LinearCall(make()[2].weight.detach())
    assert np.array_equal(np.asarray(DeferredLogits(hidden, call)), tensor.numpy())
    assert torch.equal(copy.copy(DeferredLogits(hidden, call)), tensor)
    assert torch.equal(copy.deepcopy(DeferredLogits(hidden, call)), tensor)
    assert torch.equal(pickle.loads(pickle.dumps(DeferredLogits(hidden, call))), tensor)
    assert float(DeferredLogits(hidden, call)[0, 0, 0]) == float(tensor[0, 0, 0])


def test_assignment_changes_the_logits_for_good() -> None:
    deferred, _, call, _ = make()
    with torch.no_grad():
        deferred[:, :, 2:4] = -1.0
    assert (deferred.view(-1, VOCAB)[:, 2:4] == -1.0).all()
    assert len(call.reasons) == 1


def test_gradients_flow_through_computed_logits_even_if_first_read_without_grad() -> None:
    deferred, tensor, call, hidden = make()
    with torch.no_grad():
        deferred.argmax(-1)
    loss = torch.logsumexp(deferred, dim=-1).sum()
    expected = torch.autograd.grad(torch.logsumexp(tensor, dim=-1).sum(), [hidden, call.weight])
    for got, wanted in zip(torch.autograd.grad(loss, [hidden, call.weight]), expected, strict=True):
        assert torch.equal(got, wanted)


def test_unknown_attribute_is_an_attribute_error() -> None:
    deferred, _, _, _ = make()
    with pytest.raises(AttributeError):
        deferred.no_such_thing  # noqa: B018
    assert not hasattr(deferred, "__cuda_array_interface__")


SHAPE_KEEPING = [
    "scale",
    "divide",
    "tanh",
    "float",
    "contiguous",
    "shift",
    "rows",
    "cut from the end",
]


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(SHAPE_KEEPING), max_size=4),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 100),
)
def test_cross_entropy_after_any_chain(
    names: list[str], reduction: str, smoothing: float, seed: int
) -> None:
    deferred, tensor, call, hidden = make()
    for name in names:
        deferred, tensor = REMEMBERED[name](deferred), REMEMBERED[name](tensor)
    vocab = tensor.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, tensor.shape[:-1], generator=generator)
    labels.view(-1)[:2] = -100
    losses = [
        F.cross_entropy(
            logits.reshape(-1, vocab),
            labels.view(-1),
            reduction=reduction,
            label_smoothing=smoothing,
        )
        for logits in (deferred, tensor)
    ]
    assert call.num_losses == 1
    assert not call.reasons
    got, expected = (torch.autograd.grad(loss, [hidden, call.weight]) for loss in losses)
    # Rounding to float32 in the chain makes the two differ by its rounding at most.
    tolerance = 1e-6 if "float" in names else 1e-12
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"weight": torch.ones(VOCAB, dtype=torch.float64)},
        {"size_average": False},
        {"reduce": True},
    ],
    ids=["per token", "class weights", "size_average", "reduce"],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_cross_entropy_that_is_no_plain_sum_is_computed_from_logits(
    options: dict[str, Any],
) -> None:
    deferred, tensor, call, _ = make()
    labels = torch.arange(15) % VOCAB
    got = F.cross_entropy(deferred.view(-1, VOCAB), labels, **options)
    assert torch.equal(got, F.cross_entropy(tensor.view(-1, VOCAB), labels, **options))
    assert call.num_losses == 0
    assert len(call.reasons) == 1


def test_cross_entropy_with_class_probabilities_or_channels_is_computed_from_logits() -> None:
    deferred, tensor, call, _ = make()
    soft = torch.softmax(torch.randn(15, VOCAB, dtype=torch.float64), -1)
    got = F.cross_entropy(deferred.view(-1, VOCAB), soft)
    assert torch.equal(got, F.cross_entropy(tensor.view(-1, VOCAB), soft))
    channels = torch.zeros(3, VOCAB, dtype=torch.int64)
    got = F.cross_entropy(deferred, channels)
    assert torch.equal(got, F.cross_entropy(tensor, channels))
    assert call.num_losses == 0
