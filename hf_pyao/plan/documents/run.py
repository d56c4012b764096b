"""``RunReport``: what offloading did in one training run, as JSON."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_pyao.errors import ConfigError, warn
from hf_pyao.plan.documents.provenance import Provenance, collect_provenance, now
from hf_pyao.plan.documents.schema import JsonDocument, ReportError
from hf_pyao.ranks import process_rank
from hf_pyao.text import describe_error, echo

logger = logging.getLogger(__name__)

FINISHED = "finished"
INTERRUPTED = "interrupted"
RUNNING = "running"
UNKNOWN = "unknown"
"""The process, or the model, went before anyone said how the run ended."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What became of what one layer saved for backward, in bytes of a micro-batch."""

    layer: str
    """Its qualified name."""
    kept_bytes: int
    """Stayed on the device."""
    moved_bytes: int
    """Went to the host."""
    recomputed_bytes: int
    """Were dropped, and recomputed in backward."""
    streamed_weight_bytes: int = 0
    """Weights of the layer that are on the host, and are uploaded for each pass."""


class ReportedOffloader(Protocol):
    """What a report asks of an :class:`~hf_pyao.Offloader`."""

    config: Any
    device: Any
    engine: Any
    transport: Any

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers, in forward order."""
        ...

    @property
    def layer_bytes(self) -> list[LayerBytes]:
        """What became of each layer's saved tensors; empty if that is not known."""
        ...

    @property
    def report_extra(self) -> dict[str, Any]:
        """Plain values that the report is to hold beside the figures."""
        ...

    def describe(self) -> str:
        """Say in one line what is offloaded."""
        ...

    def totals(self) -> dict[str, float]:
        """Return sums and peaks over the run."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunReport(JsonDocument):
    """One training run with offloading. Keys of the figures: ``hf_pyao.metrics``."""

    schema_version: int = 1
    kind: str = "run"
    written_at: str
    """When it was written: ISO 8601, UTC."""
    description: str
    """In one line: what was offloaded, how, within which limits."""
    policy: str
    """Name of the policy that decided."""
    config: dict[str, Any]
    """``PyAOConfig.to_dict()``: open fields are None."""
    device: str
    """The device, such as ``cuda:0``."""
    layer_names: list[str]
    """The layers, in forward order."""
    layers: list[LayerBytes] = field(default_factory=list)
    """What became of each layer's saved tensors in one of the last micro-batches, in forward order;
    empty if that is not known."""
    totals: dict[str, float]
    """Sums over all micro-batches; sizes held at once are peaks."""
    last_micro_batch: dict[str, float]
    """Figures of the last finished micro-batch."""
    link: dict[str, float | None]
    """Speed of the copies themselves: ``d2h_gib_per_s``, ``h2d_gib_per_s``."""
    versions: dict[str, str | None]
    """As in ``provenance``, at the top for readers in a hurry."""
    provenance: Provenance
    extra: dict[str, Any] = field(default_factory=dict)
    """What the caller added: losses, steps, a run's name."""
    no_effect: list[dict[str, str]] = field(default_factory=list)
    """Settings that were switched on and did nothing: ``setting``, ``expected``, ``seen``,
    ``reason`` and ``remedy`` of each, see :class:`hf_pyao.no_effect.NoEffect`."""
    outcome: str = UNKNOWN
    """How the run ended: ``"finished"``, ``"interrupted"``, ``"failed: <type of the error>"``;
    ``"running"`` if it had not, ``"unknown"`` if no one said."""

    @property
    def title(self) -> str:
        """A heading that tells one run from another: name, policy, codec, device, a bad end."""
        name = self.extra.get("name") or "one run"
        codec = self.config.get("codec", "identity")
        end = "" if self.outcome in (FINISHED, UNKNOWN) else f" ({self.outcome})"
        return f"Offloading in {name}: policy {self.policy}, codec {codec}, on {self.device}{end}"


def outcome_of(error: BaseException | None) -> str:
    """Return how a run ended that *error*, if any, came out of."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return FINISHED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return f"failed: {type(error).__name__}"


def make_run_report(offloader: ReportedOffloader, outcome: str = RUNNING) -> RunReport:
    """Take *offloader*'s figures, as they are now, into a report."""
    provenance = collect_provenance()
    speed = offloader.transport.bandwidth()
    return RunReport(
        written_at=now(),
        description=offloader.describe(),
        policy=str(offloader.engine.policy.name),
        config=offloader.config.to_dict(),
        device=str(offloader.device),
        layer_names=list(offloader.layer_names),
        layers=list(offloader.layer_bytes),
        totals=dict(offloader.totals()),
        last_micro_batch=dict(offloader.metrics()),
        link={"d2h_gib_per_s": speed.d2h_gib_per_s, "h2d_gib_per_s": speed.h2d_gib_per_s},
        versions=provenance.versions,
        provenance=provenance,
        extra=dict(offloader.report_extra),
        no_effect=[fact.to_dict() for fact in offloader.engine.effects.facts],
        outcome=outcome,
    )


def write_run_report(
    offloader: ReportedOffloader,
    path: str | os.PathLike[str] | None = None,
    extra: Mapping[str, Any] | None = None,
    outcome: str = RUNNING,
) -> RunReport | None:
    """Write what *offloader* moved, kept and waited for as JSON, and return it.

    Where the configuration names a ``report``, detaching writes it: there is no need to call this.
    Whatever goes wrong is logged and no error: the training was done all the same, or has an error
    of its own.

    Args:
        offloader: attached or detached; its configuration, totals and last micro-batch are
            written.
        path: where to; None for the configuration's ``report``, and if that is None, nowhere.
        extra: plain values to put beside, over those of ``offloader.report_extra``: losses, steps,
            a run's name. What detaching writes later has them, too.
        outcome: how the run ended, see :attr:`RunReport.outcome`.

    Returns:
        The report, also where its file could not be written; None if there is none.
    """
    path = offloader.config.report if path is None else path
    if path is None:
        return None
    report = None
    try:
        offloader.report_extra.update(extra or {})
        report = make_run_report(offloader, outcome)
        report.to_json_file(path)
    except ReportError as error:
        warn(logger, "file-unwritable", "the run report is lost: %s", error, level=logging.ERROR)
    except Exception as error:
        warn(
            logger,
            "file-unwritable",
            "the run report is lost: %s",
            describe_error(error),
            level=logging.ERROR,
            exc_info=True,
        )
    return report


def check_report_path(path: str | os.PathLike[str] | None, label: str = "report") -> None:
    """Refuse, before any training, a path that no report can be written to; None is fine.

    Looks at the disk, and only in the process that writes: others may not see the same folders.

    Args:
        path: the configuration's ``report``.
        label: what messages call it.

    Raises:
        ConfigError: it is a folder, or lies in one that cannot be made or written to.
    """
    if path is None or not process_rank().is_first:
        return
    name = echo(os.fspath(path))
    if os.path.isdir(path):
        raise ConfigError(
            f"{label} is {name}, which is a folder; expected a file's path.", key="file-unwritable"
        )
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, /dev/null
        return
    folder = next(str(parent) for parent in Path(path).absolute().parents if os.path.exists(parent))
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{label} is {name}, and {echo(folder)} is no folder.", key="file-unwritable"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{label} is {name}, and this process may not write to {echo(folder)}. Give a path "
            "in a folder of your own.",
            key="file-unwritable",
        )
