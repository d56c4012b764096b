"""Chooses a micro-batch at a constant global batch, the longest sequence, or the deepest model.

Time and peak of the best plan at each size are given: this is the choice alone. Peaks are taken to
grow with the size, so that nothing is asked of sizes above one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.microbatch import MicroBatchRow
from hf_pyao.plan.hardware.caching_allocator import EXPANDABLE_SEGMENTS
from hf_pyao.plan.predictor.largest import largest
from hf_pyao.plan.predictor.predictor import SizedPlan
from hf_pyao.quantities import number

FASTEST, LARGEST = "fastest", "largest"
TIE = 1e-3
"""Share by which times a sample may differ and still be equal: the smaller micro-batch is taken."""

LENGTH_STEP = 64
"""Sequence lengths are looked for in multiples of this."""

LONGEST = 2**24
"""Where the search for the longest sequence ends."""

MOST_LAYERS = 2**10
"""Where the search for the deepest model ends."""

BestAt = Callable[[int], SizedPlan]
"""The best plan at a size: within the limit if any is, else the one with the lowest peak."""


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """What was chosen among sizes."""

    chosen: MicroBatchRow | None
    """None: nothing fits."""
    rows: tuple[MicroBatchRow, ...]
    """What was looked at, by rising size."""
    reason: str
    """Why, in words."""


def divisors_of(global_batch: int) -> list[int]:
    """Return the micro-batches that divide *global_batch*, by rising size."""
    small = [size for size in range(1, int(global_batch**0.5) + 1) if global_batch % size == 0]
    return sorted({*small, *(global_batch // size for size in small)})


def accumulation_of(global_batch: int, micro_batch: int) -> int:
    """Return the micro-batches for one optimizer step.

    Raises:
        ConfigError: *micro_batch* does not divide *global_batch*; the nearest that do are named.
    """
    if micro_batch >= 1 and global_batch % micro_batch == 0:
        return global_batch // micro_batch
    divisors = divisors_of(global_batch)
    below = [size for size in divisors if size < micro_batch][-1:]
    above = [size for size in divisors if size > micro_batch][:1]
    raise ConfigError(
        f"a micro-batch of {micro_batch} does not divide the global batch of {global_batch}, which "
        f"would change; the nearest that do: {', '.join(map(str, [*below, *above]))}.",
        key="setting-value",
    )


def choose_micro_batch(
    best_at: BestAt,
    *,
    limit_bytes: float,
    global_batch: int,
    sequence_length: int,
    find: str = FASTEST,
    sizes: Sequence[int] | None = None,
) -> SizeChoice:
    """Choose among the micro-batches that divide *global_batch*.

    Args:
        best_at: the best plan at a micro-batch.
        limit_bytes: most bytes on the device.
        global_batch: samples of one optimizer step on one device.
        sequence_length: tokens of a sample.
        find: ``"fastest"``: the least time a sample, and of those within 0.1 % of it the smallest;
            ``"largest"``: the largest that fits.
        sizes: look at these alone; None: at all that divide.

    Raises:
        ConfigError: *global_batch* is not positive, one of *sizes* does not divide it, or *find* is
            another word.
    """
    if find not in (FASTEST, LARGEST):
        raise unknown_name("find", find, (FASTEST, LARGEST))
    if global_batch < 1:
        raise ConfigError(
            f"the global batch is {global_batch}; expected 1 or more samples.", key="setting-value"
        )
    asked = divisors_of(global_batch) if sizes is None else sorted(set(sizes))
    accumulations = [accumulation_of(global_batch, size) for size in asked]
    rows: list[MicroBatchRow] = []
    for size, accumulation in zip(asked, accumulations, strict=True):
        row = _row(best_at(size), size, sequence_length, accumulation)
        rows.append(row)
        if not row.fits:
            break
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return SizeChoice(chosen=None, rows=tuple(rows), reason=_nothing_fits(rows, limit_bytes))
    least_ms = min(_sample_ms(row) for row in fitting)
    fast = [row for row in fitting if _sample_ms(row) <= least_ms * (1 + TIE)]
    chosen = fast[0] if find == FASTEST else fitting[-1]
    return SizeChoice(chosen=chosen, rows=tuple(rows), reason=_why(chosen, rows, find, limit_bytes))


def longest_sequence(
    best_at: BestAt, *, limit_bytes: float, micro_batch: int, most_length: int | None = None
) -> SizeChoice:
    """Find the longest sequence that fits, in multiples of 64 tokens.

    Args:
        best_at: the best plan at a length.
        limit_bytes: most bytes on the device.
        micro_batch: samples.
        most_length: positions that the model has; None: any number.

    Raises:
        ConfigError: the model has fewer than 64 positions.
    """
    most = (LONGEST if most_length is None else most_length) // LENGTH_STEP
    if most < 1:
        raise ConfigError(
            f"the model has {most_length} positions; lengths are looked for in multiples of "
            f"{LENGTH_STEP}. Give one that has more.",
            key="length-too-long",
        )
    rows: dict[int, MicroBatchRow] = {}

    def fits(multiple: int) -> bool:
        length = multiple * LENGTH_STEP
        rows[multiple] = _row(best_at(length), micro_batch, length, None)
        return rows[multiple].fits

    left = largest(fits, most)
    found = tuple(rows[multiple] for multiple in sorted(rows))
    if left == 0:
        return SizeChoice(chosen=None, rows=found, reason=_nothing_fits(found, limit_bytes))
    chosen = rows[left]
    end = (
        f"the model has positions for no more than {most_length:,}"
        if most_length is not None and left == most
        else "looked for no longer ones"
        if left == most
        else _too_large(rows[left + 1], f"{(left + 1) * LENGTH_STEP:,} tokens")
    )
    reason = (
        f"Longest: {chosen.sequence_length:,} tokens at micro-batch {micro_batch} within "
        f"{_size(limit_bytes)}, by {chosen.plan!r} ({_memory(chosen)}, "
        f"{number(_sample_ms(chosen))} ms a sample); {end}."
    )
    return SizeChoice(chosen=chosen, rows=found, reason=reason)


def largest_model(
    best_at: BestAt,
    *,
    limit_bytes: float,
    micro_batch: int,
    sequence_length: int,
    num_parameters: Callable[[int], int],
) -> SizeChoice:
    """Find the most layers that a model may have to fit.

    Args:
        best_at: the best plan for a number of layers.
        limit_bytes: most bytes on the device.
        micro_batch: samples.
        sequence_length: tokens of each.
        num_parameters: of a model with a number of layers.
    """
    rows: dict[int, MicroBatchRow] = {}

    def fits(layers: int) -> bool:
        rows[layers] = _row(best_at(layers), micro_batch, sequence_length, None, layers)
        return rows[layers].fits

    left = largest(fits, MOST_LAYERS)
    found = tuple(rows[layers] for layers in sorted(rows))
    if left == 0:
        return SizeChoice(chosen=None, rows=found, reason=_nothing_fits(found, limit_bytes))
    chosen = rows[left]
    end = (
        "looked for no deeper ones"
        if left == MOST_LAYERS
        else _too_large(rows[left + 1], f"{left + 1} layers")
    )
    reason = (
        f"Largest: {left} layers, {number(num_parameters(left) / 1e9)} billion parameters, at "
        f"micro-batch {micro_batch} of {sequence_length:,} tokens within {_size(limit_bytes)}, by "
        f"{chosen.plan!r} ({_memory(chosen)}, {number(_sample_ms(chosen))} ms a sample); {end}."
    )
    return SizeChoice(chosen=chosen, rows=found, reason=reason)


def _row(
    found: SizedPlan,
    micro_batch: int,
    sequence_length: int,
    accumulation: int | None,
    num_layers: int | None = None,
) -> MicroBatchRow:
    return MicroBatchRow(
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        accumulation=accumulation,
        num_layers=num_layers,
        fits=found.fits,
        peak_bytes=found.peak_bytes,
        reserved_bytes=found.reserved_bytes,
        host_bytes=found.host_bytes,
        fits_if_expandable=found.fits_if_expandable,
        step_ms=found.step_ms if found.fits else None,
        plan=found.plan,
    )


def _sample_ms(row: MicroBatchRow) -> float:
    assert row.sample_ms is not None
    return row.sample_ms


def _why(
    chosen: MicroBatchRow, rows: Sequence[MicroBatchRow], find: str, limit_bytes: float
) -> str:
    fitting = [row for row in rows if row.fits]
    what = in_words(chosen.micro_batch, chosen.accumulation or 1)
    words = [
        f"{find.capitalize()}: {what}, {number(_sample_ms(chosen))} ms a sample by "
        f"{chosen.plan!r}, {_memory(chosen)} of {_size(limit_bytes)}"
    ]
    if find == FASTEST:
        others = [row for row in fitting if row.micro_batch > chosen.micro_batch][-1:]
        others += [row for row in fitting if row.micro_batch < chosen.micro_batch][-1:]
        words += [_compared(row, chosen) for row in others]
    if not rows[-1].fits:
        words.append(_too_large(rows[-1], str(rows[-1].micro_batch)))
    return "; ".join(words) + "."


def _compared(row: MicroBatchRow, chosen: MicroBatchRow) -> str:
    ratio = _sample_ms(row) / _sample_ms(chosen) - 1
    if abs(ratio) <= TIE:
        return f"{row.micro_batch} is no faster"
    return f"{row.micro_batch} takes {ratio:.1%} longer"


def _too_large(row: MicroBatchRow, what: str) -> str:
    would = f"{what} would take {_size(_needed_bytes(row))} at least"
    return f"{would}, and fits with {EXPANDABLE_SEGMENTS}" if row.fits_if_expandable else would


def _nothing_fits(rows: Sequence[MicroBatchRow], limit_bytes: float) -> str:
    row = rows[0]
    remedy = f"{EXPANDABLE_SEGMENTS}, " if row.fits_if_expandable else ""
    of_model = "" if row.num_layers is None else f"a model of {row.num_layers} layer at "
    return (
        f"Nothing fits {_size(limit_bytes)}: {of_model}micro-batch {row.micro_batch} of "
        f"{row.sequence_length:,} tokens takes {_size(_needed_bytes(row))} at least, by "
        f"{row.plan!r}. What would help: {remedy}head_loss='chunked' (--head-loss chunked), "
        "shorter sequences, LoRA, an optimizer with smaller states."
    )


def _needed_bytes(row: MicroBatchRow) -> int:
    return row.peak_bytes if row.reserved_bytes is None else row.reserved_bytes


def _memory(row: MicroBatchRow) -> str:
    """Say what is allocated at the peak, and what the allocator reserves where that is more."""
    peak = f"peak {_size(row.peak_bytes)}"
    if row.reserved_bytes is None or row.reserved_bytes <= row.peak_bytes:
        return peak
    return f"{peak}, reserved {_size(row.reserved_bytes)}"


def in_words(micro_batch: int, accumulation: int) -> str:
    """Return a micro-batch and its accumulation in words."""
    if accumulation == 1:
        return f"micro-batch {micro_batch} without accumulation"
    return f"micro-batch {micro_batch} accumulated {accumulation} times"


def _size(nbytes: float) -> str:
    return "any memory" if nbytes == float("inf") else format_bytes(int(nbytes))
