"""A virtual clock for compute and copies: when things would happen on given hardware.

Compute is one lane that the caller advances; copies share a link. The model is a fluid one: each
copy engine runs one copy at a time at the link's speed in its direction, and all that touches host
memory (both directions, and gradient traffic) shares the host's memory bandwidth in proportion.
Times follow from bytes and speeds alone, so they are the same on every machine.

Assumptions: launching costs what the host model says (by default nothing, and the host is far ahead
of the device), copies of one queue run in order, a copy engine is not
preempted inside a copy, and compute does not slow down while copies run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostClock, HostModel
from hf_pyao.plan.hardware.speeds import GIB, LinkModel


@dataclass(eq=False)
class Booking:
    """A copy's place on the virtual link."""

    direction: str
    label: str
    ready_ms: float
    """No earlier than this: when compute had queued it."""
    left_ms: float
    """How long it still takes at full speed."""
    needs: tuple[Booking, ...]
    priority: int
    order: int
    start_ms: float | None = None
    end_ms: float | None = None


@dataclass(frozen=True)
class Interval:
    """Something that ran on the virtual clock."""

    lane: str
    """``"compute"``, ``"stall"``, ``"offload"``, ``"reload"``, ``"gradient"`` or ``"host"``."""
    label: str
    start_ms: float
    end_ms: float


_PRIORITIES = {"reload": 0, "offload": 1, "gradient": 2, "host": 0}
"""What a shared copy engine takes first: reloads, since backward waits for them, then the rest."""

_TICK_MS = 1e-9
"""Times closer than this are the same."""

_ENGINES = {"offload": "d2h", "gradient": "d2h", "reload": "h2d", "host": "host"}


@dataclass
class VirtualLink:
    """The clock of one device: its compute lane, the copies on its link, and the host."""

    model: LinkModel
    copy_streams: int = 2
    host: HostModel = FAR_AHEAD
    """How far the host runs ahead: what it knows of copies when it asks."""
    compute_ms: float = 0.0
    """Where the compute lane has got to."""
    stall_ms: float = 0.0
    """How long compute has waited for copies in all."""
    timeline: list[Interval] = field(default_factory=list)
    _now_ms: float = 0.0
    _queues: dict[str, list[Booking]] = field(default_factory=dict)
    _num_booked: int = 0

    def __post_init__(self) -> None:
        """Set the host's clock."""
        self._host_clock = HostClock(self.host)

    def advance(self, elapsed_ms: float, label: str = "") -> None:
        """Let compute run a kernel for *elapsed_ms*, once the host has queued it."""
        start = self._host_clock.launch(self.compute_ms)
        self.compute_ms = start + elapsed_ms
        self._host_clock.ends(self.compute_ms)
        if label:
            self.timeline.append(Interval("compute", label, start, self.compute_ms))

    def stand_until(self, until_ms: float) -> None:
        """Let compute stand still until *until_ms*, if that is later: it waits for no copy."""
        self.compute_ms = max(self.compute_ms, until_ms)

    def book(
        self, direction: str, nbytes: int, needs: list[object] | None = None, label: str = ""
    ) -> Booking:
        """Queue a copy (``"offload"``, ``"reload"``, ``"gradient"``), or a ``"host"`` access."""
        self._run(self.compute_ms)
        if direction == "host":
            full_ms = nbytes / GIB / self.model.host_memory_gib_per_s * 1e3
        else:
            full_ms = self.model.copy_ms("reload" if direction == "reload" else "offload", nbytes)
        booking = Booking(
            direction,
            label,
            self.compute_ms,
            full_ms,
            tuple(need for need in needs or () if isinstance(need, Booking)),
            _PRIORITIES[direction],
            self._num_booked,
        )
        self._num_booked += 1
        name = "single" if self.copy_streams < 2 and direction != "host" else direction
        self._queues.setdefault(name, []).append(booking)
        return booking

    def wait(self, booking: object) -> float:
        """Let compute wait for a copy; return for how long, in ms."""
        assert isinstance(booking, Booking)
        self._run(math.inf, until=booking)
        assert booking.end_ms is not None
        stall_ms = max(0.0, booking.end_ms - self.compute_ms)
        if stall_ms > 0.0:
            self.timeline.append(Interval("stall", booking.label, self.compute_ms, booking.end_ms))
            self.compute_ms = booking.end_ms
            self.stall_ms += stall_ms
        return stall_ms

    def is_done(self, booking: object) -> bool:
        """Say whether the host knows that a copy has ended."""
        assert isinstance(booking, Booking)
        self._run(self.compute_ms)
        seen_ms = self._host_clock.seen_ms(self.compute_ms)
        return booking.end_ms is not None and booking.end_ms <= seen_ms

    def finish(self) -> float:
        """Run all copies to their end and return when the last thing ended."""
        self._run(math.inf)
        return max(self.compute_ms, self._now_ms if math.isfinite(self._now_ms) else 0.0)

    def _run(self, until_ms: float, until: Booking | None = None) -> None:
        """Simulate the link up to a time, or until a copy has ended."""
        while until is None or until.end_ms is None:
            running = self._running()
            rate = self._rate(running)
            next_ready = self._next_ready()
            ends = min((b.left_ms / rate for b in running), default=math.inf)
            step_to = min(self._now_ms + ends, next_ready, until_ms)
            if not running and not math.isfinite(next_ready):
                if math.isfinite(until_ms):
                    self._now_ms = max(self._now_ms, until_ms)
                return
            elapsed = step_to - self._now_ms
            for booking in running:
                booking.left_ms -= elapsed * rate
            self._now_ms = step_to
            for booking in running:
                # Not zero: what is left may be too little to move the clock by.
                if booking.left_ms <= _TICK_MS:
                    self._end(booking)
            if self._now_ms >= until_ms:
                return

    def _running(self) -> list[Booking]:
        """Return the copies that engines run now: begun ones, else the most urgent ready ones."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        heads = [b for b in heads if b.ready_ms <= self._now_ms and self._has_needs(b)]
        heads.sort(key=lambda b: (b.start_ms is None, b.priority, b.order))
        running: dict[str, Booking] = {}
        for booking in heads:
            engine = _ENGINES[booking.direction]
            if self.model.copy_engines == 1 and engine != "host":
                engine = "one"
            if engine not in running:
                running[engine] = booking
                if booking.start_ms is None:
                    booking.start_ms = self._now_ms
        return list(running.values())

    def _has_needs(self, booking: Booking) -> bool:
        return all(
            need.end_ms is not None and need.end_ms <= self._now_ms for need in booking.needs
        )

    def _rate(self, running: list[Booking]) -> float:
        """Return the share of their full speed at which the running copies proceed."""
        wanted = 0.0
        for booking in running:
            if booking.direction == "host":
                wanted += self.model.host_memory_gib_per_s
            elif booking.direction == "reload":
                wanted += self.model.h2d_gib_per_s
            else:
                wanted += self.model.d2h_gib_per_s
        if wanted <= self.model.host_memory_gib_per_s:
            return 1.0
        return self.model.host_memory_gib_per_s / wanted

    def _next_ready(self) -> float:
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min((b.ready_ms for b in heads if b.ready_ms > self._now_ms), default=math.inf)

    def _end(self, booking: Booking) -> None:
        booking.end_ms = self._now_ms
        for queue in self._queues.values():
            if queue and queue[0] is booking:
                queue.pop(0)
        assert booking.start_ms is not None
        self.timeline.append(
            Interval(booking.direction, booking.label, booking.start_ms, booking.end_ms)
        )
