"""Plans of policy ``auto`` in files: beside the user's run, and in checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.engine.codecs import get_codec
from hf_pyao.errors import PyAOError, warn
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import KEEP, Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.options.plan_levers import levers_of_plan
from hf_pyao.plan.solve.steering import WORTH
from hf_pyao.ranks import process_rank
from hf_pyao.text import echo

logger = logging.getLogger(__name__)

MORE = 1.05
"""By how much more memory there must be than a plan was made for to have it made anew. What is free
differs a little from run to run."""


class PlanFiles:
    """Reads and writes the plans of one attached model.

    Args:
        settings: the file of the plan that is kept, and what a plan may do.
        device: where the model is.
        check_model: refuses a plan that is for another model, by a ``PlanError``.
    """

    def __init__(
        self, settings: AutoSettings, device: torch.device, check_model: Callable[[Plan], None]
    ) -> None:
        self._settings = settings
        self._device = device
        self._check_model = check_model
        # Wherever the script goes meanwhile.
        self.path = None if settings.plan is None else Path(os.path.abspath(settings.plan))
        """Of the plan that is kept; None if none is."""

    def kept(self) -> Plan | None:
        """Return the plan of an earlier run; None if there is none, or none for this device.

        Raises:
            ReportError: the file is no plan.
            PlanError: the plan contradicts itself, is for another model, or loses what may not be
                lost.
        """
        if self.path is None or not self.path.exists():
            return None
        plan = Plan.from_json_file(self.path)
        self._check(plan)
        try:
            levers_of_plan(plan, self._settings.given)
        except PlanError as error:
            warn(
                logger,
                "plan-made-anew",
                "the plan of %s is made anew: %s",
                echo(str(self.path)),
                error,
            )
            return None
        limit = self._settings.device_limit(self._device)
        what = f"the plan of {echo(str(self.path))}"
        return plan if limit is None or self._is_for(limit, plan, what) else None

    def in_checkpoint(self, path: Path) -> Plan | None:
        """Return the plan that was saved with a checkpoint; None if it is none for this run."""
        if not path.is_file():
            return None
        try:
            plan = Plan.from_json_file(path)
            self._check(plan)
            levers_of_plan(plan, self._settings.given)
        except PyAOError as error:
            warn(
                logger,
                "checkpoint-plan-ignored",
                "the plan in the checkpoint is not followed: %s",
                error,
            )
            return None
        limit = self._settings.device_limit(self._device)
        if limit is None:  # nothing is offloaded on a CPU then, whatever the plan was made for
            return None if self._device.type == "cpu" else plan
        return plan if self._is_for(limit, plan, "the plan in the checkpoint") else None

    def keep(self, plan: Plan) -> None:
        """Write the plan where it is to be kept, if it is."""
        if self.path is not None and process_rank().is_first:
            _write(plan, self.path, "the plan is not kept")

    def save(self, plan: Plan, path: Path) -> None:
        """Write the plan to a checkpoint. Failing is told, and no more."""
        _write(plan, path, "the plan is not saved with the checkpoint")

    def _check(self, plan: Plan) -> None:
        self._check_model(plan)
        label = self._settings.label("allow_lossy")
        for slot in plan.slots:
            if slot.codec is None or self._settings.allow_lossy:
                continue
            if not get_codec(slot.codec).is_lossless and slot.codec != self._settings.codec:
                raise PlanError(
                    f"the plan writes slot {echo(slot.name)} in {echo(slot.codec)}, which is "
                    f"lossy, and {label} is not set. Set it, or delete the plan to have it made "
                    "anew.",
                    key="plan-lossy-codec",
                )

    def _is_for(self, limit: DeviceLimit, plan: Plan, what: str) -> bool:
        """Say whether *plan* is for a device with this *limit*: not too large, nor too cautious.

        It is none where it needs more memory than there is, and none where there is more than it
        was made for and another plan may be better.
        """
        facts = plan.facts
        needed = facts.total_bytes
        if needed > limit.nbytes and (facts.limit_bytes or 0) > limit.nbytes:
            warn(
                logger,
                "plan-made-anew",
                "%s is made anew: it needs %s on the device, and there is less now (%s).",
                what,
                format_bytes(needed),
                limit.how,
            )
            return False
        planned_bytes = facts.device_limit_bytes
        if planned_bytes is None:
            return True
        if limit.nbytes > MORE * planned_bytes and _may_be_better(plan, limit.nbytes):
            logger.info(
                "%s is made anew: it is for a device with %s, and there is more now (%s).",
                what,
                format_bytes(planned_bytes),
                limit.how,
            )
            return False
        return True


def _may_be_better(plan: Plan, limit_bytes: int) -> bool:
    """Say whether another plan than *plan* may be better on a device with *limit_bytes*.

    None is where it keeps everything, or takes as long as that though not everything fits.
    """
    facts = plan.facts
    is_kept = plan.otherwise == KEEP and all(slot.action == KEEP for slot in plan.slots)
    if is_kept and not plan.levers.get("checkpoint_every"):
        return False
    kept_bytes, kept_ms = facts.kept_peak_bytes, facts.kept_step_ms
    if kept_bytes is None or kept_ms is None or facts.step_ms is None:  # there is no prediction
        return True
    fits_kept = kept_bytes + (facts.beside_bytes or 0) <= limit_bytes
    return fits_kept or facts.step_ms > WORTH * kept_ms


def _write(plan: Plan, path: Path, failure: str) -> None:
    try:
        plan.to_json_file(path)
    except PyAOError as error:  # no reason to end a training
        warn(logger, "plan-not-written", "%s: %s", failure, error)
