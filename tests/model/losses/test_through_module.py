"""The loss through a head that cannot be taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.errors import ConflictError
from hf_pyao.model.losses.cross_entropy import ModuleChunks
from hf_pyao.model.losses.options import LossOptions
from hf_pyao.model.losses.transforms import Cast, softcap
from tests.model.losses.reference import relative_error


class LowRank(nn.Module):
    """A frozen matrix and a trained low-rank one, as LoRA has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.frozen = normal(31, 12).requires_grad_(False)
        self.down, self.up, self.shift = normal(3, 12), normal(31, 3), normal(31)

    def forward(self, hidden: Tensor) -> Tensor:
        low = F.linear(F.linear(hidden, self.down), self.up, self.shift)
        return F.linear(hidden, self.frozen) + low


def make(dtype: torch.dtype) -> tuple[LowRank, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, 12, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 29, (20,), generator=generator)
    labels[:3] = -100
    return LowRank(dtype), hidden, labels


def loss_of(head: nn.Module, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    given = LossOptions(**options)
    sizes: dict[str, Any] = {"num_vocab": 31, "compute_dtype": hidden.dtype}
    chunks = ModuleChunks(hidden, list(head.parameters()), labels, given, project=head, **sizes)
    return chunks.loss()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("num_vocab", [31, 29])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 99])
@pytest.mark.sampled(every=5)
def test_float64_matches_full_logits(
    chunk_tokens: int, num_vocab: int, cap: float | None, smoothing: float, reduction: str
) -> None:
    head, hidden, labels = make(torch.float64)
    inputs = [hidden, *head.parameters()]
    loss = loss_of(
        head,
        hidden,
        labels,
        num_valid_vocab=num_vocab,
        chunk_tokens=chunk_tokens,
        reduction=reduction,
        label_smoothing=smoothing,
        transforms=() if cap is None else softcap(cap),
    )
    logits = head(hidden)[:, :num_vocab]
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    expected = F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    assert relative_error(loss, expected) <= 1e-12
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    got = torch.autograd.grad(loss * 3, wanted)
    for mine, theirs in zip(got, torch.autograd.grad(expected * 3, wanted), strict=True):
        assert relative_error(mine, theirs) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    head, hidden, labels = make(dtype)
    wanted = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    loss = loss_of(head, hidden, labels, chunk_tokens=4, transforms=(Cast(torch.float32),))
    expected = F.cross_entropy(head(hidden).float(), labels)
    assert loss.dtype == expected.dtype
    tolerance = 8 * torch.finfo(dtype).eps
    assert relative_error(loss, expected) <= tolerance
    got = torch.autograd.grad(loss * 1024, wanted)
    for mine, theirs in zip(got, torch.autograd.grad(expected * 1024, wanted), strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) <= tolerance


def test_edges() -> None:
    head, hidden, labels = make(torch.float64)

    nothing = loss_of(head, hidden, torch.full_like(labels, -100), chunk_tokens=4)
    assert nothing.isnan()
    assert not torch.autograd.grad(nothing, hidden)[0].any()
    empty = loss_of(head, hidden[:0], labels[:0], chunk_tokens=4)
    assert empty.isnan()
    assert not torch.autograd.grad(empty, head.up)[0].any()
    loss = loss_of(head, hidden, labels, chunk_tokens=4)
    first = torch.autograd.grad(loss, head.up, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss, head.up)[0], first)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, head.up)
    with pytest.raises(ConflictError, match="head_loss='off'"):
        torch.autograd.grad(
            loss_of(head, hidden, labels, chunk_tokens=4), head.up, create_graph=True
        )
