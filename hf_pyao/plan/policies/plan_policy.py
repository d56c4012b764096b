"""The policy that decides as a :class:`~hf_pyao.plan.documents.plan.Plan` says."""

from __future__ import annotations

from hf_pyao.engine.codecs import get_codec
from hf_pyao.engine.runtime.policy import (
    Decision,
    Keep,
    LayerRun,
    Offload,
    Policy,
    Recompute,
    Situation,
)
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.plan.documents.plan import KEEP, RECOMPUTE, Plan
from hf_pyao.plan.documents.plan_facts import PlanError

PLANNED = "plan keeps it"
"""Why a slot stays that a plan keeps."""


class PlanPolicy(Policy):
    """Decides as a :class:`Plan` says.

    Args:
        plan: what becomes of each slot.
        min_bytes: slots that are smaller stay, unless they are recomputed.
        name: what reports call it.
    """

    name = "plan"
    is_static = True
    may_recompute = True

    def __init__(self, plan: Plan, min_bytes: int = 0, name: str = name) -> None:
        self.name = name
        self.plan = plan
        self.min_bytes = min_bytes
        self._planned = {
            (slot.name, layer): slot
            for slot in plan.slots
            for layer in (slot.layers if slot.layers is not None else [None])
        }
        codecs = {slot.codec for slot in plan.slots} - {None}
        self.may_lose = any(not get_codec(name).is_lossless for name in codecs if name)
        self._recomputed = frozenset(plan.recomputed_modules)
        self._replayed = self._recomputed | frozenset(plan.replayed_modules)
        recomputed = [slot for slot in plan.slots if slot.action == RECOMPUTE]
        self._recomputes_in_all = bool(plan.recomputed_modules) or any(
            slot.layers is None for slot in recomputed
        )
        self._recomputed_layers = frozenset(
            layer for slot in recomputed for layer in slot.layers or ()
        )

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Return what the plan says of *slot*.

        Raises:
            PlanError: it is larger than the plan was made for.
        """
        name = slot.name
        planned = self._planned.get((name, slot.layer_index)) or self._planned.get((name, None))
        if planned is None:
            simple = self._simple(self.plan.otherwise, slot, None)
            is_recomputed = slot.path in self._recomputed or situation.producer in self._recomputed
            return Recompute(simple) if is_recomputed else simple
        if planned.nbytes is not None and slot.nbytes > planned.nbytes:
            raise PlanError(
                f"slot {name!r} of layer {slot.layer!r} has {slot.nbytes} bytes, and the plan was "
                f"made for {planned.nbytes}: for shorter sequences or a smaller micro-batch. Make "
                "a plan for these shapes.",
                key="plan-other-sizes",
            )
        if planned.action == RECOMPUTE:
            simple = self._simple(planned.otherwise, slot, planned.codec)
            return Recompute(simple)
        return self._simple(planned.action, slot, planned.codec)

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Return the sub-modules whose products may run again; None if nothing is recomputed.

        To trace a layer takes the host longer than to run it: no layer is traced in vain.
        """
        is_traced = self._recomputes_in_all or run.layer_index in self._recomputed_layers
        return self._replayed if is_traced else None

    def runs_again(self, layer_index: int) -> bool:
        """Say whether the layer is among those that the plan checkpoints."""
        number = self.plan.num_checkpointed
        return number is None or layer_index < number

    def _simple(self, action: str, slot: Slot, codec: str | None) -> Keep | Offload:
        if action == KEEP or slot.nbytes < self.min_bytes:
            return Keep(PLANNED)
        return Offload(None if codec is None else get_codec(codec))
