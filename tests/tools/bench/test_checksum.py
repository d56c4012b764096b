"""Digests of gradients: equal exactly when all bits are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_pyao.tools.bench import checksum
from hf_pyao.tools.bench.checksum import GradientDigest, GradientSink


def _digest(*gradients: torch.Tensor) -> str:
    digest = GradientDigest()
    for index, gradient in enumerate(gradients):
        digest.add(f"p{index}", gradient)
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_anywhere_changes_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_CHUNK", 7)
    gradient = torch.randn(5, 6).to(dtype)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    expected = _digest(gradient)
    assert _digest(gradient.clone()) == expected
    for place in range(gradient.numel()):
        other = gradient.clone()
        other.view(-1).view(integer)[place] ^= 1
        assert _digest(other) != expected


def test_places_names_and_shapes_count() -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])
    assert len({_digest(a), _digest(b), _digest(a, b), _digest(b, a)}) == 4


def test_chunks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(100)
    expected = _digest(gradient)
    monkeypatch.setattr(checksum, "_CHUNK", 9)
    assert _digest(gradient) == expected


def test_zeros_of_either_sign_are_one_value() -> None:
    assert _digest(torch.tensor([0.0, 1.0])) == _digest(torch.tensor([-0.0, 1.0]))


def test_strides_do_not_count() -> None:
    gradient = torch.randn(4, 5)
    assert _digest(gradient.t().contiguous().t()) == _digest(gradient)


def test_the_norm_is_over_all_gradients() -> None:
    digest = GradientDigest()
    gradients = [torch.randn(10, dtype=torch.float64) for _ in range(3)]
    for index, gradient in enumerate(gradients):
        digest.add(str(index), gradient)
    assert digest.norm() == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-12)


@pytest.mark.parametrize("release", [False, True])
def test_gradients_are_digested_whether_kept_or_released(release: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = GradientDigest()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected.add(name, parameter.grad)
    model.zero_grad()

    sink = GradientSink(model, release=release)
    sink.digest = GradientDigest()
    model(x).sum().backward()
    assert sink.digest.hexdigest() == expected.hexdigest()
    assert all((p.grad is None) == release for p in model.parameters())
    sink.close()
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_tied_weight_is_complete_once() -> None:
    """A weight used twice is digested after both uses have added their part."""
    weight = nn.Parameter(torch.randn(3, 3))
    model = nn.Module()
    model.weight = weight
    sink = GradientSink(model, release=True)
    sink.digest = GradientDigest()
    x = torch.randn(2, 3)
    ((x @ weight) @ weight).sum().backward()
    copy = weight.detach().clone().requires_grad_()
    ((x @ copy) @ copy).sum().backward()
    expected = GradientDigest()
    assert copy.grad is not None
    expected.add("weight", copy.grad)
    assert sink.digest.hexdigest() == expected.hexdigest()
