"""Budgets of a sweep: how they are written, in which order they run, what they yield."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.sweep import (
    BYTES,
    TENSORS,
    SweepPoint,
    SweepReport,
    drift_of,
    equality_of,
    noise_of,
    rows_of,
)
from hf_pyao.plan.paper.knee import Point, find_knee
from hf_pyao.settings.sizes import Amount, amount_of
from hf_pyao.text import echo

DEFAULT_BUDGETS = "0,1,2,4,8,16,32"
MOST_BUDGETS = 1000
"""More than anyone waits for."""

_FORMS = "a list such as 0,1,2,4,8, a range such as 0:48:4, or sizes such as 0,256MiB,1GiB"


@dataclass(frozen=True)
class Budgets:
    """What a sweep goes over."""

    values: tuple[int, ...]
    """Rising, each once, 0 among them."""
    are: str
    """:data:`~hf_pyao.plan.documents.sweep.TENSORS` or ``BYTES``."""

    def setting(self, value: int) -> int | str:
        """Return *value* as ``PyAOConfig.budget`` takes it."""
        return value if self.are == TENSORS else f"{value}B"


def parse_budgets(text: str) -> Budgets:
    """Return the budgets that *text* lists; 0 is among them in any case: the others need it.

    Args:
        text: numbers of tensors or sizes with units, separated by commas; or ``first:last:step``.

    Raises:
        ConfigError: it lists none, a negative one or something else, or mixes numbers and sizes.
    """
    if ":" in text:
        return Budgets(tuple(sorted({0, *_range(text)})), TENSORS)
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise ConfigError(f"--budgets is empty; expected {_FORMS}.", key="setting-value")
    counts: list[int] = []
    sizes: list[int] = []
    for word in words:
        num_tensors, num_bytes = _amount(word)
        if num_bytes is not None:
            sizes.append(num_bytes)
        elif num_tensors:
            counts.append(num_tensors)
    if counts and sizes:
        raise ConfigError(
            f"--budgets {echo(text)} mixes numbers of tensors and sizes, which no one curve can "
            "show. Give two sweeps, one of each kind.",
            key="setting-value",
        )
    values = {0, *counts, *sizes}
    _check_number_of(len(values))
    return Budgets(tuple(sorted(values)), BYTES if sizes else TENSORS)


def _amount(word: str) -> tuple[int | None, int | None]:
    if word.startswith("-"):
        raise ConfigError(
            f"--budgets holds {echo(word)}; a budget cannot be negative.", key="setting-value"
        )
    if not word:
        raise ConfigError(
            f"--budgets holds nothing between two commas; expected {_FORMS}.", key="setting-value"
        )
    checked = Amount().check("a budget of --budgets", word)
    assert checked is not None
    return amount_of(checked)


def _range(text: str) -> range:
    try:
        first, last, step = (int(part) for part in (*text.split(":"), "1")[:3])
        if text.count(":") > 2:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"--budgets is {echo(text)}; expected {_FORMS}.", key="setting-value"
        ) from error
    if first < 0 or last < first or step < 1:
        raise ConfigError(
            f"--budgets is {echo(text)}; a range is first:last:step, with 0 <= first <= last and a "
            "step of 1 or more; the last is among them.",
            key="setting-value",
        )
    found = range(first, last + 1, step)
    _check_number_of(len(found))
    return found


def _check_number_of(budgets: int) -> None:
    if budgets > MOST_BUDGETS:
        raise ConfigError(
            f"--budgets lists {budgets:,} budgets; expected {MOST_BUDGETS} at most.",
            key="setting-value",
        )


def order_of(budgets: Budgets, seed: int, order_seed: int) -> list[int]:
    """Return the budgets in the order in which they run with *seed*.

    0 comes first and again last: what differs between the two is the machine's. The others are
    shuffled, anew for each seed, so that a machine that slows down makes no slope.
    """
    others = [value for value in budgets.values if value]
    random.Random(f"{order_seed}, {seed}").shuffle(others)
    return [0, *others, 0]


def with_points(report: SweepReport, points: Sequence[SweepPoint]) -> SweepReport:
    """Return *report* with *points*, and all that follows from them."""
    rows = rows_of(points)
    are_losses_equal, are_gradients_equal = equality_of(points)
    noise = noise_of(rows)
    known = [row for row in rows if row.memory_bytes and row.tokens_per_s]
    knee = find_knee(
        [
            Point(row.memory_bytes.mean, row.tokens_per_s.mean)
            for row in known
            if row.memory_bytes and row.tokens_per_s
        ],
        noise or 0.0,
    )
    return dataclasses.replace(
        report,
        rows=rows,
        points=list(points),
        are_losses_equal=are_losses_equal,
        are_gradients_equal=are_gradients_equal,
        noise_tokens_per_s=noise,
        drift=drift_of(points),
        knee=None if knee.position is None else known[knee.position].budget,
        knee_reason=knee.reason,
    )
