"""Ranks go over to a plan at the same micro-batch, and only if all can; without processes."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch

from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.states import Mode, Ready
from hf_pyao.auto.ranks import agreement, plan_rounds, rank_exchange
from hf_pyao.auto.ranks.agreement import Agreement
from hf_pyao.auto.ranks.plan_rounds import LATE, LEAD, Listener, Proposer
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.ranks import ProcessRank

NUM_RANKS = 3


class Turns:
    """Three ranks in one process, which take turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0
        store = torch.distributed.HashStore()
        store.set_timeout(timedelta(seconds=0.01))
        for module in (rank_exchange, agreement):
            monkeypatch.setattr(module, "process_rank", lambda: ProcessRank(self._now, NUM_RANKS))
        world: Any = torch.distributed.distributed_c10d
        monkeypatch.setattr(world, "_get_default_store", lambda: store)
        monkeypatch.setattr(plan_rounds, "ANSWER_WAIT_S", 0.01)
        monkeypatch.setattr(plan_rounds, "DECISION_WAIT_S", 0.01)

    def at(self, rank: int) -> None:
        """Go on as *rank*."""
        self._now = rank


class Ranks(Turns):
    """Each of them has its side of the rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.first = Proposer("plan 1")
        self.others: dict[int, Listener] = {}
        for rank in range(1, NUM_RANKS):
            self._now = rank
            self.others[rank] = Listener("plan 1")

    def hears(self, rank: int, number: int, why: str = "") -> str | None:
        """Have another rank hear of a plan before micro-batch *number*, and answer *why*."""
        self.at(rank)
        text = self.others[rank].hear(number)
        if text:
            self.others[rank].answer(why)
        return text

    def decides(self, number: int) -> str | None:
        self.at(0)
        return self.first.decide(number)

    def decided(self, rank: int, number: int) -> str | None:
        self.at(rank)
        return self.others[rank].decided(number)

    def proposes(self, text: str, number: int) -> None:
        self.at(0)
        self.first.propose(text, number)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_one_that_cannot_keeps_all_from_it(ranks: Ranks) -> None:
    ranks.proposes("a plan", 5)
    ranks.hears(1, 6)
    ranks.hears(2, 6, "its layers may not run again")
    why = ranks.decides(7)
    assert why is not None and "process 2" in why and "run again" in why
    assert [ranks.decided(rank, 7) for rank in (1, 2)] == [why, why]
    ranks.proposes("another plan", 9)
    assert [ranks.hears(rank, 10) for rank in (1, 2)] == ["another plan"] * 2
    assert ranks.decides(11) == ""


def test_a_plan_that_one_heard_of_too_late_is_proposed_again(ranks: Ranks) -> None:
    ranks.proposes("a plan", 5)
    ranks.hears(1, 6)
    assert ranks.hears(2, 8) is None  # it is ahead of the first process
    assert ranks.decides(7) is None
    assert ranks.decided(1, 7) == f"process 2 does not follow it: {LATE}"
    assert ranks.decided(2, 8) is not None
    assert [ranks.hears(rank, 9) for rank in (1, 2)] == ["a plan", "a plan"]
    assert ranks.decides(7 + 2 * LEAD - 1) is None
    assert ranks.decides(7 + 2 * LEAD) == ""
    assert [ranks.decided(rank, 7 + 2 * LEAD) for rank in (1, 2)] == ["", ""]


def test_that_there_is_no_plan_is_heard_at_once(ranks: Ranks) -> None:
    ranks.proposes("", 5)
    assert ranks.hears(1, 6) == ""
    assert ranks.decides(7) is None
    ranks.proposes("a plan", 8)
    assert ranks.hears(1, 9) == "a plan"


def test_one_that_has_left_keeps_all_from_it(ranks: Ranks) -> None:
    ranks.at(2)
    ranks.others[2].leave()
    ranks.proposes("a plan", 5)
    ranks.hears(1, 6)
    why = ranks.decides(7)
    assert why is not None and "process 2" in why
    assert ranks.decided(1, 7) == why


def test_ranks_that_never_answer_are_not_waited_for_ever(ranks: Ranks) -> None:
    ranks.proposes("a plan", 5)
    number, found = 5, None
    while found is None and number < 1000:
        number += 1
        found = ranks.decides(number)
    assert found == LATE
    assert number < 200


def test_a_plan_that_is_withdrawn_is_followed_by_no_one(ranks: Ranks) -> None:
    ranks.proposes("a plan", 5)
    assert [ranks.hears(rank, 6) for rank in (1, 2)] == ["a plan", "a plan"]
    ranks.at(0)
    ranks.first.withdraw("it has other memory now")
    assert ranks.decides(7) is None
    assert [ranks.decided(rank, 7) for rank in (1, 2)] == ["it has other memory now"] * 2


# ---- what each rank holds until all have agreed ----------------------------------------------------


def ready_of(name: str) -> Ready:
    return Ready(Plan(slots=[], source=name), name)


class Agreeing(Turns):
    """Each of them has its part in an agreement, and begins micro-batches in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.refused: list[int] = []
        self.parts = [Agreement(1.1, lambda: self.refused.append(self._now)) for _ in range(3)]
        self.why_not = ""

    def part(self, rank: int) -> Agreement:
        """Go on as *rank*; return its part."""
        self.at(rank)
        return self.parts[rank]

    def begin(self, mode: Mode = Mode.RECORDING) -> list[on.Event | None]:
        """Begin a micro-batch on each rank, the first one first; return what each is to do."""
        first = self.part(0)
        first.begin()
        found: list[on.Event | None] = [first.decided(mode)]
        for rank in (1, 2):
            other = self.part(rank)
            other.begin()
            found.append(other.hear(self._judge))
        return found

    def _judge(self, text: str) -> tuple[Ready | None, str]:
        plan = Plan.from_dict(json.loads(text))
        why = self.why_not if self._now == 2 else ""
        return (None, why) if why else (ready_of(plan.source), "")


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> Agreeing:
    return Agreeing(monkeypatch)


def names_of(found: list[on.Event | None]) -> list[str | None]:
    return [
        each.ready.plan.source if isinstance(each, on.Planned | on.Heard) and each.ready else None
        for each in found
    ]


def test_all_ranks_are_given_a_plan_at_the_same_micro_batch(agreeing: Agreeing) -> None:
    agreeing.begin()
    answer = on.Planned(ready_of("fast"), None, "")
    assert agreeing.part(0).if_all_follow(answer) is None
    assert agreeing.part(0).is_pending
    for _ in range(LEAD - 1):
        assert agreeing.begin() == [None] * NUM_RANKS
    assert names_of(agreeing.begin()) == ["fast"] * NUM_RANKS
    assert not agreeing.part(0).is_pending
    agreeing.part(0).tell(answer.ready)  # the machine tells of it, which all know
    assert agreeing.begin() == [None] * NUM_RANKS
    assert not agreeing.refused


def test_a_plan_that_one_refuses_is_given_to_none(agreeing: Agreeing) -> None:
    agreeing.begin()
    agreeing.why_not = "its layers may not run again"
    agreeing.part(0).if_all_follow(on.Planned(ready_of("fast"), None, ""))
    agreeing.begin()
    found = agreeing.begin()
    assert isinstance(found[0], on.Interrupted)
    assert found[1:] == [None, None]
    assert agreeing.refused == [0]


def test_a_plan_is_given_up_where_the_first_rank_does_something_else(agreeing: Agreeing) -> None:
    agreeing.begin()
    agreeing.part(0).if_all_follow(on.Planned(ready_of("fast"), None, ""))
    agreeing.begin()
    assert agreeing.begin(Mode.TIGHTENED) == [None] * NUM_RANKS
    assert not agreeing.part(0).is_pending


def test_an_answer_without_another_plan_is_held_by_no_one(agreeing: Agreeing) -> None:
    agreeing.begin()
    answer = on.NotPlanned("nothing fits")
    assert agreeing.part(0).if_all_follow(answer) is answer
    assert not agreeing.part(0).is_pending


def test_the_first_rank_hears_of_batches_that_are_larger(agreeing: Agreeing) -> None:
    agreeing.begin()
    for num_elements in (100, 105, 200):
        assert agreeing.part(2).batches_of_others(num_elements, lambda: [[2, 50]]) == ()
        found = agreeing.part(0).batches_of_others(1, list)
        assert [list(each) for each in found] == (
            [] if num_elements == 105 else [[num_elements, [[2, 50]]]]
        )
