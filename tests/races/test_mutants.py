"""Engines with one deliberate fault each: every one must fail under the simulated accelerator.

This is the test of the tests. A mutant that survives means that the schedules have no teeth for
that kind of fault.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.tape import StorageTable
from hf_pyao.engine.runtime.unpacking import Unpacker
from hf_pyao.engine.stores import Buffer, HostPool
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.mover import MovedBytes, Mover, Phase
from hf_pyao.errors import PyAOError
from races.models import SCENARIOS, make_pair
from tests.helpers.simulation.transport import SimulatedTransport

Mutant = Callable[[], Any]


def give_back(host: Buffer, mover: Mover) -> None:
    """Return *host* to the pool at once, whatever may still read it."""
    (pool,) = mover.link.tiers.stores
    pool.release(host, None)
    pool.settle()


def with_waits(wait: Callable[[Mover, MovedBytes], None]) -> Any:
    """Let compute wait for reloads by *wait*, where it reads them and where it lets them go."""

    def bring_here(self: Mover, moved: MovedBytes) -> None:
        if moved.phase is not Phase.RELOADING:
            self.reload(moved)
        wait(self, moved)

    return mock.patch.multiple(Mover, wait=wait, bring_here=bring_here)


def _no_wait_at_unpack() -> Any:
    """Compute reads a reloaded buffer without waiting for its copy."""

    def wait(self: Mover, moved: MovedBytes) -> None:
        if moved.phase is Phase.RELOADING:
            moved.to(Phase.HERE)

    return with_waits(wait)


def _wait_for_the_wrong_ticket() -> Any:
    """Compute waits for the copy to the host instead of the one back."""

    def wait(self: Mover, moved: MovedBytes) -> None:
        if moved.phase is Phase.RELOADING:
            moved.transport.wait(moved.offload_ticket)
            moved.to(Phase.HERE)

    return with_waits(wait)


def _wait_for_the_previous_reload() -> Any:
    """Compute waits for the reload queued before its own."""
    previous: list[Any] = []

    def wait(self: Mover, moved: MovedBytes) -> None:
        if moved.phase is Phase.RELOADING:
            if previous:
                moved.transport.wait(previous[0])
            previous[:] = [moved.reload_ticket]
            moved.to(Phase.HERE)

    return with_waits(wait)


def _host_buffer_returned_before_its_reload() -> Any:
    """A host buffer goes back to the pool as soon as its reload is queued."""
    reload = Mover.reload

    def early(self: Mover, moved: MovedBytes) -> None:
        reload(self, moved)
        assert moved.host is not None
        give_back(moved.host, self)
        moved.host = None

    return mock.patch.object(Mover, "reload", early)


def _source_released_early() -> Any:
    """The device copy is let go when its offload is queued, not when compute is behind it."""

    def add(self: LinkContext, moved: MovedBytes) -> None:
        moved.source_has_left()

    return mock.patch.object(LinkContext, "add", add)


def _no_meeting_at_layer_end() -> Any:
    """Sources are let go at the layer's end without waiting for the copies."""

    def release(self: LinkContext, items: Sequence[int]) -> None:
        for item in items:
            self._release(item)

    return mock.patch.object(LinkContext, "release", release)


def _waits_for_the_oldest_only() -> Any:
    """At the layer's end compute waits for the oldest copy and lets all sources go."""

    def release(self: LinkContext, items: Sequence[int]) -> None:
        self.await_copies(items[:1])
        for item in items:
            self._release(item)

    return mock.patch.object(LinkContext, "release", release)


def _window_overrun_without_wait() -> Any:
    """What the window has no room for is let go without waiting for its copy."""
    add = LinkContext.add

    def overrun(self: LinkContext, moved: MovedBytes) -> None:
        with mock.patch.object(moved.transport, "wait", return_value=None):
            add(self, moved)

    return mock.patch.object(LinkContext, "add", overrun)


def _room_made_without_wait() -> Any:
    """Room for reloads is made without ordering compute behind the copies of what is let go."""
    make_room = LinkContext.make_room

    def unordered(self: LinkContext, nbytes: int, sooner: Container[int]) -> bool:
        with mock.patch.object(SimulatedTransport, "wait", return_value=None):
            return make_room(self, nbytes, sooner)

    return mock.patch.object(LinkContext, "make_room", unordered)


def _prefetch_into_a_buffer_in_use() -> Any:
    """Reloads of one layout share one device buffer."""
    buffers: dict[object, torch.Tensor] = {}

    new_buffer = MovedBytes.new_device_buffer

    def shared(moved: MovedBytes) -> torch.Tensor:
        fresh = new_buffer(moved)
        return buffers.setdefault((fresh.dtype, fresh.size(), fresh.stride()), fresh)

    return mock.patch.object(MovedBytes, "new_device_buffer", shared)


def _reload_dropped_unawaited() -> Any:
    """A reload that was brought back ahead is dropped while its copy may still write."""

    def drop(self: Mover, moved: MovedBytes) -> None:
        if moved.phase in (Phase.RELOADING, Phase.HERE):
            self.note_use(moved.item)
            moved.buffer = moved.decoded = None
            moved.phase = Phase.AWAY

    return mock.patch.object(Mover, "drop_device_copy", drop)


class _ByAddress(dict[int, Any]):
    """Entries by data pointer. It holds no storage; hence none is found to be let go of."""

    def get(self, key: int, default: Any = None) -> Any:
        return super().get(torch.UntypedStorage._new_with_weak_ptr(key).data_ptr(), default)

    def __iter__(self) -> Any:
        return iter(())


def _storage_known_by_address() -> Any:
    """Storages are told apart by data pointer, which the allocator hands out again."""

    def init(self: StorageTable) -> None:
        self.entries = _ByAddress()

    def add(self: StorageTable, storage: torch.UntypedStorage, entry: Any) -> None:
        self.entries.setdefault(storage.data_ptr(), []).append(entry)

    return mock.patch.multiple(StorageTable, __init__=init, add=add)


def _buffer_released_twice() -> Any:
    """The pool takes a buffer back twice and hands it out twice."""
    release = HostPool.release

    def twice(self: HostPool, buffer: Any, after: Any = None) -> None:
        release(self, buffer, after)
        self.settle()
        self._spare[buffer.data.numel()].append(buffer)

    return mock.patch.object(HostPool, "release", twice)


def _host_buffers_dropped_after_one_backward() -> Any:
    """Host buffers are given back when a backward ends, though a retained graph needs them."""
    finalize = Unpacker.finalize_backward

    def early(self: Unpacker) -> None:
        tapes = list(self._tapes)
        finalize(self)
        for ref in [ref for tape in tapes for ref in tape.calls]:
            call = ref()
            for record in call.live_records() if call is not None else ():
                if record.host is not None:
                    give_back(record.host, self._mover)

    return mock.patch.object(Unpacker, "finalize_backward", early)


MUTANTS: dict[str, Mutant] = {
    name.removeprefix("_").replace("_", " "): mutant
    for name, mutant in list(globals().items())
    if name.startswith("_") and inspect.isfunction(mutant) and mutant.__module__ == __name__
}


def _schedules_that_fail(mutant: Mutant | None, num_seeds: int) -> list[str]:
    """Return what went wrong, over schedules, windows and scenarios; stop at the first."""
    model, plain = make_pair("llama")
    expected = {name: run(plain) for name, run in SCENARIOS.items()}
    for seed in range(num_seeds):
        for window in ("layer", 3_000):
            for scenario, run in SCENARIOS.items():
                transport = SimulatedTransport(seed)
                config = PyAOConfig(policy="all", min_bytes=0, window=window, keep_last_layers=0)
                offloader = attach(model, config, transport=transport)
                try:
                    with mutant() if mutant else nullcontext():
                        result = run(model)
                    transport.finish()
                    offloader.detach()
                except (PyAOError, RuntimeError, AssertionError, IndexError) as error:
                    return [f"{scenario}: {type(error).__name__}: {error}"]
                if result.difference_from(expected[scenario]):
                    return [f"{scenario}: gradients differ"]
    return []


# A fault may strike inside a destructor, or inside a hook of a forward that failed already.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    assert _schedules_that_fail(MUTANTS[name], num_seeds=12), f"no schedule catches: {name}"


@pytest.mark.thorough
def test_the_engine_itself_passes_the_same_schedules() -> None:
    assert _schedules_that_fail(None, num_seeds=3) == []


def test_each_fault_that_is_listed_has_a_mutant() -> None:
    page = Path(__file__).with_name("FAULTS.md").read_text()
    for module in ("test_mutants", "test_compute_streams", "test_disk"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{module}.py`")]
        loaded = importlib.import_module(f"{__package__}.{module}")
        mutants = loaded.SHOWN_BY if hasattr(loaded, "SHOWN_BY") else loaded.MUTANTS
        names = [each if isinstance(each, str) else each.__name__ for each in mutants]
        listed = row.split("|")[2].strip().split("; ")
        assert len(listed) >= 7
        assert set(listed) <= {name.replace("_", " ").strip() for name in names}
