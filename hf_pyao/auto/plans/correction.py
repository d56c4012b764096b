"""Compares the times of micro-batches under a plan with the prediction, and says what was wrong.

Four predictions may be wrong: of compute, of rebuilding, of copies, and of the host. Where the
device is predicted to wait for the host, the time of all compute shows how fast that is. Elsewhere
forward rebuilds nothing, so its time shows how fast compute is; what backward takes longer is due
to rebuilding, if there is any. A single slow micro-batch shows nothing: all timed ones must differ
in the same direction. Each cause is corrected once, so that plans do not oscillate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from hf_pyao.auto.plans.batch_fit import LARGER
from hf_pyao.auto.plans.plan_timing import TimedMicroBatch, typical
from hf_pyao.plan.solve.correction import NO_CORRECTION, Correction, ExpectedTimes

OFF = 0.1
"""Share of a micro-batch by which its time may differ from its prediction, in compute and in
waiting for copies: beyond it, another plan is looked for."""

STEADY = 0.03
"""Compute whose speed differs by less than this share is as fast as it was."""

REBUILDS = 0.02
"""Share of a micro-batch that rebuilding must take to be blamed for what backward takes longer."""

LEAST_FACTOR = 0.1
"""No time is corrected to less than this share: measuring is not that sure."""

LEAST_TIMED = 2
"""Micro-batches that must have been timed: of one there is no telling whether it is noise."""

COMPUTE = "compute"
REBUILDING = "rebuilding"
COPIES = "copies"
HOST = "host"
CHECKPOINTING = "checkpointing"
"""Of what is off in all, where checkpointing should be faster: :meth:`Draft.checkpointed`."""


class Finding(NamedTuple):
    """What was off."""

    causes: frozenset[str]
    correction: Correction
    words: str


def beside(timed: Sequence[TimedMicroBatch], expected: ExpectedTimes) -> str:
    """Say what was measured beside what was predicted."""
    found = typical(timed)
    return (
        "from the first layer's forward to the end of its backward a micro-batch takes "
        f"{found.layers_ms:.1f} ms (predicted: {expected.layers_ms:.1f}): "
        f"{found.layers_ms - found.stall_ms:.1f} of compute ({expected.compute_ms:.1f}), "
        f"{found.stall_ms:.1f} of waiting for copies ({expected.stall_ms:.1f})"
    )


def find_off(
    timed: Sequence[TimedMicroBatch],
    num_elements: int,
    expected_under: Callable[[Correction], ExpectedTimes],
    copies_ms: float,
    known: frozenset[str] = frozenset(),
) -> Finding | None:
    """Return what is off in a plan's prediction; None: nothing.

    Args:
        timed: micro-batches under the plan, none larger than it was made for.
        num_elements: of the batch that it was made for.
        expected_under: returns what is predicted for the plan, times corrected further.
        copies_ms: what its copies are taken to need on the link, both ways.
        known: causes that were corrected before, which are not looked for.
    """
    if len(timed) < LEAST_TIMED:
        return None
    causes, correction, words = set(), NO_CORRECTION, []
    expected = expected_under(correction)
    found = _of_compute(timed, expected, _are_full_size(timed, num_elements))
    if found is not None:
        cause = REBUILDING if found.compute == found.backward == 1.0 else COMPUTE
        cause = cause if found.host == 1.0 else HOST
        if cause not in known:
            causes.add(cause)
            correction = found
            words.append(_compute_words(timed, expected, cause))
    if correction is not NO_CORRECTION:
        expected = expected_under(correction)  # faster compute hides less: no copy is to blame
    extra_ms = _extra_stall_ms(timed, expected)
    if extra_ms and copies_ms > 0 and COPIES not in known:
        causes.add(COPIES)
        factor = Correction(copies=(copies_ms + extra_ms) / copies_ms)
        correction = correction.times(factor)
        words.append(f"copies keep a micro-batch waiting {extra_ms:.1f} ms more than predicted")
    return Finding(frozenset(causes), correction, ", ".join(words)) if causes else None


def _are_full_size(timed: Sequence[TimedMicroBatch], num_elements: int) -> bool:
    """Say whether no micro-batch was smaller than planned for: those are faster anyway."""
    return all(each.num_elements >= num_elements / LARGER for each in timed)


def _compute_words(timed: Sequence[TimedMicroBatch], expected: ExpectedTimes, cause: str) -> str:
    what = {
        REBUILDING: "what is rebuilt makes backward take",
        HOST: "the host, which sets the pace, takes",
    }.get(cause, "compute takes")
    measured_ms = max(0.0, median(each.compute_ms for each in timed))
    return f"{what} {measured_ms / expected.compute_ms:.2f} times what was predicted"


def _of_compute(
    timed: Sequence[TimedMicroBatch], expected: ExpectedTimes, may_be_faster: bool
) -> Correction | None:
    """Return by how much compute is off; None if it is not, or if there is no telling."""
    if not all(each.forward_ms > 0 for each in timed) or expected.forward_ms <= 0:
        return None
    spare_ms = OFF * expected.layers_ms
    in_all = [each.compute_ms - expected.compute_ms for each in timed]
    in_forward = [each.compute_forward_ms - expected.forward_ms for each in timed]
    if not any(_are_off(values, spare_ms, may_be_faster) for values in (in_all, in_forward)):
        return None
    if expected.host_ms > spare_ms:
        host = median(each.compute_ms for each in timed) / expected.compute_ms
        return Correction(host=max(host, LEAST_FACTOR))
    compute = median(each.compute_forward_ms for each in timed) / expected.forward_ms
    if abs(compute - 1) < STEADY or (compute < 1 and not may_be_faster):
        compute = 1.0
    own_ms, again_ms = compute * expected.backward_ms, compute * expected.rebuild_ms
    left_ms = median(each.compute_backward_ms for each in timed) - own_ms - again_ms
    if again_ms > REBUILDS * expected.layers_ms and abs(left_ms) > spare_ms:
        return Correction(
            compute=max(compute, LEAST_FACTOR),
            rebuild=max((again_ms + left_ms) / again_ms, LEAST_FACTOR),
        )
    backward = 1 + left_ms / (own_ms + again_ms) if own_ms + again_ms > 0 else 1.0
    backward = max(backward, LEAST_FACTOR)
    return Correction(compute=max(compute, LEAST_FACTOR), backward=backward, rebuild=backward)


def _extra_stall_ms(timed: Sequence[TimedMicroBatch], expected: ExpectedTimes) -> float:
    """Return by how much longer than predicted compute waits for copies; 0: by no more than OFF."""
    extras = [each.stall_ms - expected.stall_ms for each in timed]
    return median(extras) if _are_off(extras, OFF * expected.layers_ms, False) else 0.0


def _are_off(extras_ms: Sequence[float], spare_ms: float, may_be_less: bool) -> bool:
    """Say whether all are more than *spare_ms*, or all less than minus that."""
    is_more = min(extras_ms) > spare_ms
    return is_more or (may_be_less and max(extras_ms) < -spare_ms)
