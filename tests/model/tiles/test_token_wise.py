"""What is proven to treat tokens one by one, and what is refused, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.model.tiles.token_wise import reason_not_token_wise
from tests.model.tiles.mlps import GatedMLP

WIDTH = 32


def reason(
    module: nn.Module, num_lead: int = 2, num_inputs: int = 1, function: Any = None
) -> str | None:
    return reason_not_token_wise(
        function or module.forward,
        [module],
        widths=[WIDTH] * num_inputs,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_lead=num_lead,
    )


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
    assert reason(module, num_lead) is None


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(-1, -2)).transpose(-1, -2)


class RowConvolution(nn.Module):
    """A convolution whose tokens are the channels' neighbours, without a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 3, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.conv2d(hidden.unsqueeze(1), self.weight, padding=(1, 0)).squeeze(1)


class BatchRouter(nn.Module):
    """Weighs experts by how the whole batch is routed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        load = self.gate(hidden).softmax(-1).mean(dim=-2, keepdim=True)
        return hidden * load.amax(-1, keepdim=True)


class SparseRouter(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH)
        chosen = rows[:, 0].nonzero().squeeze(-1)
        return torch.zeros_like(rows).index_add(0, chosen, rows[chosen]).view(hidden.shape)


class Cumulative(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(-2)


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


class OfTheValues(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.sum() > 0 else 2 * hidden


class InPlace(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(hidden.detach(), inplace=True)


class SharedNoise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rand(WIDTH)


class Scrambled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1).reshape(hidden.shape)


class Foreign(nn.Module):
    weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * Foreign.weight


class Several(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden


REFUSED = {
    Convolution: "aten.transpose",
    RowConvolution: "aten.convolution|aten.unsqueeze",
    BatchRouter: r"aten.mean works over tokens",
    SparseRouter: "nonzero",
    Cumulative: "aten.cumsum works over tokens",
    Attention: "aten.transpose",
    Counting: "'calls', which is a state",
    Remembering: "aten.add_ writes to a tensor from outside",
    OfTheLength: "number of tokens",
    OfThePlace: "aten.arange makes numbers of where a token is",
    OfTheValues: "without values",
    InPlace: "aten.relu_ writes",
    SharedNoise: "aten.rand draws numbers that all tokens share",
    Scrambled: "aten.transpose moves tokens",
    Foreign: "trained weight of another module",
    Several: "returns a tuple",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(every=1)
def test_refused_with_the_reason(kind: type[nn.Module]) -> None:
    import re

    found = reason(kind())
    assert found is not None
    assert re.search(REFUSED[kind], found), found


def test_batch_normalisation_is_refused() -> None:
    module = nn.BatchNorm1d(WIDTH)
    assert reason(module, function=lambda x: module(x.reshape(-1, WIDTH)).view(x.shape)) is not None


def test_a_proof_leaves_the_module_as_it_was() -> None:
    module = Counting()
    module.eval()
    before = dict(vars(module))
    assert reason(module) is not None
    assert vars(module) == before
    gated = GatedMLP().eval()
    weights = dict(gated.named_parameters())
    assert reason(gated) is None
    assert not gated.training and not gated.down.training
    assert all(weight is dict(gated.named_parameters())[name] for name, weight in weights.items())
