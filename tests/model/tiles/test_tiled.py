"""An MLP in tiles against the same one whole: outputs, gradients, and what torch may do around it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.errors import ConflictError
from hf_pyao.model.tiles.sliced import run_in_slices
from tests.model.tiles.mlps import HIDDEN, GatedMLP, gradients, median, plan_of, relative, tiled


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return hidden states that want a gradient, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*shape, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.randn(*shape, HIDDEN, generator=generator).to(dtype)


def seeded(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> GatedMLP:
    """Return the same MLP every time."""
    torch.manual_seed(0)
    return GatedMLP(dropout).to(dtype)


def has_independent_rows(dtype: torch.dtype) -> bool:
    """Whether a product of some rows has the bits that it has among more rows, on this machine."""
    torch.manual_seed(0)
    rows, weight = torch.randn(96, HIDDEN).to(dtype), torch.randn(80, HIDDEN).to(dtype)
    return all(torch.equal((rows @ weight.t())[:n], rows[:n] @ weight.t()) for n in (12, 16, 48))


@pytest.mark.parametrize("shape", [(2, 48), (96,), (1, 3, 32)])
@pytest.mark.parametrize("tiles", [2, 7, 8])
def test_output_and_gradients(shape: tuple[int, ...], tiles: int) -> None:
    module, (hidden, grad) = seeded(), inputs_of(shape)
    expected = gradients(module, module, hidden, grad)
    found = gradients(tiled(module, tiles), module, hidden, grad)
    assert expected[1] is not None and found[1] is not None
    if has_independent_rows(torch.float32):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert relative(found[0], expected[0]) < 1e-6
    assert relative(found[1], expected[1]) < 1e-6
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) <= 1e-6, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_farther_from_the_truth(dtype: torch.dtype) -> None:
    ratios: dict[str, list[float]] = {}
    for seed in range(5):
        torch.manual_seed(seed)
        narrow = GatedMLP().to(dtype)
        hidden, grad = torch.randn(2, 256, HIDDEN).to(dtype), torch.randn(2, 256, HIDDEN).to(dtype)
        hidden.requires_grad_()
        wide = copy.deepcopy(narrow).double()
        truth = gradients(wide, wide, hidden.detach().double().requires_grad_(), grad.double())
        whole = gradients(narrow, narrow, hidden, grad)
        parts = gradients(tiled(narrow, 16), narrow, hidden, grad)
        assert truth[1] is not None and whole[1] is not None and parts[1] is not None
        of_each = {"input": (truth[1], whole[1], parts[1])}
        of_each |= {name: (truth[2][name], whole[2][name], parts[2][name]) for name in truth[2]}
        for name, (true, own, ours) in of_each.items():
            ratios.setdefault(name, []).append(relative(ours, true) / relative(own, true))
    assert {name: median(values) for name, values in ratios.items() if median(values) > 1.1} == {}


def test_what_is_saved_is_the_input_alone() -> None:
    module, (hidden, _) = seeded(), inputs_of((2, 48))
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        output = tiled(module, 4)(hidden)
    assert [tensor.data_ptr() for tensor in packed] == [hidden.data_ptr()]
    assert output.grad_fn is not None


def test_hooks_on_saved_tensors_get_nothing_of_what_tiles_save_in_backward() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    output = tiled(module, 4)(hidden)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        output.backward(grad)
    assert packed == []


def test_dropout_is_drawn_again_as_it_was() -> None:
    module, (hidden, grad) = seeded(dropout=0.5), inputs_of((2, 48))
    seen: list[Tensor] = []
    module.dropout.register_forward_hook(lambda _m, _a, out: seen.append(out.detach().clone()))
    torch.manual_seed(5)
    output = tiled(module, 4)(hidden)
    after_forward = torch.get_rng_state()
    torch.rand(3)
    state = torch.get_rng_state()
    output.backward(grad)
    assert torch.equal(torch.get_rng_state(), state), "backward left the random numbers elsewhere"
    assert len(seen) == 8
    for forward, backward in zip(seen[:4], seen[4:], strict=True):
        assert torch.equal(forward, backward)
    assert not torch.equal(after_forward, state)
    masks = [tensor == 0 for tensor in seen[:4]]
    assert not torch.equal(masks[0], masks[1]), "the tiles drew the same mask"


def test_gradients_under_dropout_are_those_of_the_masks_that_were_drawn() -> None:
    module, (hidden, grad) = seeded(dropout=0.5, dtype=torch.float64), inputs_of((96,))
    hidden, grad = hidden.detach().double().requires_grad_(), grad.double()
    masks: list[Tensor] = []
    handle = module.dropout.register_forward_hook(
        lambda _m, args, out: masks.append((out / args[0]).detach())
    )
    torch.manual_seed(5)
    found = gradients(tiled(module, 4), module, hidden, grad)
    handle.remove()
    mask = torch.cat(masks[:4])
    module.dropout.forward = lambda x: x * mask  # type: ignore[method-assign]
    expected = gradients(module, module, hidden, grad)
    assert found[1] is not None and expected[1] is not None
    assert relative(found[1], expected[1]) < 1e-12
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) < 1e-12


@pytest.mark.parametrize("trains", ["weights", "input", "bias", "neither"])
def test_only_what_trains_gets_a_gradient(trains: str) -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    hidden.requires_grad_(trains == "input")
    for name, weight in module.named_parameters():
        weight.requires_grad_(trains == "weights" or (trains == "bias" and name == "up.bias"))
    if trains == "neither":
        output = tiled(module, 4)(hidden.detach())
        assert not output.requires_grad
        return
    expected = gradients(module, module, hidden, grad)
    found = gradients(tiled(module, 4), module, hidden, grad)
    assert (found[1] is None) == (trains != "input")
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) <= 1e-6
    if found[1] is not None and expected[1] is not None:
        assert relative(found[1], expected[1]) <= 1e-6


def test_a_weight_that_is_used_twice_and_one_that_is_not() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    module.gate.weight = module.up.weight
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    expected = gradients(module, module, hidden, grad)
    found = gradients(tiled(module, 4), module, hidden, grad)
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) <= 1e-6


def test_hooks_on_gradients_run_once_and_see_the_whole() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    expected = gradients(module, module, hidden, grad)[2]["up.weight"]
    seen: list[Tensor] = []
    num_accumulated: list[int] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    module.up.weight.register_hook(double)
    module.up.weight.register_post_accumulate_grad_hook(lambda _: num_accumulated.append(1))
    found = gradients(tiled(module, 4), module, hidden, grad)[2]["up.weight"]
    assert len(seen) == len(num_accumulated) == 1
    assert relative(seen[0], expected) <= 1e-6
    assert relative(found, 2 * expected) <= 1e-6


def test_gradients_of_two_backward_passes_are_added() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    expected = gradients(module, module, hidden, grad)[2]
    module.zero_grad()
    output = tiled(module, 4)(hidden)
    output.backward(grad, retain_graph=True)
    output.backward(grad)
    for name, weight in module.named_parameters():
        assert weight.grad is not None
        assert relative(weight.grad, 2 * expected[name]) <= 1e-6
    with pytest.raises(RuntimeError, match="second time"):
        output.backward(grad)


def test_second_derivatives_are_refused() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    with pytest.raises(ConflictError, match="mlp_tiles='off'"):
        torch.autograd.grad(tiled(module, 4)(hidden), hidden, grad, create_graph=True)


def test_a_weight_that_is_written_between_forward_and_backward_is_noticed() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    output = tiled(module, 4)(hidden)
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad)


def test_another_mode_in_backward_is_put_back() -> None:
    module, (hidden, grad) = seeded(dropout=0.5), inputs_of((2, 48))
    run = tiled(module, 4, state=partial(StateOfCall, ModuleState([module], "the MLP")))
    found = []
    for mode in (True, False):
        module.train()
        torch.manual_seed(0)
        output = run(hidden)
        module.train(mode)
        module.up.weight.requires_grad_(mode)
        found.append(torch.autograd.grad(output, [hidden, module.down.weight], grad))
        assert module.training is module.up.weight.requires_grad is mode
        module.up.weight.requires_grad_(True)
    for expected, other in zip(*found, strict=True):
        assert torch.equal(expected, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant: bool) -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    expected = gradients(module, module, hidden, grad)
    run: Any = tiled(module, 4)
    found = gradients(
        lambda x: checkpoint(lambda y: run(y * 1.0), x, use_reentrant=use_reentrant),
        module,
        hidden,
        grad,
    )
    assert found[1] is not None and expected[1] is not None
    assert relative(found[1], expected[1]) <= 1e-6
    for name in expected[2]:
        assert relative(found[2][name], expected[2][name]) <= 1e-6


def test_a_checkpoint_does_not_run_the_tiles_once_more_for_nothing() -> None:
    """Forward, and once in backward; a checkpoint around them runs them no third time."""
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    num_runs: list[int] = []
    module.down.register_forward_hook(lambda *_: num_runs.append(1))
    run: Any = tiled(module, 4)
    output = checkpoint(lambda x: run(x * 1.0) + x, hidden, use_reentrant=False)
    output.backward(grad)
    assert len(num_runs) == 2 * 4


@pytest.mark.parametrize("is_cached", [True, False])
def test_autocast(is_cached: bool) -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))

    def run(function: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        module.zero_grad()
        leaf = hidden.detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached):
            output = function(leaf)
            # A cast that was left in the cache without its graph would lose this gradient.
            output = output + module.up(leaf)[..., :HIDDEN]
        output.backward(grad.to(output.dtype))
        assert leaf.grad is not None
        weights = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return output, leaf.grad, weights

    expected, found = run(module), run(tiled(module, 4))
    assert found[0].dtype == expected[0].dtype == torch.bfloat16
    assert relative(found[0], expected[0]) < 1e-2
    assert relative(found[1], expected[1]) < 1e-2
    assert found[2].keys() == expected[2].keys()
    for name in expected[2]:
        assert found[2][name].dtype == torch.float32
        assert relative(found[2][name], expected[2][name]) < 1e-2, name


def test_input_that_is_not_contiguous_and_gradient_that_is_expanded() -> None:
    module, (hidden, _) = seeded(), inputs_of((48, 2))
    turned = hidden.detach().transpose(0, 1).requires_grad_()
    outputs = [module(turned), tiled(module, 5)(turned)]
    grads = [
        torch.autograd.grad(output.sum(), [turned, *module.parameters()]) for output in outputs
    ]
    for ours, own in zip(grads[1], grads[0], strict=True):
        assert ours.shape == own.shape
        assert relative(ours, own) <= 1e-6


def test_no_tokens_and_fewer_tokens_than_tiles() -> None:
    module = seeded()
    for num_tokens in (0, 1, 3):
        hidden = torch.randn(1, num_tokens, HIDDEN, requires_grad=True)
        output = tiled(module, 8)(hidden)
        output.sum().backward()
        assert output.shape == hidden.shape
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape


def test_one_tile_is_the_plain_call() -> None:
    module, (hidden, _) = seeded(), inputs_of((2, 48))
    output = tiled(module, 1)(hidden)
    assert output.grad_fn is not None and "Slices" not in output.grad_fn.name()


def test_several_inputs_and_an_output_that_is_written_to() -> None:
    module, (hidden, grad) = seeded(), inputs_of((2, 48))
    residual = torch.randn(2, 48, HIDDEN, requires_grad=True)
    results = []
    for tiles in (1, 4):
        output = run_in_slices(
            lambda x, r: module(x) * r,
            (hidden, residual),
            lambda: list(module.parameters()),
            plan_of(hidden, tiles),
        )
        output += residual
        results.append(torch.autograd.grad(output, [hidden, residual, *module.parameters()], grad))
    for ours, own in zip(results[1], results[0], strict=True):
        assert relative(ours, own) <= 1e-6
