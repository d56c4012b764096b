"""A setting: declared as a field of a configuration, found, and shown in help texts.

A field is declared once, by :func:`setting`, with its default, its *kind* and its help. The kind
checks values, reads texts (environment variables) and says which type a command-line flag has. So
configuration, flags, environment and help cannot disagree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_pyao.settings.kind import Kind
from hf_pyao.settings.removed import refuse_removed


@dataclass(frozen=True)
class Setting:
    """A field of a configuration."""

    name: str
    default: Any
    kind: Kind
    text: str
    """What it does; ``{name}`` stands for another setting, as the reader knows it."""

    def help(self, label: Callable[[str], str]) -> str:
        """Return what it does, and the default; *label* gives settings the names to use."""
        text = re.sub(r"\{(\w+)\}", lambda match: label(match[1]), self.text)
        return text if self.default in (None, ()) else f"{text} (default: {self.shown_default})"

    def check(self, label: str, value: Any) -> Any:
        """Return *value* as the configuration holds it.

        Raises:
            ConfigError: earlier versions had it, or it is of another type, or out of range.
        """
        refuse_removed(self.name, label, value)
        return self.kind.check(label, value)

    @property
    def shown_default(self) -> str:
        """The default, as a help text states it."""
        return self.kind.show(self.default)


def setting(default: Any, kind: Kind, text: str) -> Any:
    """Declare a dataclass field as a setting; *text* is :attr:`Setting.text`."""
    return dataclasses.field(default=default, metadata={"kind": kind, "text": text})


def settings_of(cls: type) -> Mapping[str, Setting]:
    """Return the settings that a dataclass declares, in order."""
    return {
        f.name: Setting(f.name, f.default, f.metadata["kind"], f.metadata["text"])
        for f in dataclasses.fields(cls)
        if "kind" in f.metadata
    }
