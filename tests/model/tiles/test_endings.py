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

from hf_pyao.model.tiles import Rerun, run_in_slices
from hf_pyao.model.tiles.linears import Ending
from tests.model.tiles.mlps import HIDDEN, INNER, GatedMLP, gradients, plan_of, relative, tiled

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


def run(module: nn.Module, ending: Ending) -> tuple[tuple[Tensor, Any, Any], int]:
    """Return output and gradients, of the second of two steps, and its number of products."""
    hidden, grad = inputs()

    def in_tiles(x: Tensor) -> Tensor:
        plan = plan_of(x, NUM_TILES)
        weights = lambda: list(module.parameters())  # noqa: E731
        return run_in_slices(module.forward, (x,), weights, plan, Rerun(ending=ending))

    torch.manual_seed(2)
    gradients(in_tiles, module, hidden, grad)
    torch.manual_seed(2)
    with Products() as products:
        found = gradients(in_tiles, module, hidden, grad)
    return found, products.num_runs


def whole() -> Ending:
    """Return an ending at which nothing is left out."""
    ending = Ending()
    ending.last = 0
    return ending


def assert_same_bits(found: tuple[Tensor, Any, Any], expected: tuple[Tensor, Any, Any]) -> None:
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert torch.equal(found[2][name], expected[2][name]), name


def gpt2(dropout: float) -> nn.Module:
    return GPT2MLP(INNER, GPT2Config(n_embd=HIDDEN, resid_pdrop=dropout)).train()


@pytest.mark.parametrize(
    ("make", "num_linears"),
    [
        (GatedMLP, 3),
        (lambda: GatedMLP(dropout=0.2), 3),
        (lambda: gpt2(0.0), 2),
        (lambda: gpt2(0.1), 2),
        (lambda: Ends(lambda x: F.dropout(x.view(-1, HIDDEN), 0.1).view(x.shape)), 3),
    ],
    ids=["gated", "dropout inside", "gpt2", "gpt2 with dropout", "views and dropout"],
)
def test_the_last_product_is_left_out(make: Callable[[], nn.Module], num_linears: int) -> None:
    torch.manual_seed(0)
    module, ending = make(), Ending()
    found, num_products = run(module, ending)
    expected, num_of_all = run(module, whole())
    assert ending.last == num_linears
    # Forward, the second run, and two products in backward for each linear layer.
    assert num_of_all == NUM_TILES * 4 * num_linears
    assert num_products == num_of_all - NUM_TILES
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "end",
    [
        torch.tanh,
        lambda x: x * x,
        lambda x: F.dropout(x, 0.1, True, True),
        lambda x: x + 1,
        lambda x: x if float(x.detach().sum()) < 1e9 else -x,
    ],
    ids=["tanh", "square", "dropout in place", "sum", "a question"],
)
def test_what_is_asked_for_is_there(end: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, ending = Ends(end), Ending()
    found, num_products = run(module, ending)
    expected, num_of_all = run(module, whole())
    assert ending.last == 0
    assert num_products == num_of_all
    assert_same_bits(found, expected)


def test_a_function_that_saves_what_it_gets_without_a_word() -> None:
    torch.manual_seed(0)
    module, ending = Ends(SavesItsInput.apply), Ending()
    expected, _ = run(module, whole())
    found, _ = run(module, ending)
    assert ending.last == 0, "seen in backward: another node stands behind the product"
    assert_same_bits(found, expected)


class Marked(GatedMLP):
    """Does something more to tiles in which there is a large number."""

    def forward(self, hidden: Tensor) -> Tensor:
        is_marked = float(hidden.detach().max()) > 50
        output = super().forward(hidden)
        return torch.tanh(output) if is_marked else output


@pytest.mark.parametrize("token", [0, 30, 47])
def test_an_end_that_is_another_in_some_tile(token: int) -> None:
    """It was seen as one that may be left out; then it is asked for: all tiles run again."""
    torch.manual_seed(0)
    module, ending = Marked(dropout=0.2), Ending()
    run(module, ending)
    assert ending.last == 3
    found = []
    for each in (ending, whole()):
        hidden, grad = inputs()
        with torch.no_grad():
            hidden[1, token, 5] = 100
        torch.manual_seed(3)
        output = run_in_slices(
            module.forward,
            (hidden,),
            lambda: list(module.parameters()),
            plan_of(hidden, NUM_TILES),
            Rerun(ending=each),
        )
        found.append(torch.autograd.grad(output, [hidden, *module.parameters()], grad))
    assert ending.last == 0
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


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
