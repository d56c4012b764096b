"""Ranks go over to a plan together: at the same micro-batch, and only if all of them can.

[Note: One plan on all ranks]
The first process makes plans. Before micro-batch *n* it proposes one for micro-batch *n* + 2. Each
other process reads the proposal before its next micro-batch, and answers whether it can follow it.
Before micro-batch *n* + 2 the first process decides: the plan is followed if all have said so. The
others read the decision before the same micro-batch. Until then all keep what they follow.

Where ranks exchange data in each micro-batch, a rank that begins micro-batch *n* + 1 has taken part
in *n*, and so the first process had made its proposal: nobody waits for more than a message. Where
ranks drift apart (micro-batches that exchange nothing, hosts that run ahead of their devices), one
that hears of a proposal too late says so, and the first process proposes it again for a micro-batch
further ahead. Nothing is a collective.
"""

from __future__ import annotations

import json

from hf_pyao.auto.ranks.rank_exchange import RankExchange

LEAD = 2
"""Micro-batches from a proposal to the plan."""

MOST_LEAD = 64
"""Most of them, where others were late."""

LATE = "it heard of the plan too late"
"""The answer that a proposal further ahead may change."""

ANSWER_WAIT_S = 2.0
"""How long the first process waits for answers that should be there."""

DECISION_WAIT_S = 60.0
"""How long others wait for the first process to come to the micro-batch that they are at."""


class _Round:
    """One proposal, its answers, and the decision."""

    def __init__(self, name: str) -> None:
        self.proposal = RankExchange(f"{name} proposed")
        self.answers = RankExchange(f"{name} answered")
        self.decision = RankExchange(f"{name} decided")


class Proposer:
    """The first process's side.

    Args:
        name: the same on all ranks, and used once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lead = LEAD
        self._round: _Round | None = None
        self._text = ""
        self._begins_at = 0

    def propose(self, text: str, number: int) -> None:
        """Propose a plan, before micro-batch *number*; an empty *text* says that there is none.

        The latter needs no answer.
        """
        self.withdraw("another plan was proposed")
        begun = _Round(self._name)
        self._text, self._begins_at = text, number + self._lead
        begun.proposal.tell(json.dumps([self._begins_at, text]))
        begun.answers.tell("")
        self._round = begun if text else None

    def withdraw(self, why: str) -> None:
        """Decide that the proposed plan, if there is one, is not followed."""
        if self._round is not None:
            self._round.decision.tell(why)
            self._round = None

    def decide(self, number: int) -> str | None:
        """Decide, before micro-batch *number*.

        Returns:
            Why the plan is not followed; empty: it is. None: there is nothing to decide yet.
        """
        if self._round is None or number < self._begins_at:
            return None
        answers = self._round.answers.heard(wait_s=ANSWER_WAIT_S)
        refused = {rank: each for rank, each in enumerate(answers or ()) if each}
        why = "" if answers is not None else LATE
        for rank, each in refused.items():
            why = f"process {rank} does not follow it: {each}"
        self._round.decision.tell(why)
        self._round = None
        is_late = answers is None or any(each == LATE for each in refused.values())
        if is_late and self._lead < MOST_LEAD:
            self._lead *= 2
            self.propose(self._text, number)
            return None
        return why


class Listener:
    """Another process's side; *name* as for :class:`Proposer`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._round = _Round(name)
        self._begins_at: int | None = None

    def hear(self, number: int) -> str | None:
        """Return a plan that was proposed, before micro-batch *number*; None: none is new.

        An empty text says that there is none. Any other is to be answered at once.
        """
        if self._begins_at is not None:
            return None
        told = self._round.proposal.heard_from(0)
        if told is None:
            return None
        begins_at, text = json.loads(told)
        if not text:
            self._round = _Round(self._name)
            return ""
        self._begins_at = int(begins_at)
        if number >= self._begins_at:
            self.answer(LATE)
            return None
        return str(text)

    def answer(self, why: str) -> None:
        """Say why the plan cannot be followed here; empty: it can."""
        self._round.answers.tell(why)

    def leave(self) -> None:
        """Follow no plan any more: refuse the one that is proposed now or next."""
        self.answer("it follows no plan any more")

    def decided(self, number: int) -> str | None:
        """Return why the plan is not followed, as :meth:`Proposer.decide`; None: not yet."""
        if self._begins_at is None or number < self._begins_at:
            return None
        decision = self._round.decision.heard_from(0, wait_s=DECISION_WAIT_S)
        self._round, self._begins_at = _Round(self._name), None
        return "the first process did not decide in time" if decision is None else decision
