"""``RunRecord``: what one attachment is and did so far, and what is written when it ends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_pyao.auto.install.layer_bytes import LayerBytesWatch
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.levers import Levers
from hf_pyao.metrics import describe_totals, format_bytes, nothing_moved, select_metrics
from hf_pyao.plan.documents.run import (
    UNKNOWN,
    LayerBytes,
    check_report_path,
    outcome_of,
    write_run_report,
)
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)

LOG_PREFIX = "pyao/"
"""Put before each metric's name in logs and trackers."""


class RunRecord:
    """What an offloader offloads, what it came to, and the report of it.

    It leads neither to the model nor to its offloader, so that it can outlive both for a last word:
    see :meth:`end_unseen`.

    Raises:
        ConfigError: no report can be written to the path that *config* gives.
    """

    def __init__(
        self,
        config: PyAOConfig,
        engine: OffloadEngine,
        transport: Transport,
        device: torch.device,
        *,
        layer_names: tuple[str, ...],
        how_found: str,
        auto_summary: Callable[[], str],
        levers: Callable[[], Levers],
        run_once: Callable[[], str],
    ) -> None:
        check_report_path(config.report, config.label("report"))
        self.config = config
        """What was given."""
        self.engine = engine
        self.transport = transport
        self.device = device
        self.layer_names = layer_names
        self.how_found = how_found
        self._levers_description = ""
        self.auto_summary = auto_summary
        """Says what policy ``auto`` does; empty with others, and before it has decided."""
        self.levers = levers
        """Returns with which levers the model runs now."""
        self.run_once = run_once
        """Says which layers should run again and do not."""
        # Where it was asked for, also if the script goes to another folder.
        self.report_path = None if config.report is None else os.path.abspath(config.report)
        """Path of the report; None: there is no report."""
        self.report_extra: dict[str, Any] = {}
        """Plain values that the report is to hold beside the figures."""
        self._layer_bytes: LayerBytesWatch | None = None
        self._process_id = os.getpid()
        self._is_first_rank = process_rank().is_first

    def describe_further(self, sentence: str) -> None:
        """Add *sentence*, without its full stop, to what :meth:`describe` says; empty for none."""
        if sentence:
            self._levers_description += f" {sentence}."

    def write_to(self, path: str) -> None:
        """Write the report to *path*, and not to the one that was configured."""
        self.report_path = path

    def watch_layers(self, streamed_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Hear what becomes of each layer's saved tensors, if there is a report to write.

        Args:
            streamed_bytes: returns the bytes of weights that are streamed, by layer.
        """
        if self.report_path is not None:
            self._layer_bytes = LayerBytesWatch(self.engine, self.layer_names, streamed_bytes)
            self._layer_bytes.start()

    @property
    def layer_bytes(self) -> list[LayerBytes]:
        """What became of each layer's saved tensors; empty where no report was asked for."""
        return [] if self._layer_bytes is None else self._layer_bytes.layers

    def note_tightened(self, sentence: str) -> None:
        """Add to the report what was done for a micro-batch that did not fit."""
        self.report_extra.setdefault("out_of_memory", []).append(sentence)

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last finished micro-batch; empty before the first.

        Where everything is left to autograd, what moved is 0, and what is held is not known.
        """
        stats = self.engine.figures.last
        if stats is None:
            return {}
        if self.engine.rests:
            return nothing_moved()
        self.engine.figures.settle_times()
        return stats.as_dict()

    def totals(self) -> dict[str, float]:
        """Return sums (sizes held at once: peaks) over all micro-batches since attaching."""
        self.engine.figures.settle_times()
        return self.engine.figures.totals.as_dict()

    def logged_metrics(self) -> dict[str, float]:
        """Return what of :meth:`metrics` goes to the logs, as the configuration says."""
        which = self.config.log_metrics
        if which == "off":
            return {}
        return select_metrics(self.metrics(), which, has_device=self._has_device)

    @property
    def segments(self) -> str:
        """Say what is saved of layers that run again in backward; empty if none do."""
        levers = self.levers()
        length = levers.checkpoint_every
        if not length:
            return ""
        saved = (
            "of each layer the input is saved"
            if length == 1
            else f"of every {length} layers one input is saved"
        )
        attention = " and what attention returns" if levers.save_attention else ""
        again = "again, one layer at a time" if levers.checkpoint_nested else "again"
        return f"{saved}{attention}, the rest is computed {again}{self.run_once()}"

    @property
    def _has_device(self) -> bool:
        return self.device.type != "cpu"

    @property
    def keeps_all_layers(self) -> bool:
        """True if ``keep_last_layers`` leaves no layer to offload.

        A layer that runs several times in a forward is kept the last time only, so that the earlier
        ones are offloaded all the same.
        """
        return self.config.effective().keep_last_layers >= len(self.layer_names)

    def describe(self) -> str:
        """Say in one line what is offloaded, how, and within which limits."""
        config = self.config.effective()
        head = self._levers_description
        if self.engine.policy.name == "off":
            what = f"; {self.segments}" if self.segments else ""
            return f"hf_pyao offloads nothing (policy 'off'){what}.{head}"
        if summary := self.auto_summary():
            what = f"; {self.segments}" if self.segments else ""
            layers = f"{len(self.layer_names)} layers ({self._layers()})"
            return f"hf_pyao, {layers}: {summary}{what}.{head}"
        if self.keeps_all_layers:
            return (
                f"hf_pyao offloads nothing, unless a layer runs several times in a forward: "
                f"keep_last_layers={config.keep_last_layers} keeps what all "
                f"{len(self.layer_names)} layers save ({self._layers()}).{head}"
            )
        return (
            f"hf_pyao offloads saved tensors of {len(self.layer_names)} layers "
            f"({self._layers()}): {self._what()}, "
            f"codec {self.engine.codec.name!r}, the last {config.keep_last_layers} kept, "
            f"{self._limits()}.{head}"
        )

    def describe_shortly(self) -> str:
        """Say in a few words what is offloaded and what the last micro-batch came to."""
        stats = self.engine.figures.last
        moved = (
            "no micro-batch yet"
            if stats is None
            else f"moved {format_bytes(stats.offloaded_bytes)} of "
            f"{format_bytes(stats.would_hold_bytes)} in the last micro-batch"
        )
        return (
            f"{len(self.layer_names)} layers, policy {self.engine.policy.name!r}, "
            f"codec {self.engine.codec.name!r}, {moved}"
        )

    def end(self, outcome: str) -> None:
        """Write the report, and say what the run came to. Never raises an error.

        Only the main process of several writes.
        """
        if not self._may_speak():
            return
        if self.report_path is not None:
            write_run_report(self, self.report_path, outcome=outcome)
        logger.info("%s", self.describe_end())

    def end_unseen(self) -> None:
        """Write the report of a run that no one detached, when its process or its model goes.

        It may run in a destructor.
        """
        if self.report_path is not None and self._may_speak():
            # Set once an error has ended the process; at a prompt, by any error since it began.
            error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
            outcome = UNKNOWN if error is None else outcome_of(error)
            write_run_report(self, self.report_path, outcome=outcome)

    def describe_end(self) -> str:
        """Say in one line what the run came to."""
        written = "" if self.report_path is None else f" Report: {self.report_path}"
        if self.engine.rests and not self.engine.figures.totals.num_micro_batches:
            return (
                f"hf_pyao offloaded nothing, as policy {self.engine.policy.name!r} said.{written}"
            )
        return (
            describe_totals(
                self.totals(), has_device=self._has_device, has_rested=self.engine.rests
            )
            + written
        )

    def _may_speak(self) -> bool:
        # A forked worker has a copy of this. Without RANK, as under torch.multiprocessing, the rank
        # is known only while the process group exists: at attachment, at the end, or both.
        is_first_rank = self._is_first_rank and process_rank().is_first
        return self._process_id == os.getpid() and is_first_rank

    def _layers(self) -> str:
        first, last = self.layer_names[0], self.layer_names[-1]
        names = first if first == last else f"{first} .. {last}"
        return f"{names}, {self.how_found}"

    def _what(self) -> str:
        what = f"policy {self.engine.policy.name!r}"
        if self.config.policy == "auto":
            what += f" (everything for {self.config.profile_steps} micro-batches, then as it plans)"
        if self.config.modules:
            what += f" ({', '.join(self.config.modules)})"
        if self.segments:
            what += f", {self.segments}"
        if self.config.recompute_modules:
            what += f", recomputing {', '.join(self.config.recompute_modules)}"
        return what

    def _limits(self) -> str:
        tiers = self.engine.link.tiers
        window = self.config.effective().window
        in_flight = (
            "meeting copies at each layer's end"
            if isinstance(window, str)
            else f"{window / 2**20:.0f} MiB in flight"
        )
        place = (
            "counting only: on a CPU the host stands in for the device"
            if not self._has_device
            else f"from {self.device} to {tiers.names()}"
        )
        return f"{in_flight}, {place}, {tiers.limits()}"
