"""Which memory a predicted step makes the caching allocator reserve, and how much it needs.

A step fits a device if the allocator serves all of its requests from what the device has left
beside the CUDA context: by :class:`~hf_pyao.plan.hardware.caching_allocator.CachingAllocator`, fed
with what :func:`~hf_pyao.plan.predict.predict.predict` says is allocated and freed. That decides
for estimates, plans and micro-batches alike.

Weights are allocated first, then a step runs, then the optimizer makes its states, then further
steps run in the segments that the first one left. Each step ends with the optimizer's: what it
allocates for a while comes beside gradients, which are freed behind it.

Two things are not known, and differ from run to run. All cases are replayed, and the worst counts:

- When the host learns that a copy to the host is done, and frees its source. In the first step the
  host is slow, and sees copies done early; in later steps it is far ahead of the device, and sees
  them late. A first step that frees early needs fewer segments, and later steps need more: they
  cut them from the large ones, of which then one is lacking.
- Which cached segments are there when training begins. Where a model is built on the device, tied
  weights were allocated once for each name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy

from hf_pyao.plan.hardware.caching_allocator import (
    LARGE_BUFFER_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BUFFER_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
    rounded,
)
from hf_pyao.plan.predict.optimizer_step import (
    gradients_of,
    optimizer_step_bytes,
    requested_bytes,
)
from hf_pyao.plan.step.prediction import Prediction, Trace
from hf_pyao.plan.step.step_program import StepProgram

NUM_STEPS = 3
"""Steps that are replayed: optimizer states come behind the first, and the third shows whether the
second left room."""

MOST_RETRIES = 4
"""Most times that cached segments may be given back within a step: each waits for the device."""

ACCURACY = 1 / 256
"""Of :attr:`StepMemory.needed_bytes`, as a share of it."""

ROUGHLY = 1 / 48
"""The same where a step is compared with a limit."""

IN_SEARCHES = 1 / 128
"""The same in a search for the largest size."""


class Reserved(NamedTuple):
    """What the allocator reserves while a step runs again and again."""

    allocated_bytes: int
    """Most bytes in use, requests rounded up."""
    reserved_bytes: int
    """Most bytes reserved."""
    num_retries: int
    """How often cached segments are given back, in the last step."""
    fits: bool
    """False: memory runs out, or retries are more than :data:`MOST_RETRIES`."""


class StepMemory:
    """The memory of a predicted step under an allocator's settings.

    Args:
        program: the step.
        late: its prediction with copies as late as can be.
        early: predicts it with the link's speed and a host that sees each copy as it is done
            (:data:`~hf_pyao.plan.hardware.host_model.IN_STEP`); None: nothing is copied.
        settings: the allocator's; None: it has none that is known, and what is allocated counts.
    """

    def __init__(
        self,
        program: StepProgram,
        late: Prediction,
        early: Callable[[], Prediction] | None,
        settings: AllocatorSettings | None,
    ) -> None:
        self.settings = settings
        later_bytes = optimizer_step_bytes(program) if program.optimizer_requests else 0
        self.peak_bytes = max(late.peak_bytes, later_bytes)
        """Most bytes of tensors, of the optimizer's step too."""
        weights = [each.nbytes for each in program.residents]
        states = _states(weights, program.resident_bytes - sum(weights))
        tied = [each.nbytes for each in program.residents for _ in range(each.num_names - 1)]
        self._residents, self._states, self._tied = (
            [rounded(nbytes) for nbytes in sizes] for sizes in (weights, states, tied)
        )
        self._program = program
        self._late = late
        self._early = early if late.offloaded_bytes else None
        self._known: dict[float, Reserved] = {}
        self._unbound: dict[int, Reserved] = {}
        """By case: what is reserved where nothing is given back."""
        self._first_tried = 0
        """The case that did not fit last: it may be the first that does not fit again."""
        self._needed_bytes: int | None = None

    def fits(self, limit_bytes: float) -> bool:
        """Say whether the step runs where *limit_bytes* may be reserved."""
        if self.settings is None or self.peak_bytes > limit_bytes:
            return self.peak_bytes <= limit_bytes
        return self.reserved(limit_bytes).fits

    def behind(self, before: Sequence[StepMemory], limit_bytes: float) -> Reserved:
        """Return what is reserved within *limit_bytes* when other steps ran *before*, in order."""
        if self.settings is None or not before:
            return self.reserved(limit_bytes)
        first, *between = (each._last for each in before)
        return self._replay(_Case(first, (), tuple(between)), self.settings, limit_bytes)[0]

    def fits_if_expandable(self, limit_bytes: float) -> bool:
        """Say whether the step does not fit as it is, and does with expandable segments."""
        settings = self.settings
        if settings is None or settings.expandable_segments or self.fits(limit_bytes):
            return False
        if self.peak_bytes > limit_bytes:
            return False
        expandable = replace(settings, expandable_segments=True)
        return all(
            self._requested_bytes(case) <= limit_bytes
            and self._replay(case, expandable, limit_bytes)[0].fits
            for case in self._cases
        )

    def reserved(self, limit_bytes: float = math.inf) -> Reserved:
        """Return what is reserved where at most *limit_bytes* may be."""
        if self.settings is None:
            return Reserved(self.peak_bytes, self.peak_bytes, 0, self.peak_bytes <= limit_bytes)
        if limit_bytes not in self._known:
            found = []
            for number in self._numbers():
                found.append(self._reserved(number, self.settings, limit_bytes))
                if not found[-1].fits:
                    self._first_tried = number
                    break
            self._known[limit_bytes] = Reserved(
                max(each.allocated_bytes for each in found),
                max(each.reserved_bytes for each in found),
                max(each.num_retries for each in found),
                all(each.fits for each in found),
            )
        return self._known[limit_bytes]

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of the cases; the others are only made if the first one fits."""
        yield self._first_tried
        yield from (each for each in range(len(self._cases)) if each != self._first_tried)

    def _reserved(self, number: int, settings: AllocatorSettings, limit_bytes: float) -> Reserved:
        """Return what is reserved in a case: replayed, where that is not known already.

        A limit changes nothing for what reserves less without giving anything back, and nothing
        fits into less than its requests.
        """
        unbound = self._unbound.get(number)
        if unbound is not None and unbound.reserved_bytes <= limit_bytes:
            return unbound
        case = self._cases[number] if number else _Case(self._last, ())
        if self._requested_bytes(case) > limit_bytes:
            return Reserved(self._requested_bytes(case), self._requested_bytes(case), 0, False)
        found, is_unbound = self._replay(case, settings, limit_bytes)
        if is_unbound:
            self._unbound[number] = found
        return found

    def _requested_bytes(self, case: _Case) -> int:
        """Return the most bytes that are asked for at once."""
        later_bytes = sum(self._states) + max(self._last.most_bytes, case.first.optimizer_bytes)
        return sum(self._residents) + max(later_bytes, case.first.most_bytes)

    @property
    def needed_bytes(self) -> int:
        """The least memory, beside the context, in which the step runs."""
        if self._needed_bytes is None:
            self._needed_bytes = self._least(ACCURACY)
        return self._needed_bytes

    def _least(self, accuracy: float) -> int:
        if self.settings is None:
            return self.peak_bytes
        most = self.reserved().reserved_bytes  # where it runs without giving anything back
        least = self.peak_bytes
        if self.fits(least):
            return least
        return self._between(least, most, accuracy)

    def _between(self, least: int, most: int, accuracy: float) -> int:
        """Return about the least limit within which the step fits, of those up to *most*."""
        while most - least > accuracy * most:
            middle = (least + most) // 2
            if self.fits(middle):
                most = middle
            else:
                least = middle
        return most

    def needed_within(self, limit_bytes: float) -> int:
        """Return about :attr:`needed_bytes`, above *limit_bytes* if the step does not fit it."""
        if self.settings is None or self.peak_bytes > limit_bytes:
            return self.peak_bytes
        about = self._least(ROUGHLY) if self._needed_bytes is None else self._needed_bytes
        if self.fits(limit_bytes):
            return int(min(about, limit_bytes))
        return int(max(about, limit_bytes + 1))

    def needed_about(self, limit_bytes: float) -> int:
        """Return about :attr:`needed_bytes`, as :meth:`needed_within`, more exactly near the limit.

        Between the peak and what is reserved within the limit; or, if the step does not fit it,
        between the limit and what is reserved without one.
        """
        if self.settings is None or self.peak_bytes > limit_bytes:
            return self.peak_bytes
        if self.fits(limit_bytes):
            least, most = self.peak_bytes, self.reserved_within(limit_bytes)
        else:
            least, most = int(limit_bytes), self.reserved().reserved_bytes
        return self._between(least, most, IN_SEARCHES)

    def reserved_about(self, limit_bytes: float) -> int:
        """Return what is reserved, above *limit_bytes* if the step does not fit it.

        Where it does not, that is what would be reserved without a limit, which may be more than
        :attr:`needed_bytes`, and takes one replay.
        """
        if self.fits(limit_bytes):
            return int(min(self.reserved_within(limit_bytes), limit_bytes))
        if self.settings is None or self.peak_bytes > limit_bytes:
            return self.peak_bytes
        return int(max(self.reserved().reserved_bytes, limit_bytes + 1))

    def reserved_within(self, limit_bytes: float) -> int:
        """Return what is reserved within *limit_bytes*; where it does not fit, without a limit."""
        found = self.reserved(limit_bytes) if self.fits(limit_bytes) else self.reserved()
        return found.reserved_bytes

    @cached_property
    def _last(self) -> _Events:
        """The step whose copies are late."""
        return _requests(self._late.trace, self._program)

    @cached_property
    def _cases(self) -> Sequence[_Case]:
        """What may come before a step whose copies are late."""
        firsts = [self._last]
        if self._early is not None:
            early = _requests(self._early().trace, self._program)
            if early != self._last:
                firsts.append(early)
        tied: list[Sequence[int]] = [[], self._tied] if self._tied else [[]]
        return [_Case(first, freed) for freed in tied for first in firsts]

    def _replay(
        self, case: _Case, settings: AllocatorSettings, limit_bytes: float
    ) -> tuple[Reserved, bool]:
        """Return what is reserved, and whether the limit made no difference."""
        is_stacked = not (self._states and case.first.gradients)
        if settings.expandable_segments and math.isinf(settings.max_split_bytes) and is_stacked:
            found = self._expandable(case)
            if found.reserved_bytes <= limit_bytes:
                return found, True
        with closing(CachingAllocator(settings, limit_bytes=limit_bytes)) as allocator:
            return self._replayed(allocator, case)

    def _replayed(self, allocator: CachingAllocator, case: _Case) -> tuple[Reserved, bool]:
        """Return what *allocator* reserves, and whether its limit made no difference."""
        num_retries = 0
        try:
            allocator.run(self._residents)
            freed = case.freed_before
            allocator.run([*freed, *(~number for number in range(len(freed)))])
            steps = [case.first, *case.between, *[self._last] * (NUM_STEPS - 1)]
            for number, step in enumerate(steps):
                before, reserved = allocator.num_retries, allocator.peak_reserved_bytes
                allocator.run(step.with_optimizer(() if number else self._states))
                num_retries = allocator.num_retries - before
                if (
                    number > len(case.between)
                    and not num_retries
                    and allocator.peak_reserved_bytes == reserved
                ):
                    break  # the next one would find the same
        except DeviceFullError:
            return Reserved(
                allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, num_retries, False
            ), False
        # Blocks that may not be split are given back without a retry, and the limit says how many
        # addresses an expandable segment has.
        settings = allocator.settings
        is_free = math.isinf(settings.max_split_bytes) and not settings.expandable_segments
        is_unbound = not allocator.num_retries or math.isinf(allocator.limit_bytes)
        return Reserved(
            allocator.peak_allocated_bytes,
            allocator.peak_reserved_bytes,
            num_retries,
            num_retries <= MOST_RETRIES,
        ), is_free and is_unbound

    def _expandable(self, case: _Case) -> Reserved:
        """Return what expandable segments come to where nothing is given back.

        Then each pool has one segment, that ends in what is not mapped. A request is served by the
        smallest hole that holds it, or else at the end, whatever is mapped there already. What a
        step adds to a segment without holes is thus the same whatever lies below, and segments
        have no holes between steps: weights and states are not freed, and states that are made
        among gradients are replayed.
        """
        residents, states = _by_pool(self._residents), _by_pool(self._states)
        freed = _by_pool(case.freed_before)
        later = states + self._last.extents
        most = residents + numpy.maximum(freed, numpy.maximum(case.first.extents, later))
        pages = numpy.array((SMALL_BUFFER_BYTES, LARGE_BUFFER_BYTES))
        freed_bytes = sum(self._residents) + sum(case.freed_before)
        return Reserved(
            max(freed_bytes, self._requested_bytes(case)),
            int((-(-most // pages) * pages).sum()),
            0,
            True,
        )


@dataclass(frozen=True)
class _Events:
    """What a step allocates and frees."""

    events: tuple[int, ...]
    """Bytes of an allocation, rounded up; or ``~number`` where the one of that number ends. Of
    forward and backward. A tuple, which the garbage collector does not walk through."""
    num_made: int
    """Allocations among them."""
    optimizer: tuple[int, ...]
    """The same of the optimizer's step, numbered by itself."""
    gradients: tuple[int, ...]
    """The ends of what is freed behind it."""
    most_bytes: int
    """Most bytes that are asked for at once, each request rounded up."""
    optimizer_bytes: int
    """The same while the optimizer steps."""

    def with_optimizer(self, states: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the events with those of the optimizer's step, which makes *states* and keeps
        them."""
        first = self.num_made + len(states)
        later = (each if each > 0 else each - first for each in self.optimizer)
        return (*self.events, *states, *later, *self.gradients)

    @cached_property
    def extents(self) -> numpy.ndarray:
        """What is added to expandable segments of small and of large blocks, in bytes."""
        settings = AllocatorSettings(expandable_segments=True)
        with closing(CachingAllocator(settings, page_bytes=MIN_BLOCK_BYTES)) as allocator:
            allocator.run(self.with_optimizer())
            return numpy.array([pool.reserved_bytes for pool in allocator.pools()])


class _Case(NamedTuple):
    """What comes before the steps that are looked at."""

    first: _Events
    """The first step."""
    freed_before: Sequence[int]
    """What was allocated behind the weights, in rounded bytes, and freed before the first step."""
    between: tuple[_Events, ...] = ()
    """Steps behind it that are others than the last."""


def _requests(trace: Trace, program: StepProgram) -> _Events:
    """Return what the allocator is asked for in a step, at whose end all that is left is freed.

    What takes no bytes is left out.
    """
    gradients = gradients_of(program)
    keys, sizes = trace.columns()
    keys, sizes = keys[sizes != 0], sizes[sizes != 0]
    is_made = sizes > 0
    sizes = -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    by_key = numpy.argsort(keys, kind="stable")
    before, after = by_key[:-1], by_key[1:]
    is_end = (keys[before] == keys[after]) & is_made[before] & ~is_made[after]
    before, after = before[is_end], after[is_end]
    numbers = numpy.cumsum(is_made) - 1
    events, changes = sizes.copy(), numpy.where(is_made, sizes, 0)
    events[after] = ~numbers[before]
    changes[after] = -sizes[before]
    is_there = is_made.copy()
    is_there[after] = True
    most_bytes = int(numpy.cumsum(changes).max(initial=0))
    is_left = is_made.copy()
    is_left[before] = False
    stays = is_left & numpy.isin(keys, list(gradients))
    left_bytes = int(sizes[stays].sum())
    optimizer = tuple(
        each if each < 0 else rounded(each) for each in program.optimizer_requests or ()
    )
    optimizer_bytes = left_bytes + requested_bytes(optimizer)
    return _Events(
        (*events[is_there].tolist(), *(~numbers[is_left & ~stays]).tolist()),
        int(is_made.sum()),
        optimizer,
        tuple((~numbers[stays]).tolist()),
        max(most_bytes, optimizer_bytes),
        optimizer_bytes,
    )


def _by_pool(sizes: Sequence[int]) -> numpy.ndarray:
    """Return how many bytes of rounded requests go to the small and to the large pool."""
    small_bytes = sum(nbytes for nbytes in sizes if nbytes <= SMALL_BYTES)
    return numpy.array((small_bytes, sum(sizes) - small_bytes))


def _states(residents: Sequence[int], nbytes: int) -> list[int]:
    """Share what is there beside the weights out over them, as an optimizer's states are.

    At most as much at a time as the weights take: AdamW has two states of each.
    """
    weights_bytes = sum(residents)
    if nbytes < MIN_BLOCK_BYTES:
        return []
    if not weights_bytes:
        return [nbytes]
    num_copies = -(-nbytes // weights_bytes)
    return [
        each * nbytes // (weights_bytes * num_copies)
        for each in residents
        for _ in range(num_copies)
    ]
