"""What the ranks of one attached model agree on: the plan that all follow, and the largest batch.

How they agree is [Note: One plan on all ranks] in ``plan_rounds``. This is the only place that
holds a plan in between: in the first process one that others are asked about, in another process
one that it said it can follow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.states import Mode, Ready
from hf_pyao.auto.ranks.plan_rounds import Listener, Proposer
from hf_pyao.auto.ranks.rank_exchange import RankExchange, RankNews
from hf_pyao.errors import warn
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)

Sizes = list[list[int]]
"""Shapes of a forward's tensors."""


class Agreement:
    """One process's part in it; with one process, there is nothing to agree on.

    Args:
        larger: a batch is told to the first process if it has so many times more elements than
            those before.
        on_refused: called when the others do not follow a plan that they were asked about.
    """

    def __init__(self, larger: float, on_refused: Callable[[], None]) -> None:
        self._larger = larger
        self._on_refused = on_refused
        self._num_begun = 0
        self._number = 0
        """Of the micro-batch that is about to run, from 1 on."""
        self._proposer: Proposer | None = None
        """Asks other processes; None in these, and where there are none."""
        self._held: on.Event | None = None
        """An answer that leads to another plan, until the others have said that they follow it."""
        self._agreed: Plan | None = None
        """The plan that they have agreed to last."""
        self._listener: Listener | None = None
        """Hears the first process's plans; None in that process."""
        self._proposed: Ready | None = None
        """The plan that was heard and can be followed, until it is decided on."""
        self._batches: RankNews | None = None
        """Where ranks tell each other of batches; None before the first forward, or for one."""
        self._most_told = 0
        """Elements of the largest batch that the others were told of."""

    # ---- micro-batches -------------------------------------------------------------------------

    def is_before_next(self) -> None:
        """Note that the next micro-batch is about to run, and has not begun yet."""
        self._number = self._num_begun + 1

    def begin(self) -> None:
        """Note that a micro-batch begins; the first one of each rank finds the others."""
        self._num_begun += 1
        self._number = self._num_begun
        if self._num_begun == 1 and process_rank().num_ranks > 1:
            self._meet_others()

    def _meet_others(self) -> None:
        exchange = RankExchange("plans")
        if exchange.num_ranks == 1:  # no store to tell each other in: each for itself
            return
        name = f"plan {exchange.number}"
        self._batches = RankNews(f"{name} batches")
        if process_rank().is_first:
            self._proposer = Proposer(name)
        else:
            self._listener = Listener(name)

    def batches_of_others(
        self, num_elements: int, sizes: Callable[[], Sizes]
    ) -> Sequence[tuple[int, Sizes]]:
        """Tell the first process of a batch that is larger than those before, or hear of them.

        Args:
            num_elements: of the batch that is about to run.
            sizes: returns the shapes of its tensors.

        Returns:
            Elements and shapes of batches that other processes have.
        """
        if self._batches is None:
            return ()
        if process_rank().is_first:
            return [json.loads(text) for text in self._batches.news()]
        if num_elements > self._larger * self._most_told:
            self._most_told = num_elements
            self._batches.tell(json.dumps([num_elements, sizes()]))
        return ()

    # ---- the first process ---------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """True while a plan is proposed to other processes, and not decided on."""
        return self._held is not None

    def if_all_follow(self, answer: on.Event) -> on.Event | None:
        """Return *answer*; None where it leads to a plan that others are asked about first."""
        plan = _plan_of(answer)
        if self._proposer is None or plan is None:
            return answer
        self._proposer.propose(json.dumps(plan.to_dict()), self._number)
        self._held = answer
        return None

    def decided(self, mode: Mode) -> on.Event | None:
        """Return the answer that was held, or that its plan is not followed; None: not yet.

        Args:
            mode: the machine's.
        """
        held, proposer = self._held, self._proposer
        if proposer is None:
            return None
        is_over = mode is not (Mode.RECORDING if isinstance(held, on.Planned) else Mode.FOLLOWING)
        if held is not None and is_over:  # out of memory, or another plan was given meanwhile
            self._held = None
            proposer.withdraw("the first process does not follow it any more")
            return None
        why = proposer.decide(self._number)
        if why is None or held is None:
            return None
        self._held = None
        if why:
            _warn_not_adopted(why)
            self._on_refused()  # else its plan would be proposed again at once
            return on.Interrupted(why) if isinstance(held, on.Planned) else None
        self._agreed = _plan_of(held)
        return held

    def tell(self, ready: Ready | None) -> None:
        """Tell other processes of a plan that is followed already, or that there is none."""
        if self._proposer is None or (ready is not None and ready.plan is self._agreed):
            return
        text = "" if ready is None else json.dumps(ready.plan.to_dict())
        self._proposer.propose(text, self._number)

    # ---- another process -----------------------------------------------------------------------

    def hear(self, judge: Callable[[str], tuple[Ready | None, str]]) -> on.Heard | None:
        """Answer a plan that the first process proposes; return it once all are to follow it.

        Args:
            judge: returns a proposed plan as one that may be followed here, or why it cannot be.

        Returns:
            None: there is nothing to follow yet.
        """
        listener = self._listener
        if listener is None:
            return None
        text = listener.hear(self._num_begun)
        if text == "":
            return on.Heard(None)
        if text is not None:
            self._proposed, why = judge(text)
            listener.answer(why)
        why_not = listener.decided(self._num_begun)
        if why_not is None:
            return None
        ready, self._proposed = self._proposed, None
        if why_not or ready is None:
            _warn_not_adopted(why_not)
            return None
        return on.Heard(ready)

    def leave(self) -> None:
        """Follow no plan of the first process's any more. Twice is fine."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.leave()


def _warn_not_adopted(why: str) -> None:
    warn(
        logger,
        "plan-not-adopted",
        "policy 'auto' keeps what it does, instead of the plan that was proposed: %s.",
        why,
    )


def _plan_of(answer: on.Event) -> Plan | None:
    """Return the plan that *answer* leads to; None: it leads to no other."""
    ready: Ready | None = None
    if isinstance(answer, on.Planned):
        ready = answer.ready
    elif isinstance(answer, on.Judged):
        if answer.lost is not None:
            ready = answer.lost.ready
        elif answer.corrected is not None and answer.corrected.is_another:
            ready = answer.corrected.ready
    return None if ready is None else ready.plan
