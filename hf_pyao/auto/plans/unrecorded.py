"""What policy ``auto`` does if the step cannot be recorded: it keeps what fits.

Without a recorded step nothing can be predicted, so plans cannot be compared by their time. But the
measured micro-batches give a bound on the peak of keeping everything, or a part of what was moved.
Keeping more never takes longer. So tensors are kept from the last layer backwards, as far as the
bound is within the limit: backward asks for those first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING, PlanFacts
from hf_pyao.plan.documents.profile import Profile, ProfiledSlot
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.options.auto_plan import SOURCE
from hf_pyao.training_engines import ZERO_3, local_part, whole_shape

LOGITS_COPIES = 4
"""Tensors of the size of float32 logits that head and loss hold at once: logits, their float32
copy, its softmax and its gradient."""


def kept_peak_bytes(
    profile: Profile, parameters: Iterable[nn.Parameter], num_elements: int
) -> int | None:
    """Return a bound above the peak of keeping everything; None if none is known.

    On an accelerator: the measured peak, and all that autograd would hold for the layers besides.
    On a CPU, where nothing is counted: parameters, whole and sharded, their gradients, what
    autograd would hold for the layers, and logits for each element of the batch, as wide as the
    widest parameter.

    Args:
        profile: of the measured micro-batches.
        parameters: of the model.
        num_elements: of the largest tensor of their batch.
    """
    if not profile.metrics:
        return None
    # Metrics are means: of batches that differ, the slots have the largest.
    saved_bytes = max(
        int(profile.metrics.get("would_hold_bytes", 0)),
        sum(slot.nbytes * slot.num_layers for slot in profile.slots),
    )
    if profile.peak_allocated_bytes is not None:
        return profile.peak_allocated_bytes + saved_bytes
    if profile.device != "CPU":
        return None
    nbytes, widest = saved_bytes, 0
    for each in parameters:
        shape = whole_shape(each) or each.shape  # at most all of them are gathered
        own_bytes = shape.numel() * each.element_size()
        nbytes += own_bytes * (2 if each.requires_grad else 1)
        if ZERO_3.has(each):
            nbytes += local_part(each).nbytes
        widest = max(widest, *shape, 0)
    return nbytes + LOGITS_COPIES * 4 * widest * num_elements


def plan_that_fits(
    limit: DeviceLimit,
    kept_bytes: int | None,
    profile: Profile,
    keep_last_layers: int,
    identity: Mapping[str, Any],
    facts: PlanFacts,
) -> Plan | None:
    """Return the plan that keeps everything, or as much as fits; None if nothing may be kept.

    Args:
        limit: of the device.
        kept_bytes: the bound on the peak of keeping everything.
        profile: of the measured micro-batches, in which everything was offloaded.
        keep_last_layers: layers whose tensors were not.
        identity: what tells the model.
        facts: of the run that the plan is for.
    """
    if kept_bytes is None:
        return None
    facts = dataclasses.replace(
        facts,
        kept_bound_bytes=kept_bytes,
        limit_bytes=limit.nbytes,
        device_limit_bytes=limit.nbytes,
    )
    if kept_bytes <= limit.nbytes:
        return Plan(
            source=f"{SOURCE}: {KEEP_EVERYTHING}",
            model=dict(identity),
            slots=[],
            otherwise=KEEP,
            facts=dataclasses.replace(facts, needed_bytes=kept_bytes),
        )
    least_bytes = profile.peak_allocated_bytes
    if least_bytes is None:  # on a CPU, where what was moved is still there
        least_bytes = kept_bytes - int(profile.metrics.get("offloaded_bytes", 0))
    kept, more_bytes = _last_slots(profile, keep_last_layers, limit.nbytes - least_bytes)
    if not more_bytes:
        return None
    slots = [
        PlannedSlot(name=slot.name, action=KEEP, layers=layers, nbytes=slot.nbytes)
        for slot, layers in kept
    ]
    return Plan(
        source=SOURCE,
        model=dict(identity),
        slots=slots,
        otherwise=OFFLOAD,
        facts=dataclasses.replace(facts, needed_bytes=least_bytes + more_bytes),
    )


def _last_slots(
    profile: Profile, keep_last_layers: int, room_bytes: int
) -> tuple[list[tuple[ProfiledSlot, list[int]]], int]:
    """Return which measured slots are kept, in which layers, and the bytes that this takes.

    The last layers keep theirs as before. A slot that not all layers have counts as if they had it.
    """
    leaving = sorted(
        (slot for slot in profile.slots if slot.stays is None and slot.nbytes > 0),
        key=lambda slot: slot.nbytes,
        reverse=True,
    )
    num_layers = len(profile.layer_names)
    first_kept = num_layers - keep_last_layers
    found = {slot.name: list(range(first_kept, num_layers)) for slot in leaving}
    more_bytes = 0
    for layer in reversed(range(first_kept)):
        for slot in leaving:
            if more_bytes + slot.nbytes <= room_bytes:
                found[slot.name].append(layer)
                more_bytes += slot.nbytes
    slots = [(slot, sorted(found[slot.name])) for slot in leaving if found[slot.name]]
    return slots, more_bytes


def explain(limit: DeviceLimit, plan: Plan, why_no_program: str) -> str:
    """Return the limit, and why there is no other plan, in words."""
    kept = format_bytes(plan.facts.kept_bound_bytes or 0)
    return f"{limit.how}, {kept} at most are needed; not recorded: {why_no_program.rstrip('.')}"
