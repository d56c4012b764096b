"""Counters of one micro-batch, and their sums over a run.

All quantities carry their unit in the name; GiB are 2**30 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class MicroBatchStats:
    """What happened to the saved tensors of one micro-batch (one forward and its backward)."""

    would_hold_bytes: int = 0
    """Bytes that autograd would hold on the device without hf_pyao: distinct storages saved inside
    the layers, parameters and buffers apart."""
    offloaded_bytes: int = 0
    """Bytes of saved storages that left the device, before any codec."""
    reloaded_bytes: int = 0
    """Bytes of saved storages that came back, before any codec."""
    duplicate_bytes: int = 0
    """Bytes of saved storages that were let go because another, moved one holds the same values."""
    recomputed_bytes: int = 0
    """Bytes of saved storages that were dropped and rebuilt in backward."""
    not_recomputed_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes that were to be recomputed and are kept or offloaded instead, by reason."""
    link_bytes: int = 0
    """Bytes that crossed the link in either direction, after the codec."""
    kept_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes that stayed on the device, by reason."""
    transfer_ms: float = 0.0
    """Time in which copies ran, both directions added."""
    stall_forward_ms: float = 0.0
    """Time in which forward compute waited for copies."""
    stall_backward_ms: float = 0.0
    """Time in which backward compute waited for copies."""
    device_peak_bytes: int = 0
    """Most device memory allocated so far, where the device counts it; 0 on a CPU."""
    host_peak_bytes: int = 0
    """Most host memory that saved tensors took at once."""
    pool_bytes: int = 0
    """Size of the host pool: reserved memory, in use or not."""
    disk_peak_bytes: int = 0
    """Most bytes that saved tensors took on a disk at once."""
    disk_written_bytes: int = 0
    """Bytes that were written to a disk, padding included."""
    disk_read_bytes: int = 0
    """Bytes that were read from a disk, padding included."""
    disk_forwarded_bytes: int = 0
    """Bytes on their way to a disk that were asked for while host memory still had them."""
    disk_stall_ms: float = 0.0
    """Time in which the host waited for a disk."""
    num_slots: int = 0
    """Distinct saved storages seen, kept ones included."""
    num_packs: int = 0
    """Calls of the pack hook."""

    @property
    def link_times_ms(self) -> tuple[float, float, float]:
        """Time of copies, and what forward and backward waited for them."""
        return self.transfer_ms, self.stall_forward_ms, self.stall_backward_ms

    def add(self, other: MicroBatchStats) -> None:
        """Add what happened in another forward of the same micro-batch."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _PEAKS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.num_slots += other.num_slots
        for ours, theirs in (
            (self.kept_bytes, other.kept_bytes),
            (self.not_recomputed_bytes, other.not_recomputed_bytes),
        ):
            for reason, nbytes in theirs.items():
                ours[reason] += nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes that stayed on the device after forward."""
        return sum(self.kept_bytes.values())

    @property
    def overlap_efficiency(self) -> float:
        """Share of the transfer time that compute did not wait for, in 0..1; 1 if none ran."""
        return _overlap_efficiency(self.transfer_ms, self.stall_forward_ms + self.stall_backward_ms)

    def as_dict(self) -> dict[str, float]:
        """Return the public keys; those by reason are spread as ``kept_bytes/<reason>``."""
        values: dict[str, float] = {
            "would_hold_bytes": self.would_hold_bytes,
            "held_bytes": self.held_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "reloaded_bytes": self.reloaded_bytes,
            "duplicate_bytes": self.duplicate_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "link_bytes": self.link_bytes,
            "stall_forward_ms": self.stall_forward_ms,
            "stall_backward_ms": self.stall_backward_ms,
            "transfer_ms": self.transfer_ms,
            "overlap_efficiency": self.overlap_efficiency,
            "device_peak_bytes": self.device_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "pool_bytes": self.pool_bytes,
            "num_slots": self.num_slots,
        }
        if self.disk_peak_bytes or self.disk_written_bytes or self.disk_read_bytes:
            values |= {name: getattr(self, name) for name in _DISK}
        for reason, num_bytes in sorted(self.kept_bytes.items()):
            values[f"kept_bytes/{reason}"] = num_bytes
        for reason, num_bytes in sorted(self.not_recomputed_bytes.items()):
            values[f"not_recomputed_bytes/{reason}"] = num_bytes
        return values


_PEAKS = ("device_peak_bytes", "host_peak_bytes", "pool_bytes", "disk_peak_bytes")
_DISK_SUMS = ("disk_written_bytes", "disk_read_bytes", "disk_forwarded_bytes", "disk_stall_ms")
_DISK = ("disk_peak_bytes", *_DISK_SUMS)
"""Said where a disk was used."""
_TIMES = ("transfer_ms", "stall_forward_ms", "stall_backward_ms")
_SUMS = (
    *("would_hold_bytes", "offloaded_bytes", "reloaded_bytes", "duplicate_bytes"),
    *("recomputed_bytes", "link_bytes", "num_packs"),
    *_DISK_SUMS,
    *_TIMES,
)


def _overlap_efficiency(transfer_ms: float, stall_ms: float) -> float:
    """Return the share of the transfer time that compute did not wait for, in 0..1."""
    return 1.0 if transfer_ms <= 0.0 else min(1.0, max(0.0, 1.0 - stall_ms / transfer_ms))


@dataclass
class RunTotals:
    """Sums over the micro-batches of a run; sizes held at once are peaks, not sums."""

    num_micro_batches: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, stats: MicroBatchStats) -> None:
        """Add one finished micro-batch."""
        values = dict(self.values)  # changed at once: an interrupt may come in between
        for key, value in stats.as_dict().items():
            if key in _PEAKS or key == "num_slots":
                values[key] = max(values.get(key, 0), value)
            elif key != "overlap_efficiency":
                values[key] = values.get(key, 0) + value
        self.values = values
        self.num_micro_batches += 1

    def add_link_times(
        self, before: tuple[float, float, float], after: tuple[float, float, float]
    ) -> None:
        """Add what a micro-batch that was added turned out later to have taken more.

        Args:
            before: :attr:`MicroBatchStats.link_times_ms` as it was added.
            after: the same as it is now.
        """
        values = dict(self.values)
        for key, was, now in zip(_TIMES, before, after, strict=True):
            values[key] = values.get(key, 0) + now - was
        self.values = values

    def as_dict(self) -> dict[str, float]:
        """Return the totals under the same keys as one micro-batch, and ``num_micro_batches``."""
        if not self.num_micro_batches:
            return {}
        efficiency = _overlap_efficiency(
            self.values["transfer_ms"],
            self.values["stall_forward_ms"] + self.values["stall_backward_ms"],
        )
        return {
            **self.values,
            "overlap_efficiency": efficiency,
            "num_micro_batches": self.num_micro_batches,
        }


def nothing_moved() -> dict[str, float]:
    """Return the figures of a micro-batch in which all was left to autograd, as far as known."""
    unknown = ("would_hold_bytes", "held_bytes", "num_slots", "device_peak_bytes", "pool_bytes")
    figures = MicroBatchStats().as_dict()
    return {key: value for key, value in figures.items() if key not in unknown}


def select_metrics(
    values: Mapping[str, float], which: str, *, has_device: bool
) -> dict[str, float]:
    """Return what of a micro-batch's figures goes to the logs.

    Args:
        values: as :meth:`MicroBatchStats.as_dict` gives them; empty before the first micro-batch.
        which: ``PyAOConfig.log_metrics``: ``"all"``, ``"off"``, or ``"summary"``: what moved, what
            stayed, what was recomputed (if anything), and on a device how long compute waited
            (``stall_ms``: forward and backward added), how much of the copies it did not wait for,
            and the peak of memory.
        has_device: whether there is a device that copies can run beside.
    """
    if which == "all":
        return dict(values)
    if which == "off" or not values:
        return {}
    chosen = {key: values[key] for key in ("offloaded_bytes", "held_bytes") if key in values}
    if values["recomputed_bytes"]:
        chosen["recomputed_bytes"] = values["recomputed_bytes"]
    if has_device:
        if "device_peak_bytes" in values:
            chosen["device_peak_bytes"] = values["device_peak_bytes"]
        chosen["stall_ms"] = values["stall_forward_ms"] + values["stall_backward_ms"]
        chosen["overlap_efficiency"] = values["overlap_efficiency"]
    return chosen


def format_bytes(num_bytes: float) -> str:
    """Return a size as people read it, such as ``40.5 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def describe_totals(
    totals: Mapping[str, float], *, has_device: bool, has_rested: bool = False
) -> str:
    """Say in one line what a run came to.

    Args:
        totals: as :meth:`RunTotals.as_dict` gives them.
        has_device: whether there is a device that copies can run beside.
        has_rested: nothing was offloaded, and nothing counted, in the micro-batches behind these.
    """
    count = int(totals.get("num_micro_batches", 0))
    if not count:
        return "hf_pyao saw no micro-batch: nothing was offloaded."

    def mean(key: str) -> str:
        return format_bytes(totals[key] / count)

    recomputed = ""
    if totals["recomputed_bytes"]:
        recomputed = f" and recomputed {mean('recomputed_bytes')}"
    parts = [
        f"hf_pyao moved {mean('offloaded_bytes')}{recomputed} of the {mean('would_hold_bytes')} "
        f"that the layers saved for backward, per micro-batch ({count:,} in all)"
        f"{', and offloaded nothing in those after them' if has_rested else ''}"
    ]
    if has_device:
        stall_ms = (totals["stall_forward_ms"] + totals["stall_backward_ms"]) / count
        hidden = 100 * totals["overlap_efficiency"]
        parts.append(f"compute waited {stall_ms:,.1f} ms for copies ({hidden:.0f} % hidden)")
        parts.append(f"device peak {format_bytes(totals['device_peak_bytes'])}")
    return "; ".join(parts) + "."
