"""What policy ``auto`` does where the step cannot be recorded: nothing, if everything fits.

Without a recorded step nothing is predicted, so that no plan is chosen among others. What the
measured micro-batches came to still bounds the peak of keeping everything. Where that bound is
within the limit, no other plan is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import KEEP, Plan
from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING, PlanFacts
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.options.auto_plan import SOURCE

LOGITS_COPIES = 4
"""Tensors of the size of float32 logits that head and loss hold at once: logits, their float32
copy, its softmax and its gradient."""


def kept_peak_bytes(
    profile: Profile, parameters: Iterable[nn.Parameter], num_elements: int
) -> int | None:
    """Return a bound above the peak of keeping everything; None if none is known.

    On an accelerator: the measured peak, and all that autograd would hold for the layers besides.
    On a CPU, where nothing is
    counted: parameters, their gradients, what autograd would hold for the layers, and logits for
    each element of the batch, as wide as the widest parameter.

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
        own_bytes = each.numel() * each.element_size()
        nbytes += own_bytes * (2 if each.requires_grad else 1)
        widest = max(widest, *each.shape, 0)
    return nbytes + LOGITS_COPIES * 4 * widest * num_elements


def plan_if_all_fits(
    limit: DeviceLimit,
    kept_bytes: int | None,
    identity: Mapping[str, Any],
    facts: PlanFacts,
) -> Plan | None:
    """Return the plan that keeps everything; None if that may not fit.

    Args:
        limit: of the device.
        kept_bytes: the bound on the peak.
        identity: what tells the model.
        facts: of the run that the plan is for.
    """
    if kept_bytes is None or kept_bytes > limit.nbytes:
        return None
    return Plan(
        source=f"{SOURCE}: {KEEP_EVERYTHING}",
        model=dict(identity),
        slots=[],
        otherwise=KEEP,
        facts=dataclasses.replace(
            facts,
            kept_bound_bytes=kept_bytes,
            needed_bytes=kept_bytes,
            limit_bytes=limit.nbytes,
            device_limit_bytes=limit.nbytes,
        ),
    )


def explain(limit: DeviceLimit, plan: Plan, why_no_program: str) -> str:
    """Return the limit, and why there is no other plan, in words."""
    kept = format_bytes(plan.facts.kept_bound_bytes or 0)
    return f"{limit.how}, {kept} at most are needed; not recorded: {why_no_program.rstrip('.')}"
