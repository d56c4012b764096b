"""The base of all kinds of settings, and those that hold names and switches."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hf_pyao.errors import ConfigError, nearest
from hf_pyao.text import echo


class Kind(abc.ABC):
    """What a setting may hold.

    *label* in its methods is the setting's name as the user gave it: a field, a flag, a variable.
    """

    flag_type: Any = str
    """Type of the field behind a flag, without its None."""
    metavar = "VALUE"
    """What stands for the value in ``--help``."""
    alone: Any = None
    """What the flag means without a value; None: it needs one."""

    @abc.abstractmethod
    def check(self, label: str, value: Any) -> Any:
        """Return *value* as the configuration holds it.

        Raises:
            ConfigError: it is of another type, or out of range.
        """

    def parse(self, label: str, text: str) -> Any:
        """Return what *text* stands for, checked.

        Raises:
            ConfigError: it stands for nothing that this setting may hold.
        """
        return self.check(label, text)

    def show(self, value: Any) -> str:
        """Return *value* as a help text states it."""
        return str(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of some names."""

    names: tuple[str, ...]
    alone: str | None = None
    """What the flag means without a value; None: it needs one."""

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """All names."""
        return "{" + ",".join(self.names) + "}"

    def check(self, label: str, value: Any) -> str:
        """Check that *value* is one of the names."""
        return _check_name(label, value, self.names)


@dataclass(frozen=True)
class Named(Kind):
    """A name from a table, or an object that has the methods of what the table makes."""

    what: str
    """The protocol, for messages."""
    names: Callable[[], Iterable[str]]
    """The table's names; asked late, since tables import torch."""
    methods: tuple[str, ...]
    """What an object must have, besides :attr:`attributes`."""
    attributes: tuple[str, ...] = ("name",)

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """All names."""
        return "{" + ",".join(self.names()) + "}"

    def check(self, label: str, value: Any) -> Any:
        """Check that *value* is a known name, or has ``name`` and all methods."""
        if isinstance(value, str | bool):
            return _check_name(label, value, tuple(self.names()))
        expected = (
            f"expected one of {', '.join(map(repr, self.names()))}, or a {self.what}: an object "
            f"with {', '.join([*self.attributes, *(f'{m}()' for m in self.methods)])}"
        )
        if isinstance(value, type):
            raise ConfigError(
                f"{label} is the class {value.__name__}; {expected}. Make one of it.",
                key="setting-value",
            )
        missing = [a for a in self.attributes if not hasattr(value, a)]
        missing += [m for m in self.methods if not callable(getattr(value, m, None))]
        if not missing and not isinstance(value.name, str):
            missing = ["name"]
        if missing:
            raise ConfigError(
                f"{label} is {echo(value)}; {expected}. It lacks {missing[0]!r}.",
                key="setting-value",
            )
        return value


class Names(Kind):
    """Several names, in order; kept as a tuple."""

    flag_type = list[str]
    metavar = "NAME"

    def check(self, label: str, value: Any) -> tuple[str, ...]:
        """Check that *value* is a list, a tuple or a set of non-empty names; a set is sorted."""
        if isinstance(value, str):
            raise ConfigError(
                f"{label} is {echo(value)}; expected a list or tuple of names, such as "
                f"({echo(value or 'mlp_act')},).",
                key="setting-value",
            )
        if not isinstance(value, Sequence | Set) or isinstance(value, bytes | bytearray):
            raise ConfigError(
                f"{label} is {echo(value)}; expected a list or tuple of names, such as "
                "('mlp_act',).",
                key="setting-value",
            )
        for name in value:
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"{label} holds {echo(name)}; expected non-empty names.", key="setting-value"
                )
        return tuple(sorted(value) if isinstance(value, Set) else value)

    def parse(self, label: str, text: str) -> tuple[str, ...]:
        """Return the names in *text*, separated by commas."""
        return self.check(label, [name.strip() for name in text.split(",")])


class Switch(Kind):
    """On or off."""

    flag_type = bool
    metavar = "BOOL"
    alone = True
    _TEXTS = dict.fromkeys(("1", "true", "yes", "on"), True)
    _TEXTS |= dict.fromkeys(("0", "false", "no", "off"), False)

    def check(self, label: str, value: Any) -> bool:
        """Check that *value* is True or False."""
        if not isinstance(value, bool):
            raise ConfigError(
                f"{label} is {echo(value)}; expected true or false.", key="setting-value"
            )
        return value

    def parse(self, label: str, text: str) -> bool:
        """Return what *text* says, in any case of letters."""
        return self.check(label, self._TEXTS.get(text.lower(), text))


@dataclass(frozen=True)
class Implied(Kind):
    """What *kind* may hold, or None: the setting is left open, and another value is implied."""

    kind: Kind
    usual: Any
    """What is implied."""
    with_long_context: Any = None
    """What ``long_context`` implies; None: the same."""

    def implied(self, *, long_context: bool) -> Any:
        """Return what the setting is where it is left open."""
        changes = long_context and self.with_long_context is not None
        return self.with_long_context if changes else self.usual

    @property
    def flag_type(self) -> Any:
        """That of *kind*."""
        return self.kind.flag_type

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """That of *kind*."""
        return self.kind.metavar

    @property
    def alone(self) -> Any:
        """That of *kind*."""
        return self.kind.alone

    def check(self, label: str, value: Any) -> Any:
        """Check by *kind* what is not None."""
        return None if value is None else self.kind.check(label, value)

    def parse(self, label: str, text: str) -> Any:
        """Read by *kind*."""
        return self.kind.parse(label, text)


def _check_name(label: str, value: object, names: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in names:
        return value
    if value is False and "off" in names:
        raise ConfigError(
            f"{label} is False; did you mean 'off'? In YAML, write it with quotes.",
            key="setting-value",
        )
    hint = nearest(value, names) if isinstance(value, str) else ""
    raise ConfigError(
        f"{label} is {echo(value)}{hint or ';'} known: {', '.join(names)}.", key="setting-value"
    )
