"""Settings that hold numbers: counts, bytes with a unit, shares."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from hf_pyao.errors import ConfigError, nearest
from hf_pyao.settings.kind import Kind
from hf_pyao.text import echo

MOST = 2**63 - 1
"""Largest whole number of a setting; as bytes, more than any machine has."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_SIZE_FORMS = (
    "a whole number of bytes, or a size such as '256MiB' (KiB, MiB, GiB, TiB: powers of 1024; KB, "
    "MB, GB, TB: of 1000)"
)


@dataclass(frozen=True)
class Count(Kind):
    """A whole number, *least* or more."""

    unit: str
    least: int = 0
    flag_type = int
    metavar = "N"

    def check(self, label: str, value: Any) -> int:
        """Check that *value* is a whole number, and no less than it may be."""
        count = _check_whole(label, value, self.unit, f"a whole number of {self.unit}")
        if count < self.least:
            expected = f"expected {self.least} or more (unit: {self.unit})"
            raise ConfigError(f"{label} is {count}; {expected}.", key="setting-value")
        return count

    def parse(self, label: str, text: str) -> int:
        """Return the number that *text* is."""
        try:
            return self.check(label, int(text))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            return self.check(label, text)


@dataclass(frozen=True)
class Size(Kind):
    """Bytes, as a number or with a unit (``"256MiB"``); kept as a whole number. Or some word."""

    words: tuple[str, ...] = ()
    # `int` comes first: HfArgumentParser takes the second member of such a union as the type to
    # parse, and "256MiB" is no number.
    flag_type = int | str
    metavar = "SIZE"

    def check(self, label: str, value: Any) -> int | str:
        """Return *value* as bytes, or as the word that it is."""
        expected = " or ".join([*map(repr, self.words), _SIZE_FORMS])
        if isinstance(value, str):
            if value in self.words:
                return value
            num_bytes = _parse_size(value)
            if num_bytes is None:
                raise ConfigError(
                    f"{label} is {echo(value)}; expected {expected}.", key="setting-value"
                )
            value = num_bytes
        return _check_whole(label, value, "bytes", expected)

    def show(self, value: Any) -> str:
        """Return the size in the largest unit that it is a whole number of."""
        if isinstance(value, int):
            for unit in ("TiB", "GiB", "MiB", "KiB"):
                if value and value % _UNITS[unit.lower()] == 0:
                    return f"{value // _UNITS[unit.lower()]}{unit}"
        return str(value)


class Amount(Kind):
    """A number of things, or their bytes with a unit (``8``, ``"2GiB"``), or None.

    Kept as it was given; digits in a text are a number of things.
    """

    flag_type = int | str
    metavar = "N|SIZE"

    def check(self, label: str, value: Any) -> int | str | None:
        """Check that *value* is a whole number, or a size with a unit."""
        expected = (
            "a whole number of tensors, such as 8, a size with a unit, such as '2GiB', or None"
        )
        if value is None:
            return None
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, str):
            if _parse_size(value) is None or value.strip()[-1:].isdigit():
                raise ConfigError(
                    f"{label} is {echo(value)}; expected {expected}.", key="setting-value"
                )
            return value.strip()
        return _check_whole(label, value, "tensors", expected)


def amount_of(value: int | str) -> tuple[int | None, int | None]:
    """Return the number of things and the bytes that a checked :class:`Amount` stands for."""
    return (value, None) if isinstance(value, int) else (None, _parse_size(value))


class Measure(Kind):
    """A number of some unit of bytes, or None."""

    flag_type = float
    unit: ClassVar[str]
    """The unit."""
    unit_text: ClassVar[str]
    """The unit, explained."""
    most: ClassVar[int]
    """Numbers from this on are refused: no machine has so many bytes."""

    def check(self, label: str, value: Any) -> float | None:
        """Check that *value* is a number that some machine could have."""
        if value is None:
            return None
        expected = f"expected a number of {self.unit_text}, or None"
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or value != value:  # NaN is no number of anything
            raise ConfigError(f"{label} is {echo(value)}; {expected}.", key="setting-value")
        if value < 0:
            raise ConfigError(
                f"{label} is {echo(value)}; it cannot be negative (unit: {self.unit}).",
                key="setting-value",
            )
        if value >= self.most:  # infinity too
            raise ConfigError(
                f"{label} is {echo(value)}; {expected}, below {self.most:,}.", key="setting-value"
            )
        return value if isinstance(value, int | float) else float(value)

    def parse(self, label: str, text: str) -> float | None:
        """Return the number that *text* is."""
        try:
            number = float(text)
        except ValueError:
            return self.check(label, text)
        return self.check(label, number)


class Gibibytes(Measure):
    """A number of GiB (2**30 bytes), or None."""

    metavar = "GIB"
    unit = "GiB"
    unit_text = "GiB (2**30 bytes)"
    most = (MOST + 1) // 2**30


class Terabytes(Measure):
    """A number of TB (10**12 bytes), the unit in which drives state what may be written to them."""

    metavar = "TB"
    unit = "TB"
    unit_text = "TB (10**12 bytes)"
    most = MOST // 10**12

    def check(self, label: str, value: Any) -> float:
        """Check that *value* is a number above zero."""
        expected = f"expected a number of {self.unit_text} above 0, such as 60"
        checked = super().check(label, value)
        if not checked:
            raise ConfigError(f"{label} is {echo(value)}; {expected}.", key="setting-value")
        return checked


@dataclass(frozen=True)
class Parts(Kind):
    """A number of parts, ``"auto"``, or ``"off"``, which one part is too."""

    unit: str
    """What the parts are called, such as tiles."""
    zero_is_off: bool = False
    flag_type = int | str
    metavar = "{off,auto,N}"

    def check(self, label: str, value: Any) -> int | str:
        """Return *value* as a number of parts above one, or as the word that it is."""
        expected = f"expected 'off', 'auto', or a whole number of {self.unit}, such as 8"
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, str):
            if value not in ("off", "auto"):
                raise ConfigError(f"{label} is {echo(value)}; {expected}.", key="setting-value")
            return value
        if value is False:
            raise ConfigError(
                f"{label} is False; did you mean 'off'? In YAML, write it in quotes.",
                key="setting-value",
            )
        count = _check_whole(label, value, self.unit, expected.removeprefix("expected "))
        if count == 0 and not self.zero_is_off:
            raise ConfigError(f"{label} is 0; {expected}.", key="setting-value")
        return "off" if count <= 1 else count


@dataclass(frozen=True)
class CountOrWord(Kind):
    """A whole number of things, zero included, or one of some words."""

    unit: str
    """What is counted, such as layers."""
    words: tuple[str, ...]
    flag_type = int | str

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """The words, and N."""
        return "{" + ",".join((*self.words, "N")) + "}"

    def check(self, label: str, value: Any) -> int | str:
        """Return *value* as a number, or as the word that it is."""
        words = ", ".join(map(repr, self.words))
        expected = f"expected {words}, or a whole number of {self.unit}, such as 8"
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, str):
            if value not in self.words:
                hint = nearest(value, self.words)
                raise ConfigError(
                    f"{label} is {echo(value)}{hint or ';'} {expected}.", key="setting-value"
                )
            return value
        if value is False and "off" in self.words:
            raise ConfigError(
                f"{label} is False; did you mean 'off'? In YAML, write it in quotes.",
                key="setting-value",
            )
        return _check_whole(label, value, self.unit, expected.removeprefix("expected "))


def _check_whole(label: str, value: object, unit: str, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{label} is {echo(value)}; expected {expected}.", key="setting-value")
    number = int(value)
    if number < 0:
        raise ConfigError(
            f"{label} is {echo(number)}; it cannot be negative (unit: {unit}).", key="setting-value"
        )
    if number > MOST:
        raise ConfigError(
            f"{label} is {echo(number)}; expected at most {MOST:,} {unit}.", key="setting-value"
        )
    return number


def _parse_size(text: str) -> int | None:
    """Return the bytes that *text* stands for, rounded down; None if it is no size."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 64 else None
    if match is None or match[2].lower() not in _UNITS:
        return None
    num_bytes = Fraction(match[1]) * _UNITS[match[2].lower()]
    is_fraction_of_byte = "." in match[1] and _UNITS[match[2].lower()] == 1
    return None if is_fraction_of_byte else int(num_bytes)
