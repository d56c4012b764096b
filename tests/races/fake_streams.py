"""Compute streams on a CPU: streams and events that carry vector clocks, and a checker of order.

Operations run at once, so values are always right; what is checked is whether anything made them
wait for each other. Two accesses to the same bytes on two streams, one of them a write, must be
ordered by events. Memory that dies returns to the stream that it was allocated on, which must be
ordered behind all that used it. :class:`~hf_pyao.engine.transfer.stream_transport.StreamTransport` runs on
these streams as it is.

Autograd runs a node on the stream of its forward and orders gradients across streams. A CPU's does
not; here hooks on the nodes do it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_pyao.engine.transfer.stream_transport import StreamTransport

Clock = dict[int, int]
"""How far each stream (by number) had come, as far as the holder is ordered behind it."""

CPU = torch.device("cpu")


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


class FakeStream:
    """A queue that is ordered behind what it was made to wait for, and nothing else."""

    device, device_index = CPU, None

    def __init__(self, world: World, device: object = None) -> None:
        self._world = world
        self.number = len(world.streams)
        self.clock: Clock = {self.number: 1}
        self._before: list[FakeStream] = []
        world.streams.append(self)

    def __enter__(self) -> FakeStream:
        self._before.append(self._world.current)
        self._world.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._world.current = self._before.pop()

    def wait_event(self, event: FakeEvent) -> None:
        self._world.bury()
        _join(self.clock, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._world)
        event.record(self)
        return event


class FakeEvent:
    """Remembers how far a stream had come."""

    def __init__(self, world: World, *_: object, **__: object) -> None:
        self._world = world
        self.clock: Clock = {}
        self._is_done = False

    def record(self, stream: FakeStream) -> None:
        self._world.bury()
        self.clock = dict(stream.clock)
        self._is_done = False

    def query(self) -> bool:
        """Say whether the host knows; then all that is queued from here on comes behind."""
        if not self._is_done and self._world.random.random() < self._world.eagerness:
            self._is_done = True
            self._world.bury()
            for stream in self._world.streams:
                _join(stream.clock, self.clock)
        return self._is_done

    def synchronize(self) -> None:
        """Let the host wait: then all that is queued from here on comes behind."""
        self._is_done = True
        self._world.bury()
        for stream in self._world.streams:
            _join(stream.clock, self.clock)

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


@dataclass
class Access:
    """One operation's use of bytes of a storage."""

    start: int
    end: int
    stream: FakeStream
    clock: Clock
    is_write: bool
    what: str

    def is_known_to(self, stream: FakeStream) -> bool:
        return stream.clock.get(self.stream.number, 0) >= self.clock[self.stream.number]


@dataclass
class Memory:
    """What a storage was used for."""

    home: FakeStream
    """Where it was allocated."""
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    """Streams whose use of it the allocator awaits by itself (``record_stream``)."""


class World:
    """All streams, the memory that they use, and what went wrong.

    Args:
        seed: draws which copies the host sees done.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.eagerness = self.random.choice((0.0, 0.1, 0.6))
        self.streams: list[FakeStream] = []
        self.current = FakeStream(self)
        self.races: list[str] = []
        self.node_depth = 0
        """How deep in autograd's nodes the caller is."""
        self._memory: dict[int, Memory] = {}

    def stream(self) -> FakeStream:
        """Return a new stream."""
        return FakeStream(self)

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Do as ``Tensor.record_stream``, which torch asks for where a tensor crosses streams."""
        self._memory_of(tensor.untyped_storage()).recorded.add(stream.number)

    def bury(self) -> None:
        """Return memory that has died since to its stream."""
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._memory if expired(key)]:
            memory = self._memory.pop(key)
            torch.UntypedStorage._free_weak_ref(key)
            for access in memory.accesses:
                if not access.is_known_to(memory.home):
                    if access.stream.number not in memory.recorded:
                        self._report("freed", memory.home, access)

    def close(self) -> None:
        """Return what has died, and let go of the rest."""
        self.bury()
        for key in self._memory:
            torch.UntypedStorage._free_weak_ref(key)
        self._memory.clear()

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that the memory of *tensor*, if it is new, belongs to the current stream."""
        self._memory_of(tensor.untyped_storage())

    def use(self, tensor: torch.Tensor, what: str, *, is_write: bool) -> None:
        """Note that the current stream reads or writes *tensor*; check that it may."""
        storage = tensor.untyped_storage()
        if not tensor.numel():
            return
        memory = self._memory_of(storage)
        start = tensor.storage_offset() * tensor.itemsize
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.itemsize
        stream = self.current
        kept = []
        for access in memory.accesses:
            overlaps = access.start < end and start < access.end
            if overlaps and (is_write or access.is_write) and not access.is_known_to(stream):
                self._report("written" if is_write else "read", stream, access, what)
            is_covered = start <= access.start and access.end <= end
            if not (is_covered and (is_write or (not access.is_write and access.stream is stream))):
                kept.append(access)
        stream.clock[stream.number] += 1
        kept.append(Access(start, end, stream, dict(stream.clock), is_write, what))
        memory.accesses = kept

    def follow(self, tensor: torch.Tensor) -> None:
        """Order the current stream behind the writers of *tensor*, as autograd does."""
        memory = self._memory_of(tensor.untyped_storage())
        for access in memory.accesses:
            if access.is_write:
                _join(self.current.clock, access.clock)
        memory.recorded.add(self.current.number)

    def _memory_of(self, storage: torch.UntypedStorage) -> Memory:
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[storage._weak_ref()] = Memory(self.current)
        return memory

    def _report(self, deed: str, stream: FakeStream, access: Access, what: str = "") -> None:
        use = "written" if access.is_write else "read"
        self.races.append(
            f"bytes {access.start} to {access.end} are {deed} {what} on stream {stream.number}, "
            f"and were {use} by {access.what} on stream {access.stream.number}"
        )


_NO_ACCESS = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "set_")
"""Operations that touch no bytes."""


class _Operations(TorchDispatchMode):
    """Shows every operation's reads and writes to the world."""

    only_watches = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        world = self._world
        world.bury()
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _NO_ACCESS:
            if _is_tensor(out):
                world.allocated(out)
            return out
        inputs = [item for item in tree_flatten((args, kwargs))[0] if _is_tensor(item)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = [item for item in tree_flatten(out)[0] if _is_tensor(item)]
        fresh = [item for item in outputs if item.untyped_storage()._cdata not in known]
        written = _written(func, args)
        if outputs and not fresh and not written:
            return out  # views
        is_engines = not world.node_depth and torch._C._current_graph_task_id() != -1
        for tensor in inputs:
            if is_engines:
                world.follow(tensor)
            if not any(tensor is other for other in written):
                world.use(tensor, name, is_write=False)
        for tensor in (*written, *fresh):
            world.use(tensor, name, is_write=True)
        return out


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.device == CPU


def _written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and _is_tensor(value):
            found.append(value)
    return found


class _Nodes(TorchFunctionMode):
    """Lets backward run each node on the stream that is current when its forward runs."""

    only_watches = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1:
            for item in tree_flatten(out)[0]:
                if isinstance(item, torch.Tensor) and item.grad_fn is not None:
                    self._mark(item.grad_fn)
        return out

    def _mark(self, last: Any) -> None:
        pending = [last]
        while pending:
            node = pending.pop()
            if node is None or "stream" in node.metadata:
                continue
            stream = node.metadata["stream"] = self._world.current
            node.register_prehook(_entering(self._world, stream))
            node.register_hook(_leaving(self._world, stream))
            pending.extend(parent for parent, _ in node.next_functions)


def _entering(world: World, stream: FakeStream) -> Callable[..., None]:
    def enter(gradients: Sequence[torch.Tensor | None]) -> None:
        stream.__enter__()
        world.node_depth += 1
        for gradient in gradients:
            if gradient is not None:
                world.follow(gradient)

    return enter


def _leaving(world: World, stream: FakeStream) -> Callable[..., None]:
    def leave(*_: object) -> None:
        world.node_depth -= 1
        stream.__exit__()

    return leave


class FakeStreamTransport(StreamTransport):
    """The real transport, let loose on tensors of a CPU."""

    needs_pinned_memory = False

    def handles(self, device: torch.device) -> bool:
        return True


@contextmanager
def fake_streams(seed: int = 0) -> Iterator[World]:
    """Give this CPU streams, and watch the order of all that happens meanwhile."""
    world = World(seed)

    def patch(target: str, replacement: Any) -> Any:
        return mock.patch(target, replacement)

    with ExitStack() as stack:
        for target, replacement in (
            ("torch.Stream", lambda device=None: FakeStream(world, device)),
            ("torch.Event", lambda *args, **options: FakeEvent(world, *args, **options)),
            ("torch.accelerator.is_available", lambda: True),
            ("torch.accelerator.current_stream", lambda device=None: world.current),
            (
                "torch.Tensor.record_stream",
                lambda tensor, stream: world.record_stream(tensor, stream),
            ),
            ("torch.accelerator.max_memory_allocated", lambda device=None: 0),
            ("hf_pyao.engine.transfer.compute_streams.WITHOUT_STREAMS", ("meta",)),
        ):
            stack.enter_context(patch(target, replacement))
        stack.enter_context(_Operations(world))
        stack.enter_context(_Nodes(world))
        yield world
    world.close()


def backward(world: World, loss: torch.Tensor, **options: Any) -> None:
    """Run *loss* backward; the current stream is ordered behind all of it, as torch does."""
    loss.backward(**options)
    for stream in world.streams:
        world.current.wait_stream(stream)
