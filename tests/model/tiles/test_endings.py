"""The last product of a tile is left out where nobody asks for it, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hf_pyao.model.tiles.comparison import look_at
from tests.model.tiles.mlps import HIDDEN, INNER, GatedMLP, gradients, relative, tiled

NUM_TILES = 4


class Products(TorchDispatchMode):
    """Counts matrix products."""

    only_watches = True

    num_runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_runs += func._overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


class SavesItsInput(torch.autograd.Function):
    """Returns what it gets, and looks at it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


class Ends(GatedMLP):
    """Goes on behind its last linear layer."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, hidden: Tensor) -> Tensor:
        return self.end(super().forward(hidden))


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 48, HIDDEN, requires_grad=True), torch.randn(2, 48, HIDDEN)


def last_of(module: nn.Module) -> int:
    """Return which linear layer may be left out: as for an MLP of a model."""
    known = look_at(module.forward, [module], [inputs()[0]])
    assert not known.reason
    return known.last_linear


def run(module: nn.Module, last: int) -> tuple[tuple[Tensor, Any, Any], int]:
    """Return output and gradients, and the number of products."""
    hidden, grad = inputs()
    torch.manual_seed(2)
    with Products() as products:
        found = gradients(tiled(module, NUM_TILES, last_linear=last), module, hidden, grad)
    return found, products.num_runs


def assert_same_bits(found: tuple[Tensor, Any, Any], expected: tuple[Tensor, Any, Any]) -> None:
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert torch.equal(found[2][name], expected[2][name]), name


@pytest.mark.parametrize(
    ("make", "num_linears"),
    [
        (GatedMLP, 3),
        (lambda: GatedMLP(dropout=0.2), 3),
        (lambda: GPT2MLP(INNER, GPT2Config(n_embd=HIDDEN, resid_pdrop=0.0)).train(), 2),
        (
            lambda: Ends(
                lambda x: torch.native_dropout(x.view(-1, HIDDEN), 0.1, True)[0].view(x.shape)
            ),
            3,
        ),
    ],
    ids=["gated", "dropout inside", "gpt2", "views and dropout"],
)
def test_the_last_product_is_left_out(make: Callable[[], nn.Module], num_linears: int) -> None:
    torch.manual_seed(0)
    module = make()
    assert last_of(module) == num_linears
    found, num_products = run(module, num_linears)
    expected, num_of_all = run(module, 0)
    # Forward, the second run, and two products in backward for each linear layer.
    assert num_of_all == NUM_TILES * 4 * num_linears
    assert num_products == num_of_all - NUM_TILES
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "end",
    [
        torch.tanh,
        lambda x: x * x,
        lambda x: x * (x.detach() > 0),
        lambda x: F.dropout(x, 0.1, True, True),
        lambda x: x + 1,
        lambda x: x if float(x.detach().sum()) < 1e9 else -x,
        SavesItsInput.apply,
    ],
    ids=["tanh", "square", "mask", "dropout in place", "sum", "a question", "a function"],
)
def test_what_is_asked_for_is_there(end: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert last_of(Ends(end)) == 0


def test_an_end_that_is_another_than_that_of_its_kind() -> None:
    torch.manual_seed(0)
    for end in (torch.tanh, SavesItsInput.apply, lambda x: F.dropout(x, 0.1).tanh()):
        module = Ends(end)
        found, num_products = run(module, 3)
        expected, num_of_all = run(module, 0)
        assert_same_bits(found, expected)
        assert num_products == num_of_all + 2, "one slice runs twice"


class Marked(GatedMLP):
    """Does something more to tiles in which there is a large number."""

    def forward(self, hidden: Tensor) -> Tensor:
        is_marked = float(hidden.detach().max()) > 50
        output = super().forward(hidden)
        return torch.tanh(output) if is_marked else output


@pytest.mark.parametrize("token", [0, 30, 47])
def test_an_end_that_is_another_in_some_tile(token: int) -> None:
    """All tiles run again."""
    torch.manual_seed(0)
    module, (hidden, grad), found = Marked(dropout=0.2), inputs(), []
    with torch.no_grad():
        hidden[1, token, 5] = 100
    for last in (3, 0):
        torch.manual_seed(3)
        found.append(gradients(tiled(module, NUM_TILES, last_linear=last), module, hidden, grad))
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("shape", [(96,), (2, 48)])
def test_activations_in_place(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(HIDDEN, INNER), nn.ReLU(inplace=True), nn.Linear(INNER, HIDDEN)
    )
    hidden, grad = (each.detach().reshape(*shape, HIDDEN) for each in inputs())
    hidden.requires_grad_()
    expected = gradients(module, module, hidden, grad)
    found = gradients(tiled(module, NUM_TILES), module, hidden, grad)
    assert relative(found[1], expected[1]) < 1e-6
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) < 1e-6, name
