"""Plans for one recorded step, and the plain ways among them.

Plain ways need no search: keep everything, checkpoint, offload the layers' inputs, offload
everything, and do so with as few of the first layers as fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from weakref import WeakValueDictionary

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.paper.pyao_plan import paths_of
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.solve.candidate import (
    CHECKPOINT,
    FIRST_CHECKPOINTED,
    FIRST_OFFLOADED,
    FIRST_RUN_AGAIN,
    KEEP_ALL,
    LAYER_INPUTS,
    OFFLOAD_ALL,
    Candidate,
)
from hf_pyao.plan.solve.chain import IsForced, LayerChain, chains_of
from hf_pyao.plan.solve.coding import IDENTITY, LOSSY, Coding
from hf_pyao.plan.solve.conditions import Conditions, chosen_slots, outcome_of
from hf_pyao.plan.step.planned_step import StepPlanner
from hf_pyao.plan.step.prediction import Coded
from hf_pyao.plan.step.step_program import StepProgram


class Ways:
    """Makes plans for one recorded step.

    Args:
        program: the step, whole, recorded without recomputation.
        times_ms: what each operation takes.
        conditions: link, window, and what else is given.
        host_limit_bytes: most bytes on the host.
        forced: says of a slot, by name, that it is recomputed if it can be; None: of none.
        coding: how slots may be written; None: as they are.
        stepper: carries out plans in the step, as another planner for it does; None: a new one.
    """

    def __init__(
        self,
        program: StepProgram,
        times_ms: Sequence[float],
        conditions: Conditions,
        *,
        host_limit_bytes: float = math.inf,
        forced: IsForced | None = None,
        coding: Coding | None = None,
        stepper: StepPlanner | None = None,
    ) -> None:
        self.program = program
        self.conditions = conditions
        self.host_limit_bytes = host_limit_bytes
        self.stepper = stepper or StepPlanner(
            program, times_ms, conditions.rebuild_factor, conditions.min_bytes
        )
        self._times_ms = times_ms
        self._forced = forced
        self._coding = coding
        self._plain: dict[tuple[str, int], Candidate | None] = {}
        self._alike: WeakValueDictionary[tuple[object, ...], Outcome] = WeakValueDictionary()
        """By what they do: several searches come to plans that do the same."""

    # ---- plain ways ----------------------------------------------------------------------------

    @property
    def kept(self) -> Candidate:
        """The plan that keeps everything."""
        return self.simple([KEEP_ALL])[KEEP_ALL]

    @cached_property
    def simple_names(self) -> tuple[str, ...]:
        """Names of the ways that do the same with all layers."""
        names = [KEEP_ALL]
        if self.conditions.may_recompute and self.stepper.search is not None:
            names.append(CHECKPOINT)
            if self.conditions.may_offload:
                names.append(LAYER_INPUTS)
        if self.conditions.may_offload:
            names.append(OFFLOAD_ALL)
        return tuple(names)

    def simple(self, names: Iterable[str] | None = None) -> dict[str, Candidate]:
        """Return the ways that do the same with all layers, by name; *names*: only these."""
        found = {name: self._way(name, self.num_open_layers) for name in names or self.simple_names}
        return {name: each for name, each in found.items() if each is not None}

    def of_first_layers(self, name: str, num_layers: int) -> Candidate | None:
        """Return the plan that does with the first layers what a simple one does with all.

        None where the conditions do not allow it.

        Args:
            name: :data:`FIRST_CHECKPOINTED`, :data:`FIRST_RUN_AGAIN` or :data:`FIRST_OFFLOADED`.
            num_layers: how many; the others are kept.
        """
        of_all = OFFLOAD_ALL if name == FIRST_OFFLOADED else CHECKPOINT
        if of_all not in self.simple_names:
            return None
        if name == FIRST_RUN_AGAIN and not self.conditions.may_checkpoint:
            return None
        return self._way(name, num_layers)

    def _way(self, name: str, num_layers: int) -> Candidate | None:
        key = (name, num_layers)
        if key not in self._plain:
            self._plain[key] = self._made_way(name, num_layers)
        return self._plain[key]

    def _made_way(self, name: str, num_layers: int) -> Candidate:
        leaves = name in (OFFLOAD_ALL, FIRST_OFFLOADED)
        actions = [KEEP] * len(self.program.slots)
        for layer in range(0 if name == KEEP_ALL else num_layers):
            for number in chosen_slots(self.stepper, layer, self.conditions.min_bytes):
                actions[number] = OFFLOAD if leaves else RECOMPUTE
        if leaves or name == KEEP_ALL:
            return self.candidate(name, actions)
        return self.candidate(
            name,
            actions,
            frozenset({*paths_of(self.program), ""}),
            otherwise=[OFFLOAD if name == LAYER_INPUTS else KEEP] * len(actions),
            num_checkpointed=num_layers if name == FIRST_RUN_AGAIN else 0,
        )

    @property
    def num_open_layers(self) -> int:
        """Layers of which something is decided: all but the last ones that are kept."""
        return self.program.num_layers - self.conditions.keep_last_layers

    def first_layers_fitting(
        self, limit_bytes: float, rivals: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """Return checkpointing and offloading of as few of the first layers as fit.

        Args:
            limit_bytes: the limit.
            rivals: plans that fit. Where more layers than a number have to be offloaded, which
                takes longer already, they are not looked at.
        """
        found = []
        rival_ms = min((each.step_ms for each in rivals), default=math.inf)
        for name, of_all in ((FIRST_CHECKPOINTED, CHECKPOINT), (FIRST_OFFLOADED, OFFLOAD_ALL)):
            whole = self.simple().get(of_all)
            if whole is None or whole.memory.fits(limit_bytes):  # else fewer layers do not either
                found.append(self._fewest(name, limit_bytes, self.num_open_layers - 1, rival_ms))
        if self.conditions.host is not None:
            found.append(self.fewest_run_again(limit_bytes))
        return [each for each in found if each is not None]

    def fewest_run_again(self, limit_bytes: float) -> Candidate | None:
        """Return the plan by which as few of the first layers as fit run again as a whole.

        None where none fits, or where layers may not.
        """
        return self._fewest(FIRST_RUN_AGAIN, limit_bytes, self.num_open_layers)

    def _fewest(
        self, name: str, limit_bytes: float, most: int, rival_ms: float = math.inf
    ) -> Candidate | None:
        """Return what does *name* with as few of the first layers as fit, *most* at most."""
        best: Candidate | None = None
        too_few, enough = 0, most + 1
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            candidate = self.of_first_layers(name, middle)
            if candidate is None:
                break
            if self.fits(candidate, limit_bytes):
                enough, best = middle, candidate
            elif candidate.step_ms > rival_ms:
                break
            else:
                too_few = middle
        return best

    def fits(self, candidate: Candidate, limit_bytes: float) -> bool:
        """Say whether device and host hold a plan."""
        if candidate.host_bytes > self.host_limit_bytes:
            return False
        return candidate.memory.fits(limit_bytes)

    # ---- what a search needs -------------------------------------------------------------------

    @property
    def may_lose(self) -> bool:
        """True if slots may be written in a codec that loses something, besides the given one."""
        coding = self._coding
        return coding is not None and coding.allow_lossy and coding.codec == IDENTITY

    def lossy_codecs(self, leaving: Iterable[int]) -> list[str | None]:
        """Return the codec of each slot, where those of *leaving* lose something if they can."""
        found: list[str | None] = [None] * len(self.program.slots)
        for number in leaving:
            slot = self.program.slots[number]
            if self._coding is not None and self._coding.coded(slot, LOSSY) is not None:
                found[number] = LOSSY
        return found

    @cached_property
    def chains(self) -> list[LayerChain]:
        """The variants of each kind of layer."""
        return chains_of(self.stepper, self.conditions, self._forced)

    # ---- one plan ------------------------------------------------------------------------------

    def candidate(
        self,
        name: str,
        actions: Sequence[str],
        products: Collection[str] = (),
        *,
        otherwise: Sequence[str] | None = None,
        codecs: Sequence[str | None] | None = None,
        conditions: Conditions | None = None,
        num_checkpointed: int = 0,
    ) -> Candidate:
        """Return a plan.

        Args:
            name: of it.
            actions: for each slot, one of ``keep``, ``offload``, ``recompute``.
            products: sub-modules whose matrix products and attention may run again.
            otherwise: for each slot, what becomes of what is stored to rebuild it; None: it leaves,
                if it may.
            codecs: for each slot; None: the configuration's.
            conditions: in place of the planner's.
            num_checkpointed: first layers that run again as a whole.
        """
        conditions = conditions or self.conditions
        num_slots = len(self.program.slots)
        if otherwise is None:
            otherwise = [OFFLOAD if conditions.may_offload else KEEP] * num_slots
        actions, otherwise = tuple(actions), tuple(otherwise)
        codecs = tuple(codecs or [None] * num_slots)
        # Without slots to rebuild, the rest says nothing.
        rebuilt: tuple[object, ...] = ()
        if RECOMPUTE in actions:
            rebuilt = (frozenset(products), otherwise, num_checkpointed)
        key = (actions, codecs, rebuilt, conditions.window_bytes)
        outcome = self._alike.get(key)
        if outcome is None:
            coded = self._coded(actions, codecs)
            step = self.stepper.plan(actions, products, otherwise, coded, num_checkpointed)
            self._alike[key] = outcome = outcome_of(step, conditions)
        return Candidate(
            name=name,
            actions=actions,
            otherwise=otherwise,
            codecs=codecs,
            products=frozenset(products),
            keep_last_layers=conditions.keep_last_layers,
            window_bytes=conditions.window_bytes,
            outcome=outcome,
            num_checkpointed=num_checkpointed,
        )

    def _coded(self, actions: Sequence[str], codecs: Sequence[str | None]) -> dict[int, Coded]:
        """Return the slots that are written smaller, by number."""
        if self._coding is None:
            return {}
        found = {}
        for number, slot in enumerate(self.program.slots):
            coded = self._coding.coded(slot, codecs[number])
            if actions[number] == OFFLOAD and coded is not None:
                found[number] = coded
        return found

    def again(self, candidate: Candidate) -> Candidate:
        """Return *candidate*, of a planner for the same step, with these times and this link."""
        conditions = dataclasses.replace(
            self.conditions,
            keep_last_layers=candidate.keep_last_layers,
            window_bytes=candidate.window_bytes,
        )
        return self.candidate(
            candidate.name,
            candidate.actions,
            candidate.products,
            otherwise=candidate.otherwise,
            codecs=candidate.codecs,
            conditions=conditions,
            num_checkpointed=candidate.num_checkpointed,
        )
