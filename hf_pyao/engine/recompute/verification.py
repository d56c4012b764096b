"""Verifies second runs: what they give to backward must have the bits of the first run.

A layer that runs again in backward may depend on something that has changed since its first run:
state in a place that this package does not look at, a clock, a file. Then it returns other tensors,
and gradients are wrong without a message. So in some forwards a fingerprint is taken of each tensor
that is dropped (see ``fingerprints``), and compared with that of the tensor that takes its place in
backward. The comparison runs on the device; :meth:`SecondRunCheck.read` waits for it, once for each
step that was checked.

[Note: Second runs that fail]
A second run may also end with an error: the layer raises, saves tensors of another shape, or finds
a state that cannot be put back. The backward that asked for it is lost. So all kinds of second runs
are watched by :meth:`SecondRuns.watch`, which notes the layer and lets the error pass. The code
that runs the micro-batch again, or the next forward, reads the note and runs each layer once.
Out-of-memory errors say nothing about the layer, and are not noted.

[Note: Unsteady layers]
Some kernels do not give the same bits twice: they add with atomic operations, in whatever order
(scattered sums in mixtures of experts). So, on an accelerator, layers run twice in the first
backward that is checked, both times from the same state. A layer whose two second runs differ from
each other is *unsteady*: its tensors are compared with a bound. Two floating tensors are then
compared by their projection on a vector of pseudo-random signs: projections of tensors that differ
by rounding alone differ by about ``eps`` times the norm, those of unrelated tensors by about the
norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_pyao.engine.recompute.fingerprints import Fingerprinter
from hf_pyao.engine.runtime.flattened_tensor import inner_tensors
from hf_pyao.text import describe_error

NUM_FIRST_FORWARDS = 3
"""Forwards with second runs that mode ``auto`` checks before it takes samples."""

PERIOD = 61
"""Then it checks one forward in so many: a prime, so that no loop of accumulation is in step."""

_BOUND = 64.0
"""Projections of unsteady layers may differ by so many ``eps`` times the norm."""

SEGMENT = "segment"
"""The layer ran again as a whole."""

TILES = "tiles"
"""Its MLP ran again tile by tile."""

REBUILT = "rebuilt"
"""Operations of it were replayed."""

_DIFFERENT, _FAR, _UNSTEADY = range(3)


class FarEnoughError(Exception):
    """Ends a second run early, since nobody asks for what it would still save. No failure."""


class Wrong(NamedTuple):
    """A layer whose second run gave backward other tensors than the first, or failed."""

    layer: str
    kind: str
    """How it ran again: :data:`SEGMENT`, :data:`TILES` or :data:`REBUILT`."""


class Noted(NamedTuple):
    """What is known of a tensor that was dropped; see :meth:`ForwardCheck.note`."""

    layer: int
    """Index of the layer's name in the check."""
    fingerprint: Tensor
    projection: Tensor | None
    """float32, (2,): projection on signs, and the norm; None if the bits alone are compared."""
    eps: float
    """Of the tensor's dtype; 0 without a projection."""


class ForwardCheck:
    """The check of one forward, made by :meth:`SecondRuns.of_forward`.

    Attributes:
        runs_twice: layers run twice in backward where they may be unsteady. What is noted has
            projections, for those that are.
    """

    def __init__(self, check: SecondRunCheck, kind: str, *, runs_twice: bool) -> None:
        self.runs_twice = runs_twice
        self._kind = kind
        self._check = check

    def note(self, layer: str, tensor: Tensor) -> Noted:
        """Return what is to be known of *tensor* of *layer*, which is dropped now.

        Runs on the device and current stream of *tensor*; the host waits for nothing.
        """
        return self._noted(self._check.index_of(Wrong(layer, self._kind)), tensor)

    def note_again(self, noted: Noted, tensor: Tensor) -> Noted:
        """Return the same of *tensor*, which a second run made where the first one was *noted*."""
        return self._noted(noted.layer, tensor, noted.projection is not None)

    def _noted(self, layer: int, tensor: Tensor, has_projection: bool | None = None) -> Noted:
        check = self._check
        if has_projection is None:
            has_projection = self.runs_twice or check.is_unsteady(layer)
            has_projection = has_projection and tensor.is_floating_point()
            # torch has no products of 8-bit floats on every device, nor of subclasses.
            has_projection = has_projection and tensor.dtype.itemsize > 1
            has_projection = has_projection and not inner_tensors(tensor)
        projection = check.fingerprints.projection(tensor) if has_projection else None
        eps = torch.finfo(tensor.dtype).eps if has_projection else 0.0
        is_compared = not _may_be_unwritten(tensor)
        fingerprint = check.fingerprints.of(tensor) if is_compared else _no_bits(tensor.device)
        return Noted(layer, fingerprint, projection, eps)

    def compare(self, first: Sequence[Noted], second: Sequence[Noted]) -> None:
        """Compare what was noted of tensors of a first run with the same of a second run.

        Runs on the device of the tensors; the host waits for nothing.
        """
        for (layer, device), (before, now) in _grouped(first, second).items():
            counters = self._check.counters_on(device, layer)
            differs = _differences(before, now)
            counters[_DIFFERENT, layer] += differs.sum()
            is_near = [_is_near(one, other) for one, other in zip(before, now, strict=True)]
            if any(near is not None for near in is_near):
                # What is no floating tensor (a mask, an index) follows from those that are.
                known = [differs[n] if near is None else near for n, near in enumerate(is_near)]
                counters[_FAR, layer] += (differs & ~torch.stack(known)).sum()

    def compare_second_runs(self, first: Sequence[Noted], second: Sequence[Noted]) -> None:
        """Compare what was noted of two second runs: it differs where a layer is unsteady."""
        for (layer, device), (before, now) in _grouped(first, second).items():
            counters = self._check.counters_on(device, layer)
            counters[_UNSTEADY, layer] += _differences(before, now).sum()


def _may_be_unwritten(tensor: Tensor) -> bool:
    """Say whether *tensor* is memory that a kernel kept for its backward and need not write.

    Its bits are no result then. So are the workspace of an LSTM, and the seed and the offset of
    an attention kernel: without dropout, torch saves them as it allocated them. With dropout they
    show in the attention's output, which is compared.
    """
    if tensor.dtype in (torch.int64, torch.uint64):
        return tensor.dim() == 0 or (tensor.dtype is torch.uint64 and tensor.numel() == 2)
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _no_bits(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def may_be_unsteady(devices: Sequence[torch.device]) -> bool:
    """Say whether kernels may give other bits in each run; *devices*: accelerators that are used.

    On a CPU they do not, nor where torch was told to use deterministic algorithms.
    """
    return bool(devices) and not torch.are_deterministic_algorithms_enabled()


_Group: TypeAlias = tuple[list[Noted], list[Noted]]


def _grouped(
    first: Sequence[Noted], second: Sequence[Noted]
) -> dict[tuple[int, torch.device], _Group]:
    """Return both by layer and device: one comparison for all tensors of a layer."""
    groups: dict[tuple[int, torch.device], _Group] = {}
    for one, other in zip(first, second, strict=True):
        before, now = groups.setdefault((one.layer, one.fingerprint.device), ([], []))
        before.append(one)
        now.append(other)
    return groups


def _differences(first: Sequence[Noted], second: Sequence[Noted]) -> Tensor:
    """Say for each tensor whether its bits differ: bool, (tensors,)."""
    before = torch.stack([each.fingerprint for each in first])
    return before != torch.stack([each.fingerprint for each in second])


def _is_near(first: Noted, second: Noted) -> Tensor | None:
    """Say whether two tensors differ by rounding alone; None if that was not noted."""
    if first.projection is None or second.projection is None:
        return None
    bound = _BOUND * first.eps * first.projection[1]
    return (second.projection[0] - first.projection[0]).abs() <= bound


class SecondRunCheck:
    """Compares what second runs give to backward with what forward dropped.

    Args:
        mode: ``"auto"``: the first forwards with second runs, and a sample of the later ones;
            ``"always"``: all of them; ``"off"``: none.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.fingerprints = Fingerprinter()
        self.num_checked = 0
        """Forwards that were checked."""
        self._layers: list[Wrong] = []
        self._indices: dict[Wrong, int] = {}
        self._unsteady: set[int] = set()
        self._counters: dict[torch.device, Tensor] = {}
        """By device, int64 of shape (3, layers): tensors that differ, differ much, and differ
        between two second runs."""
        self._is_pending = False
        self._failed: dict[Wrong, str] = {}
        """Layers whose second runs have ended with an error, and its first sentence."""

    def index_of(self, layer: Wrong) -> int:
        """Return the index under which the tensors of *layer* are counted, if they are wrong."""
        index = self._indices.get(layer)
        if index is None:
            index = self._indices[layer] = len(self._layers)
            self._layers.append(layer)
        return index

    def is_unsteady(self, layer: int) -> bool:
        """Say whether a layer is known as unsteady; see [Note: Unsteady layers]."""
        return layer in self._unsteady

    def read(self) -> tuple[Wrong, ...]:
        """Return the layers whose second runs gave other tensors since this was asked last.

        The host waits for the device if anything was compared since, else not.
        """
        if not self._is_pending:
            return ()
        self._is_pending = False
        wrong: set[int] = set()
        for counters in self._counters.values():
            different, far, unsteady = counters.tolist()
            counters.zero_()
            self._unsteady |= {index for index, count in enumerate(unsteady) if count}
            wrong |= {
                index
                for index in range(len(different))
                if (far if index in self._unsteady else different)[index]
            }
        return tuple(self._layers[index] for index in sorted(wrong))

    @property
    def has_failed(self) -> bool:
        """True if a second run has ended with an error that nobody has taken note of."""
        return bool(self._failed)

    def note_failed(self, layer: Wrong, error: Exception) -> None:
        """Note that a second run of *layer* has ended with *error*."""
        self._failed[layer] = describe_error(error).partition(". ")[0]

    def take_failed(self) -> dict[Wrong, str]:
        """Return the layers whose second runs have failed since this was asked last, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def forget(self) -> None:
        """Drop what was compared since it was read last: the micro-batch does not count."""
        self._is_pending = False
        for counters in self._counters.values():
            counters.zero_()

    @property
    def unsteady_layers(self) -> tuple[str, ...]:
        """Layers whose kernels do not give the same bits twice; see [Note: Unsteady layers]."""
        return tuple(self._layers[index].layer for index in sorted(self._unsteady))

    def counters_on(self, device: torch.device, layer: int) -> Tensor:
        """Return the counters on *device*, with room for *layer*; they will be read."""
        self._is_pending = True
        known = self._counters.get(device)
        if known is None or known.shape[1] <= layer:
            size = max(32, 2 * layer)
            grown = torch.zeros(3, size, dtype=torch.int64, device=device)
            if known is not None:
                grown[:, : known.shape[1]] = known
            known = self._counters[device] = grown
        return known


class SecondRuns:
    """One way in which layers run again: which forwards are checked, and which runs have failed.

    Args:
        check: what compares.
        kind: how layers run again.
    """

    def __init__(self, check: SecondRunCheck, kind: str) -> None:
        self._check = check
        self._kind = kind
        self._num_forwards = 0
        self._newest = -1
        self._of_newest: ForwardCheck | None = None

    @classmethod
    def unchecked(cls, kind: str) -> SecondRuns:
        """Return second runs that nobody compares, as those of a recording."""
        return cls(SecondRunCheck("off"), kind)

    @contextmanager
    def watch(self, layer: str) -> Iterator[None]:
        """Return a context for a second run of *layer*: see [Note: Second runs that fail]."""
        try:
            yield
        except (torch.OutOfMemoryError, FarEnoughError):
            raise
        except Exception as error:
            self._check.note_failed(Wrong(layer, self._kind), error)
            raise

    @property
    def num_sampled(self) -> int:
        """Forwards that were checked and that others are not like: 0 where all of them are."""
        return self._check.num_checked if self._check.mode == "auto" else 0

    def begin_anew(self) -> None:
        """Check the next forwards as the first ones: other layers run again from now on."""
        self._num_forwards = 0
        self._newest = -1

    def of_forward(self, forward: int) -> ForwardCheck | None:
        """Return the check of forward number *forward*; None if it is not checked.

        To be asked in each forward with second runs, and in no other: samples count those.
        """
        mode = self._check.mode
        if mode == "off":
            return None
        if forward != self._newest:
            self._newest = forward
            number = self._num_forwards
            self._num_forwards = number + 1
            is_first = number < NUM_FIRST_FORWARDS
            self._of_newest = None
            if mode == "always" or is_first or number % PERIOD == 0:
                self._check.num_checked += 1
                runs_twice = not number and self._kind == SEGMENT
                self._of_newest = ForwardCheck(self._check, self._kind, runs_twice=runs_twice)
            else:
                self._check.fingerprints.release()  # its memory is not in predictions
        return self._of_newest
