"""What changes deferred logits in place, or hangs a hook on them, does so for all their relatives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_pyao.model.head.deferred import DeferredLogits
from tests.model.head.test_deferred import VOCAB, make

LABELS = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2))


def loss_of(logits: Any) -> Tensor:
    labels = LABELS[: logits.shape[0], : logits.shape[1]]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def assert_same(use: Callable[[Any], Tensor], *, computed: bool = True) -> None:
    """Run *use*, logits to loss, on deferred logits and on a tensor; compare loss and gradients."""
    deferred, tensor, call, hidden = make()
    got, expected = use(deferred), use(tensor)
    assert bool(call.reasons) == computed
    mine = torch.autograd.grad(got, [hidden, call.weight])
    theirs = torch.autograd.grad(expected, [hidden, call.weight])
    for one, other in zip([got, *mine], [expected, *theirs], strict=True):
        if computed:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def setitem(x: Any) -> Any:
    x[..., 2] = -1.0
    return x


def assign_data(x: Any) -> Any:
    x.data = torch.ones(x.shape, dtype=torch.float64)
    return x


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    **{
        name: (lambda x, name=name: getattr(operator, name)(x, 2))
        for name in ("iadd", "isub", "imul", "itruediv")
    },
    "mul_": lambda x: x.mul_(0.5),
    "functional": lambda x: F.relu(x, inplace=True),
    "a slice": lambda x: x[:, 1:].mul_(0.5),
    "a slice of a slice": lambda x: x[:, 1:][:, :2].mul_(0.5),
    "a flattened slice": lambda x: x[:2].flatten(0, 1).mul_(0.5),
    "a copy": lambda x: x[..., :-1, :].contiguous().mul_(0.5),
    "a masked copy": lambda x: x[LABELS > 2].mul_(0.5),
    "a scaled copy": lambda x: (x * 2).mul_(0.5),
    "the same dtype": lambda x: x.to(torch.float64).mul_(0.5),
    "contiguous already": lambda x: x.contiguous().mul_(0.5),
    "an element": setitem,
    "the data": lambda x: x.data.mul_(0.5),
    "a row in a loop": lambda x: [x[i].mul_(0.5) for i in range(len(x))],
    "assigned data": assign_data,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_reaches_who_else_holds_the_logits_and_not_copies(name: str) -> None:
    def use(logits: Any) -> Tensor:
        view, scaled, shifted = logits.view(-1, 5, VOCAB), logits * 3, logits[:, :-1].contiguous()
        IN_PLACE[name](logits)
        losses = [loss_of(each) for each in (view, scaled, shifted, logits)]
        return sum((loss * (i + 1) for i, loss in enumerate(losses)), torch.zeros(()))

    assert_same(use)


@pytest.mark.parametrize("name", ["torch.mul", "torch.div", "torch.tanh", "torch.add"])
def test_results_into_a_given_tensor(name: str) -> None:
    function = {"mul": torch.mul, "div": torch.div, "tanh": torch.tanh, "add": torch.add}[name[6:]]
    arguments = [] if name == "torch.tanh" else [2.0]
    deferred, tensor, _, _ = make()
    for logits in (deferred, tensor.detach()):
        with torch.no_grad():
            room = torch.empty(3, 5, VOCAB, dtype=torch.float64)
            assert function(logits, *arguments, out=room) is room
            assert torch.equal(room, function(tensor.detach(), *arguments))
            source = torch.full((3, 5, VOCAB), 3.0, dtype=torch.float64)
            function(source, *arguments, out=logits.detach() if logits is deferred else logits)
            assert torch.equal(logits + 0, function(source, *arguments))


def test_an_augmented_assignment_keeps_the_object() -> None:
    deferred, _, _, _ = make()
    name = deferred
    name *= 2
    assert name is deferred
    assert isinstance(deferred, DeferredLogits)


def test_steps_without_gradients_leave_the_graph() -> None:
    def use(logits: Any) -> Tensor:
        with torch.no_grad():
            scaled = logits * 0.5
        assert not scaled.requires_grad
        return loss_of(logits) + loss_of(scaled)

    assert_same(use)


def test_a_loss_without_gradients_does_not_count() -> None:
    def use(logits: Any) -> Tensor:
        with torch.no_grad():
            loss_of(logits)
        return torch.logsumexp(logits, -1).sum()

    assert_same(use)


# ---- hooks ---------------------------------------------------------------------------------------


def test_hooks_before_the_loss_are_as_on_a_tensor() -> None:
    def use(logits: Any) -> Tensor:
        flat = logits.view(-1, VOCAB)
        logits.register_hook(lambda grad: grad * 0.5)
        kept.append(logits)
        logits.retain_grad()
        return F.cross_entropy(flat, LABELS.view(-1))

    kept: list[Any] = []
    assert_same(use)
    assert torch.equal(kept[0].grad, kept[1].grad)


# ---- random programs -----------------------------------------------------------------------------

LAZY: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: x * 0.5,
    "tanh": torch.tanh,
    "float64": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x.contiguous(),
    "shift": lambda x: x[:, 1:],
    "rows": lambda x: x[:2],
    "cut": lambda x: x[..., :7],
    "view": lambda x: x[...],
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(0.5),
    "imul": lambda x: operator.imul(x, 0.5),
    "zero a word": setitem,
    "slice": lambda x: x[:, :1].add_(1.0),
    "look": lambda x: x.sum(),
}


@pytest.mark.thorough
@settings(max_examples=80, deadline=None)
@given(
    program=st.lists(
        st.tuples(st.sampled_from([*LAZY, *CHANGES]), st.integers(0, 9)), min_size=1, max_size=8
    )
)
def test_random_programs(program: list[tuple[str, int]]) -> None:
    # Each step takes one of the results so far; every result has its part in the loss at the end.
    def use(logits: Any) -> Tensor:
        results = [logits]
        for name, which in program:
            operand = results[which % len(results)]
            if operand.shape[1] < 2:
                continue
            if name in LAZY:
                results.append(LAZY[name](operand))
            else:
                CHANGES[name](operand)
        return sum((loss_of(result) * (i + 1) for i, result in enumerate(results)), torch.zeros(()))

    deferred, tensor, call, hidden = make()
    try:
        expected = torch.autograd.grad(use(tensor), [hidden, call.weight])
    except RuntimeError:  # a result that backward needs was changed in place
        with pytest.raises(RuntimeError):
            torch.autograd.grad(use(deferred), [hidden, call.weight])
        return
    got = torch.autograd.grad(use(deferred), [hidden, call.weight])
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs) or not call.reasons
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
