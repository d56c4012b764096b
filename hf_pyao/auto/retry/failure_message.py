"""Describes a micro-batch that did not fit, and what the user can do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch

from hf_pyao.config import GIB, EffectiveConfig
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.policy import LAST_LAYER, NOT_SELECTED, POLICY_OFF
from hf_pyao.engine.stores import HOST_FULL
from hf_pyao.errors import PyAOError
from hf_pyao.metrics import MicroBatchStats, format_bytes
from hf_pyao.plan.policies.budget import OVER_BUDGET
from hf_pyao.plan.policies.plan_policy import PLANNED
from hf_pyao.text import Labels

_TRIED = re.compile(r"[Tt]ried to allocate ([0-9.]+ ?[KMGTi]*B)")
_OWN_PLACES = tuple(
    f"{os.sep}{package}{os.sep}"
    for package in ("torch", "hf_pyao", "transformers", "accelerate", "trl", "peft", "contextlib")
)
_MARGIN = 0.95
"""Share of what was allocated that is advised as a cap: the rest is fragments, and others'."""


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """What of a configuration may be changed where a micro-batch does not fit."""

    head_loss: str
    """How the loss is computed."""
    labels: Labels = field(default_factory=Labels, compare=False)
    """How messages call the fields."""
    measured_memory: Callable[[], str] = field(default=lambda: "", compare=False)
    """Says what a step was measured to take on the device, beside what was predicted."""

    @classmethod
    def of(cls, config: EffectiveConfig, labels: Labels) -> Remedies:
        """Return those of *config*, whose fields messages call by *labels*."""
        return cls(head_loss=config.head_loss, labels=labels)


@dataclass(frozen=True)
class MemoryFailure:
    """A try of a micro-batch that ended for want of device memory. It holds no tensor."""

    where: str
    """Which layer's forward or backward it ended in; empty outside of the layers."""
    line: str
    """The innermost line of the user's own; empty if there is none."""
    tried: str
    """How much there was no room for; empty if the error does not say."""
    allocated_bytes: int | None
    """Most that was allocated so far; None where the device does not count it."""
    reserved_bytes: int | None
    """Most that the allocator had reserved for it."""
    stats: MicroBatchStats = field(default_factory=MicroBatchStats)
    """What the engine did with the try's saved tensors."""

    @classmethod
    def of(
        cls,
        error: torch.OutOfMemoryError,
        engine: OffloadEngine,
        device: torch.device,
        since: int,
    ) -> MemoryFailure:
        """Gather what is known of *error*, right after it was raised.

        Args:
            error: what ended the try.
            engine: the model's, as the try left it.
            device: what the model is on.
            since: the engine's ``num_forwards`` when the try began.
        """
        stats = MicroBatchStats()
        for each in engine.stats_since(since):
            stats.add(each)
        tried = _TRIED.search(str(error))
        return cls(
            where=engine.failed_in,
            line=_line_of(error.__traceback__),
            tried=tried.group(1) if tried else "",
            allocated_bytes=_peak(device, "max_memory_allocated"),
            reserved_bytes=_peak(device, "max_memory_reserved"),
            stats=stats,
        )

    def describe(self) -> str:
        """Say where it was, and how much was asked for."""
        where = f"in {self.where}" if self.where else "outside of the layers"
        line = f", at {self.line}" if self.line else ""
        tried = f": no room for {self.tried} more" if self.tried else ""
        return f"{where}{line}{tried}"

    def explain(self, remedies: Remedies, reason: str) -> str:
        """Return the message that a run ends with.

        Args:
            remedies: what the user may change.
            reason: why the micro-batch is not run again.
        """
        # Never the words that others look for to try a smaller batch unasked.
        return (
            f"a micro-batch did not fit into device memory {self.describe()}. It is not run again: "
            f"{reason}. {self._figures()} {_sentence(remedies.measured_memory())}"
            f"The biggest lever: {self._lever(remedies)}. {self._cap()}"
        )

    def _figures(self) -> str:
        stats = self.stats
        if self.allocated_bytes is None:
            device = "The device does not count its memory."
        else:
            device = f"The device had {format_bytes(self.allocated_bytes)} allocated at most" + (
                "."
                if self.reserved_bytes is None
                else f", {format_bytes(self.reserved_bytes)} reserved."
            )
        kept = ", ".join(
            f"{format_bytes(nbytes)} {reason}" for reason, nbytes in stats.kept_bytes.items()
        )
        parts = {
            f"{format_bytes(stats.held_bytes)} were kept there{f' ({kept})' if kept else ''}": (
                stats.held_bytes
            ),
            f"{format_bytes(stats.offloaded_bytes)} were offloaded": stats.offloaded_bytes,
            f"{format_bytes(stats.recomputed_bytes)} were to be recomputed": stats.recomputed_bytes,
        }
        found = ", ".join(part for part, nbytes in parts.items() if nbytes)
        if not found:
            return f"{device} The layers had saved nothing yet."
        return (
            f"{device} Of the {format_bytes(stats.would_hold_bytes)} that the layers had saved in "
            f"the last try, {found}."
        )

    def _lever(self, remedies: Remedies) -> str:
        labels = remedies.labels
        smaller = "a smaller micro-batch, with as many more gradient accumulation steps"
        if not self.where and remedies.head_loss == "off":
            return f"{labels['head_loss']}='chunked', which never holds all logits; then {smaller}"
        by_reason = {
            HOST_FULL: f"a larger {labels['host_memory_gib']}",
            LAST_LAYER: f"{labels['keep_last_layers']}=0",
        }
        for reason in (POLICY_OFF, NOT_SELECTED, OVER_BUDGET, PLANNED):
            by_reason[reason] = f"{labels['policy']}='all'"
        kept = dict.fromkeys(by_reason.values(), 0)
        for reason, nbytes in self.stats.kept_bytes.items():
            if reason in by_reason:
                kept[by_reason[reason]] += nbytes
        remedy = max(kept, key=kept.__getitem__)
        if not kept[remedy]:
            return smaller
        return f"{remedy}, for the {format_bytes(kept[remedy])} that were kept; then {smaller}"

    def _cap(self) -> str:
        if self.allocated_bytes is None:
            return "Plan for what the device has by setting device_memory_gib."
        cap_gib = self.allocated_bytes * _MARGIN / GIB
        return f"To plan for less from the start, set device_memory_gib={cap_gib:.3g}."


def explain_uncaught(
    error: BaseException | None, engine: OffloadEngine, device: torch.device, remedies: Remedies
) -> str:
    """Return what to tell of an *error* that ends a run, if it is one for want of device memory.

    Args:
        error: what is being handled where the offloader is detached.
        engine: the model's, as the error left it.
        device: what the model is on.
        remedies: what the user may change.
    """
    if not isinstance(error, torch.OutOfMemoryError) or isinstance(error, PyAOError):
        return ""
    failure = MemoryFailure.of(error, engine, device, since=0)
    return failure.explain(
        remedies,
        "that takes offloader.run_micro_batch(function), or a Trainer with PyAOTrainerMixin",
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}. " if words else ""


def _peak(device: torch.device, function: str) -> int | None:
    if device.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(device), function, None)
    return None if ask is None else int(ask(device))


def _line_of(traceback: TracebackType | None) -> str:
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        is_theirs = any(place in code.co_filename for place in _OWN_PLACES)
        if not is_theirs and os.path.isabs(code.co_filename) and "<" not in code.co_filename:
            found = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno} ({code.co_name})"
        traceback = traceback.tb_next
    return found
