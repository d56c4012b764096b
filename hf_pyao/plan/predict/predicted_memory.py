"""Device memory of a predicted step: what is allocated, what holds it, and when it is freed.

Most buffers come and go with operations, whatever the plan. They are put in order all at once, with
numpy, when the walk through the step is over. What a plan does itself is noted as it happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy

from hf_pyao.plan.step.prediction import FREED, WORKSPACE, Lifetime, MemoryEvent, MemoryKey
from hf_pyao.plan.step.step_program import StepProgram

_BEFORE, _DEATHS, _BETWEEN, _BIRTHS, _INSIDE = range(5)
"""The parts of an operation, in order: what the plan does before it; buffers that it lets go; what
the plan does then; buffers that it makes; what its kernel allocates inside."""

_PART_BITS, _RANK_BITS = 3, 32


def _moment(operation: int, part: int) -> int:
    """Return a part of an operation as one number, to which a rank within it is added."""
    return ((operation << _PART_BITS) + part) << _RANK_BITS


def _moments(operations: numpy.ndarray, part: int) -> numpy.ndarray:
    return ((operations << _PART_BITS) + part) << _RANK_BITS


class PredictedMemory:
    """The device memory of one step.

    A buffer is freed when its operations are over and nothing else holds it: saved tensors that
    stay, and copies to the host that are under way.

    Args:
        program: the step.
        made_again: buffers that are not there just from birth to death: reloaded and rebuilt ones.
        held: buffers that :meth:`hold` may be called for.
        kept: buffers that are let go elsewhere: by :meth:`die`, or as :meth:`end_with` says.
    """

    def __init__(
        self,
        program: StepProgram,
        made_again: Collection[int],
        held: Collection[int],
        kept: Collection[int],
    ) -> None:
        self.operation = 0
        """The operation that is predicted."""
        self._program = program
        self._made_again = made_again
        self._kept = kept
        self._moment = 0
        self._moments: list[int] = []
        self._keys: list[MemoryKey] = []
        self._sizes: list[int] = []
        """Of what the plan allocates and frees: when, what, and its bytes or :data:`FREED`."""
        self._changes: list[int] = []
        """The same: by how much what is allocated grows."""
        self._lifetimes: list[tuple[int, Lifetime]] = []
        """Of what the plan frees, and when."""
        self._ended: list[tuple[int, int, int]] = []
        """As :meth:`end_with` was told: operation, rank, buffer."""
        self._buffers = program.buffers
        self._allocated: dict[MemoryKey, int] = {}
        """What is there and is no buffer of the program."""
        self._num_holders: defaultdict[int, int] = defaultdict(int)
        self._over_at = {
            buffer: _moment(self._buffers[buffer].death, _DEATHS)
            for buffer in held
            if buffer not in made_again
        }
        """When operations of held buffers are over."""
        self._let_go: set[int] = set()
        """Held buffers that were freed later than that."""

    def begin(self, operation: int) -> None:
        """Go on to what the plan does before *operation*."""
        self.operation = operation
        self._moment = _moment(operation, _BEFORE)

    def end(self, operation: int) -> None:
        """Go on to what the plan does where *operation* has let its buffers go."""
        self.operation = operation
        self._moment = _moment(operation, _BETWEEN)

    def allocate(self, key: MemoryKey, nbytes: int) -> None:
        """Allocate *nbytes* for *key*, which is no buffer of the program."""
        self._allocated[key] = nbytes
        self._note(key, nbytes, nbytes)

    def free(self, key: MemoryKey) -> None:
        """Free what was allocated for *key*."""
        self._note(key, FREED, -self._allocated.pop(key))

    def make(self, buffers: Sequence[int]) -> None:
        """Allocate *buffers* of the program, one after the other."""
        for buffer in buffers:
            nbytes = self._buffers[buffer].nbytes
            self._note(buffer, nbytes, nbytes)

    def unmake(self, buffer: int) -> None:
        """Free a buffer that was made for a while."""
        self._note(buffer, FREED, -self._buffers[buffer].nbytes)

    def hold(self, buffer: int) -> None:
        """Keep *buffer* beyond its operations; -1 is none."""
        if buffer >= 0:
            self._num_holders[buffer] += 1

    def let_go(self, buffer: int) -> None:
        """End one :meth:`hold`."""
        if buffer < 0:
            return
        self._num_holders[buffer] -= 1
        over_at = self._over_at.get(buffer)
        if over_at is not None and self._moment > over_at and not self._num_holders[buffer]:
            self._let_go.add(buffer)
            self.die(buffer)

    def die(self, buffer: int) -> None:
        """Free *buffer*, whose operations are over, and which nothing holds."""
        self.unmake(buffer)
        self.end_lifetime(buffer, self._buffers[buffer].birth)

    def end_with(self, operation: int, rank: int, buffer: int) -> None:
        """Let *buffer* go with *operation*, behind those that it lets go itself, by rank."""
        if operation < self._program.num_operations:
            self._ended.append((operation, rank, buffer))
        else:
            self.hold(buffer)  # until the step ends

    def end_lifetime(self, buffer: int, start: int) -> None:
        """Note that *buffer* was there from operation *start* until now."""
        moment = self._moment + len(self._moments)
        self._lifetimes.append((moment, (buffer, start, self.operation)))

    def finish(self) -> MemoryTrace:
        """Return what was on the device when; the step is over."""
        held = {buffer for buffer, number in self._num_holders.items() if number > 0}
        return MemoryTrace(
            self._program,
            self._made_again,
            {*self._kept, *self._let_go, *held},
            held,
            self._ended,
            (self._moments, self._keys, self._sizes, self._changes),
            self._lifetimes,
        )

    def _note(self, key: MemoryKey, size: int, change: int) -> None:
        self._moments.append(self._moment + len(self._moments))
        self._keys.append(key)
        self._sizes.append(size)
        self._changes.append(change)


class MemoryTrace:
    """What is on the device over a step: the peak, and, where it is asked for, all else.

    Args:
        program: the step.
        made_again: as for :class:`PredictedMemory`.
        not_with_operations: buffers that are not let go with their operations.
        held: those of them that are there when the step ends.
        ended: what is let go with another operation: that, a rank, and the buffer.
        noted: what the plan allocates and frees: when, what, bytes, change.
        lifetimes: of what the plan frees.
    """

    def __init__(
        self,
        program: StepProgram,
        made_again: Collection[int],
        not_with_operations: Collection[int],
        held: Collection[int],
        ended: Sequence[tuple[int, int, int]],
        noted: tuple[list[int], list[MemoryKey], list[int], list[int]],
        lifetimes: Sequence[tuple[int, Lifetime]],
    ) -> None:
        table, num_operations = program.table, program.num_operations
        self._program = program
        self._made_again = made_again
        self._held = held
        self._noted = noted
        self._noted_lifetimes = lifetimes
        is_made = numpy.ones(len(table.nbytes), dtype=bool)
        is_made[list(made_again)] = False
        is_let_go = is_made & (table.deaths >= 0) & (table.deaths < num_operations)
        is_let_go[list(not_with_operations)] = False
        is_made &= (table.births >= 0) & (table.births < num_operations)
        made, let_go = numpy.nonzero(is_made)[0], numpy.nonzero(is_let_go)[0]
        others = numpy.array(ended, dtype=numpy.int64).reshape(-1, 3)
        self._let_go_at = numpy.concatenate(
            [
                _moments(table.deaths[let_go], _DEATHS) + let_go,
                _moments(others[:, 0], _BETWEEN) + others[:, 1],
            ]
        )
        self._let_go = numpy.concatenate([let_go, others[:, 2]])
        inside_at = _moments(table.workspaces, _INSIDE)
        moments = numpy.concatenate(
            [
                _moments(table.births[made], _BIRTHS) + made,
                self._let_go_at,
                inside_at,
                inside_at + 1,
                numpy.array(noted[0], dtype=numpy.int64),
            ]
        )
        changes = numpy.concatenate(
            [
                table.nbytes[made],
                -table.nbytes[self._let_go],
                table.workspace_bytes,
                -table.workspace_bytes,
                numpy.array(noted[3], dtype=numpy.int64),
            ]
        )
        self._order = numpy.argsort(moments, kind="stable")
        self._made = made
        self._operations = moments[self._order] >> (_PART_BITS + _RANK_BITS)
        self._changes = changes[self._order]
        self._live_bytes = program.resident_bytes + numpy.cumsum(self._changes)
        self.peak_bytes, self.peak_at = self._peak()

    def __eq__(self, other: object) -> bool:
        """Say whether the same is on the device at each moment."""
        if not isinstance(other, MemoryTrace):
            return NotImplemented
        mine, theirs = [(each.events, each.lifetimes, each.live_bytes) for each in (self, other)]
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def _peak(self) -> tuple[int, int]:
        """Return the most bytes, and the first operation with them: something is made there."""
        program = self._program
        during = self._live_bytes[self._operations < program.num_operations]
        if len(during):
            at = int(during.argmax())
            if during[at] > program.resident_bytes:
                return int(during[at]), int(self._operations[at])
        return program.resident_bytes, 0

    @cached_property
    def events(self) -> list[MemoryEvent]:
        """What is allocated and freed, in order."""
        _, noted_keys, noted_sizes, _ = self._noted
        table = self._program.table
        workspaces: list[MemoryKey] = [(WORKSPACE, each) for each in table.workspaces.tolist()]
        keys = [*self._made.tolist(), *self._let_go.tolist(), *workspaces, *workspaces, *noted_keys]
        sizes = [
            *table.nbytes[self._made].tolist(),
            *[FREED] * len(self._let_go),
            *table.workspace_bytes.tolist(),
            *[FREED] * len(workspaces),
            *noted_sizes,
        ]
        return [(keys[each], sizes[each]) for each in self._order.tolist()]

    def columns(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return :attr:`events` as two columns: numbers in place of keys, and bytes."""
        table = self._program.table
        _, noted_keys, noted_sizes, _ = self._noted
        first = len(self._program.buffers)
        others: dict[MemoryKey, int] = {}
        for key in noted_keys:
            if not isinstance(key, int):
                others.setdefault(key, first + len(others))
        inside = first + len(others) + numpy.arange(len(table.workspaces))
        noted = [key if isinstance(key, int) else others[key] for key in noted_keys]
        num_let_go, num_inside = len(self._let_go), len(inside)
        keys = [self._made, self._let_go, inside, inside, numpy.array(noted, dtype=numpy.int64)]
        sizes = [
            table.nbytes[self._made],
            numpy.full(num_let_go, FREED),
            table.workspace_bytes,
            numpy.full(num_inside, FREED),
            numpy.array(noted_sizes, dtype=numpy.int64),
        ]
        return numpy.concatenate(keys)[self._order], numpy.concatenate(sizes)[self._order]

    @cached_property
    def lifetimes(self) -> list[Lifetime]:
        """When each buffer is there, by their ends."""
        program = self._program
        shift = _PART_BITS + _RANK_BITS
        found = list(self._noted_lifetimes)
        for moment, buffer in zip(self._let_go_at.tolist(), self._let_go.tolist(), strict=True):
            found.append((moment, (buffer, program.buffers[buffer].birth, moment >> shift)))
        found.sort(key=lambda each: each[0])
        last, held, made_again = program.num_operations, self._held, self._made_again
        return [lifetime for _, lifetime in found] + [
            (number, buffer.birth, last)
            for number, buffer in enumerate(program.buffers)
            if (buffer.death >= last or number in held) and number not in made_again
        ]

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """By operation, the most bytes since the one before, and at its end."""
        num_operations = self._program.num_operations
        live = [self._program.resident_bytes, *self._live_bytes.tolist()]
        ends = numpy.searchsorted(self._operations, numpy.arange(num_operations), side="right")
        found, start = [], 0
        is_growth = [False, *(self._changes > 0).tolist()]
        for end in ends.tolist():
            grown = [live[at] for at in range(start + 1, end + 1) if is_growth[at]]
            found.append(max([live[end], *grown]))
            start = end
        return tuple(found)
