"""Copies that run as late as they may: only what waits for them finds them done."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.engine.transfer.transport import BlockingTransport, LinkTimes
from tests.auto.zeroth_order.test_step import EPSILON, RATE, Losses
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainMeZO


@dataclass(eq=False)
class LateCopy:
    """A copy that is queued."""

    src: torch.Tensor
    dst: torch.Tensor
    after: Sequence[Any]
    nbytes: int = 0
    queue: object = None
    order: int = 0
    compute: None = None
    is_done: bool = field(default=False)

    def run(self) -> None:
        if not self.is_done:
            self.is_done = True
            for each in self.after:
                each.run()
            self.dst.copy_(self.src)


class LateTransport(BlockingTransport):
    """Copies as someone waits for the copy, or for one behind it, and never before."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0

    def offload(self, src: Any, dst: Any, *, after: Any = (), **_: Any) -> Any:
        return LateCopy(src, dst, tuple(after))

    def reload(
        self,
        src: Any,
        dst: Any,
        *,
        after: Any = (),
        label: object = "",
        times: LinkTimes | None = None,
    ) -> Any:
        return LateCopy(src, dst, tuple(after))

    def wait(self, ticket: Any) -> None:
        self.num_waiting += not ticket.is_done
        ticket.run()

    def retire(self, ticket: Any) -> None:
        ticket.run()

    def is_done(self, ticket: Any) -> bool:
        return bool(ticket.is_done)


def test_uploads_wait_for_the_copies_back() -> None:
    model = tiny_model("llama", dropout=0.1, num_hidden_layers=5)
    ours = copy.deepcopy(model)
    losses, transport = Losses([tiny_batch(0)]), LateTransport()
    plain = PlainMeZO(model, EPSILON, seed=5)
    torch.manual_seed(1)
    expected = [plain.step(losses, RATE) for _ in range(4)]
    torch.manual_seed(1)
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5)
    with ZerothOrder(ours, settings, transport=transport) as made:
        for gradient in expected:
            made.accumulate(ours, lambda model: losses(model)[0])
            assert made.end_step(RATE) == gradient
    assert transport.num_waiting > 0, "nothing had a copy to wait for"
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), name
