"""``StepTimeline``: an observer that notes when modules, copies and parts of the overhead ran.

    timeline = StepTimeline(offloader.transport, offloader.device)
    offloader.engine.observe(timeline)
    ...                                       # a step
    timeline.overheads_ms(), timeline.spans()

The times are the transport's: those of the device where there is one, of the processor on a CPU, of
the virtual link in a simulation. Noting them costs an event each on a device: not for every step of
a run.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from hf_pyao.engine.runtime.observer import OVERHEADS, Observer
from hf_pyao.engine.transfer.transport import Transport

Result = TypeVar("Result")

_ON_HOST = frozenset({"trace"})
"""Parts that take the host's time, whatever the device does."""


class Span(NamedTuple):
    """Something that ran."""

    lane: str
    """``"forward"``, ``"backward"``, ``"offload"``, ``"reload"``, or a part of the overhead."""
    label: str
    """The layer and sub-module, or the slot."""
    start_ms: float
    """Since the timeline was made."""
    end_ms: float


class _Part:
    """A part of the overhead that runs now on a thread."""

    def __init__(self) -> None:
        self.inner_ms = 0.0
        """What ran inside of it, on the host."""
        self.inner: list[tuple[Any, Any]] = []
        """Marks around what ran inside of it."""


class _Parts(threading.local):
    def __init__(self) -> None:
        self.running: list[_Part] = []


class StepTimeline(Observer):
    """Notes marks while a step runs; asks for the time between them when it is over.

    Args:
        transport: the engine's, whose clock is used.
        device: where the model is.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._start = transport.mark(device)
        self._modules: list[tuple[str, str, bool, Any]] = []
        self._copies: list[tuple[str, str, Any]] = []
        self._overheads: list[tuple[str, str, Any, Any, list[tuple[Any, Any]]]] = []
        self._host_ms: dict[str, float] = defaultdict(float)
        self._parts = _Parts()

    # ---- what the engine tells -----------------------------------------------------------------

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Note the moment."""
        label = f"{layer} {path}".rstrip()
        self._modules.append((phase, label, is_start, self._transport.mark(self._device)))

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        """Note the copy."""
        self._copies.append((direction, str(label), ticket))

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Note when *work* ran."""
        running = self._parts.running
        part = _Part()
        running.append(part)
        start_s, start = time.perf_counter(), self._transport.mark(self._device)
        try:
            return work()
        finally:
            end = self._transport.mark(self._device)
            elapsed_ms = (time.perf_counter() - start_s) * 1e3
            running.pop()
            if running:
                running[-1].inner_ms += elapsed_ms
                running[-1].inner.append((start, end))
            if what in _ON_HOST:
                self._host_ms[what] += elapsed_ms - part.inner_ms
            else:
                self._overheads.append((what, str(label), start, end, part.inner))

    # ---- results -------------------------------------------------------------------------------

    def overheads_ms(self) -> dict[str, float]:
        """Return the time of each part of the overhead, without what ran inside of it, in ms.

        Keys are ``encode_ms``, ``decode_ms``, ``trace_ms``, ``restore_ms``, ``recompute_ms`` (PyAO
        paper, Table 2). What the device has not done yet is waited for by the caller.
        """
        found = {f"{what}_ms": self._host_ms.get(what, 0.0) for what in OVERHEADS}
        for what, _, start, end, inner in self._overheads:
            if what in OVERHEADS:
                inside_ms = sum(self._transport.elapsed_ms(*marks) for marks in inner)
                found[f"{what}_ms"] += self._transport.elapsed_ms(start, end) - inside_ms
        return found

    def spans(self) -> list[Span]:
        """Return all that ran, by start; copies whose time is not known are left out."""
        found = [
            Span(what, label, self._since(start), self._since(end))
            for what, label, start, end, _ in self._overheads
        ]
        for direction, label, ticket in self._copies:
            marks = self._transport.span_of(ticket)
            if marks is not None:
                found.append(Span(direction, label, self._since(marks[0]), self._since(marks[1])))
        found += self._module_spans()
        return sorted(found, key=lambda span: (span.start_ms, -span.end_ms))

    def _module_spans(self) -> list[Span]:
        """Pair starts with ends. A backward that ends with its layer has no end of its own."""
        found: list[Span] = []
        open_since: dict[tuple[str, str], float] = {}
        for phase, label, is_start, mark in self._modules:
            moment_ms = self._since(mark)
            if is_start:
                open_since.setdefault((phase, label), moment_ms)
                continue
            is_layer = " " not in label
            ended = [
                key
                for key in open_since
                if key == (phase, label)
                or (is_layer and phase == key[0] == "backward" and key[1].startswith(label + " "))
            ]
            found += [Span(*key, open_since.pop(key), moment_ms) for key in ended]
        return found

    def _since(self, mark: Any) -> float:
        return self._transport.elapsed_ms(self._start, mark)
