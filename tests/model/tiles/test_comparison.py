"""What runs in tiles after one comparison, and what is refused by it, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.errors import ConflictError
from hf_pyao.model.tiles import comparison
from hf_pyao.model.tiles.comparison import Known, agreed, compare_tokens, look_at
from hf_pyao.ranks import ProcessRank
from tests.model.tiles.mlps import GatedMLP

WIDTH = 32


def verdict(module: nn.Module, num_lead: int = 2, function: Any = None) -> Known:
    torch.manual_seed(3)
    hidden = torch.randn(*((2, 24) if num_lead == 2 else (48,)), WIDTH)
    function = function or module.forward
    known = look_at(function, [module], [hidden])
    return known if known.reason else compare_tokens(function, [module], [hidden])


class Everything(nn.Module):
    """Much of what MLPs do, none of it across tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.dropout, self.up = nn.Dropout(0.1), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the same shape."""
        one, two = self.up(self.rms(self.dropout(self.norm(hidden)))).chunk(2, -1)
        packed = torch.cat([one, two], -1)[..., :WIDTH] + F.glu(
            torch.stack([one, two], -1).flatten(-2)
        )
        heads = packed.view(*packed.shape[:-1], 4, WIDTH // 4).transpose(-1, -2).softmax(-1)
        best = heads.flatten(-2).topk(4, dim=-1).values.sum(-1, keepdim=True)
        flat = (packed * best).reshape(-1, WIDTH)
        scale = torch.ones_like(flat) * torch.arange(WIDTH)
        return (flat * scale).view(hidden.shape)


@pytest.mark.parametrize("num_lead", [1, 2])
@pytest.mark.parametrize("module", [GatedMLP(0.1), Everything()], ids=["gated", "everything"])
def test_token_wise(module: nn.Module, num_lead: int) -> None:
    assert verdict(module, num_lead).reason == ""


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(-1, -2)).transpose(-1, -2)


class BatchRouter(nn.Module):
    """Weighs experts by how the whole batch is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        load = self.gate(hidden).softmax(-1).mean(dim=-2, keepdim=True)
        return hidden * load.amax(-1, keepdim=True)


class Attention(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ hidden.transpose(-1, -2)) @ hidden


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden * 2


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.view(4, -1).add_(1)  # type: ignore[operator]
        return hidden + self.mean


class OfTheLength(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / hidden.shape[-2]


class OfThePlace(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.arange(hidden.shape[-2]).unsqueeze(-1)


class InPlace(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(hidden.detach(), inplace=True)


class SharedNoise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rand(WIDTH)


class Scrambled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1).reshape(hidden.shape)


class Several(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class Sign(nn.Module):
    """Asks one question about all tokens, which few exchanges of tokens answer otherwise."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.sum() > 0 else -hidden


class Capacity(nn.Module):
    """Drops what comes after a share of the tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH)
        kept = (rows[:, 0] > 0).cumsum(0) <= rows.shape[0] // 4
        return (rows * kept.unsqueeze(-1)).view(hidden.shape)


MIXES = "other tokens change"
REFUSED = {
    Convolution: MIXES,
    BatchRouter: MIXES,
    Attention: MIXES,
    Capacity: MIXES,
    Sign: MIXES,
    Scrambled: MIXES,
    Counting: "'calls', which is a state",
    Remembering: "'mean', in place, which is a state",
    OfTheLength: "number or the places",
    OfThePlace: "number or the places",
    InPlace: "writes to its input",
    SharedNoise: "random numbers that are not dropout's",
    Several: "returns a tuple",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(every=1)
def test_refused_with_the_reason(kind: type[nn.Module]) -> None:
    found = verdict(kind()).reason
    assert re.search(REFUSED[kind], found), found


@pytest.mark.parametrize("kind", [Sign, BatchRouter])
def test_refused_whatever_the_values(kind: type[nn.Module]) -> None:
    module = kind()
    for seed in range(20):
        torch.manual_seed(seed)
        assert compare_tokens(module.forward, [module], [torch.randn(16, WIDTH)]).reason


def test_batch_normalisation_is_refused() -> None:
    module = nn.BatchNorm1d(WIDTH)
    run: Callable[[Tensor], Tensor] = lambda x: module(x.reshape(-1, WIDTH)).view(x.shape)  # noqa: E731
    mean = module.running_mean.clone()
    assert verdict(module, function=run).reason
    assert torch.equal(module.running_mean, mean)


def test_a_comparison_leaves_everything_as_it_was() -> None:
    module, remembering = Counting(), Remembering()
    before = dict(vars(module))
    torch.manual_seed(3)
    hidden = torch.randn(48, WIDTH)
    given, state = hidden.clone(), torch.get_rng_state()
    for each in (module, remembering, SharedNoise(), InPlace()):
        assert compare_tokens(each.forward, [each], [hidden]).reason
    assert vars(module) == before
    assert torch.equal(remembering.mean, torch.zeros(WIDTH))
    assert torch.equal(hidden, given)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_is_off_and_noted(dropout: float) -> None:
    module = GatedMLP(dropout).train()
    found = verdict(module)
    assert (found.reason, found.draws) == ("", dropout > 0)
    found = verdict(module.eval())
    assert (found.reason, found.draws) == ("", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_no_more_tokens_than_a_tile_has(dtype: torch.dtype) -> None:
    module, seen = GatedMLP().to(dtype), []
    module.up.register_forward_hook(lambda _m, _a, out: seen.append(out.shape[:-1].numel()))
    hidden = torch.randn(3, 3000, WIDTH).to(dtype)
    for tile_tokens, most in ((1024, 1024), (8000, 4096), (5, 64)):
        seen.clear()
        assert compare_tokens(module.forward, [module], [hidden], tile_tokens).reason == ""
        assert seen == [most, most, most, most // 4]


def test_ranks_give_one_answer() -> None:
    store, two = dist.HashStore(), ProcessRank(1, 2)
    with (
        mock.patch.object(comparison, "process_rank", return_value=two),
        mock.patch.object(dist, "get_backend", return_value="gloo"),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
    ):
        mixing = "they meet"
        assert agreed("a norm", "norm", "") == agreed("a norm", "norm", "") == ""
        assert agreed("experts", "mlp", mixing) == mixing
        assert agreed("experts", "mlp", "") == mixing
        assert agreed("gated", "mlp", "") == ""
        with pytest.raises(ConflictError, match="another rank, and not on this one: they meet"):
            agreed("gated", "mlp", mixing)


def test_under_autocast_casts_are_not_kept() -> None:
    module, hidden = GatedMLP(), torch.randn(8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert compare_tokens(module.forward, [module], [hidden]).reason == ""
        assert module(hidden).requires_grad
        module(hidden).sum().backward()
    assert module.up.weight.grad is not None
