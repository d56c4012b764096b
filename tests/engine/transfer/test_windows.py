"""How much is in flight, and how it is bounded anew while training goes on."""

from __future__ import annotations

from typing import Any

from hf_pyao import attach
from hf_pyao.engine.runtime.observer import Observer
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.simulation.transport import SimulatedTransport


class Ahead(Observer):
    """Notes how many reloads were queued that nothing had asked for yet."""

    def __init__(self) -> None:
        self.asked: set[Any] = set()
        self.most_ahead = 0
        self._reloaded: set[Any] = set()

    def on_unpack(self, slot: Any) -> None:
        self.asked.add(slot)

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        if direction == "reload":
            self._reloaded.add(label)
            self.most_ahead = max(self.most_ahead, len(self._reloaded - self.asked))


def test_nothing_comes_back_before_it_is_asked_for_where_every_copy_is_waited_for() -> None:
    model = tiny_model("llama")
    ahead = {}
    with attach(model, EVERY_LAYER, transport=SimulatedTransport()) as offloader:
        for waits in (False, True):
            if waits:
                offloader.engine.wait_for_every_copy()
            offloader.engine.observe(notes := Ahead())
            model(**tiny_batch(), use_cache=False).loss.backward()
            assert notes.asked
            ahead[waits] = notes.most_ahead
    assert ahead[False] > 1
    assert ahead[True] == 0
