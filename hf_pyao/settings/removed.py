"""What earlier versions had among the settings, and what to do instead: the one table of it.

Errors of the configuration, flags, environment variables, files, plans and commands are made of it,
and a table in TROUBLESHOOTING.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_pyao.errors import ConfigError
from hf_pyao.text import echo

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Removed:
    """A setting of earlier versions, or a value of a setting."""

    setting: str
    version: str
    """The first one without it."""
    instead: str
    """What to do, as a sentence."""
    value: str | None = None
    """The value that is gone; None: the whole setting."""

    def said_of(self, label: str, value: object) -> str:
        """Return what messages say where it is given.

        Args:
            label: how messages call the setting.
            value: as it was given.
        """
        what = "this setting" if self.value is None else "this value"
        gone = f"{what} was removed in version {self.version}"
        return f"{label} is {echo(value)}; {gone}. {self.instead}"


REMOVED = (
    Removed(
        "copy_streams",
        "0.1.0",
        "It served comparisons alone: remove it, and pass "
        "attach(model, config, transport=StreamTransport(copy_streams=1)) where one is made.",
    ),
    Removed(
        "activation_memory_budget",
        "0.2.0",
        "Set torch's own, torch._functorch.config.activation_memory_budget, to a number from 0 to "
        "1 before compiled layers run first: it holds for all of them, and plans heed it.",
    ),
    Removed(
        "stream_dtype",
        "0.2.0",
        "Load the base model in autocast's dtype (from_pretrained(..., dtype=torch.bfloat16)): its "
        "weights are uploaded as they are then, in as few bytes.",
    ),
    Removed(
        "head_loss",
        "0.2.0",
        "Choose 'chunked', which needs no further package, or 'off' beside Liger's own loss "
        "(TrainingArguments(use_liger_kernel=True), or liger_kernel.transformers.apply_liger_"
        "kernel_to_llama() and its like).",
        value="liger",
    ),
)
REMOVED_SETTINGS = frozenset(each.setting for each in REMOVED if each.value is None)
"""Names of settings that are gone as a whole."""

REMOVED_OF_ZEROTH_ORDER = (
    Removed(
        "ZerothOrder.stream_embeddings",
        "0.2.0",
        "Leave it out: weights of embeddings and head stay on the device while zeroth order runs.",
    ),
    Removed(
        "zo2_order",
        "0.2.0",
        "Leave it out: noise is drawn by a counter, whatever the order in which weights are read.",
    ),
    Removed(
        "transfer_dtype",
        "0.2.0",
        "Choose 'int8', which takes a quarter of the bytes of float32, or leave it out.",
        value="bfloat16",
    ),
)
"""Settings of ``ZerothOrderSettings``, and arguments of ``ZerothOrder``."""

REMOVED_OPTIONS = (
    Removed(
        "pyao bench --board",
        "0.2.0",
        "Run python recipes/bench/board.py with the same options, in a checkout of hf_pyao: it has "
        "the methods of others that pyao bench no longer knows.",
    ),
)
"""Options of commands, which are no settings of a run."""


def removed(name: str, value: object) -> Removed | None:
    """Return the row of a setting that is given *value*; None if it is in force, or not given.

    None, False, ``"off"`` and ``"stored"`` ask for nothing: files of earlier versions have them.
    """
    if value is False or value in (None, "off", "stored"):
        return None
    rows = (*REMOVED, *REMOVED_OF_ZEROTH_ORDER)
    found = (r for r in rows if r.setting == name and r.value in (None, value))
    return next(found, None)


def refuse_removed(name: str, label: str, value: object) -> None:
    """Refuse a setting, or a value of one, that earlier versions had.

    Args:
        name: of the setting.
        label: how messages call it.
        value: as it was given.

    Raises:
        ConfigError: says since when it is gone, and what to do instead.
    """
    gone = removed(name, value)
    if gone is not None:
        raise ConfigError(gone.said_of(label, value), key="setting-removed")


def refuse_removed_options(words: Sequence[str]) -> None:
    """Refuse an option that a command had in earlier versions.

    Args:
        words: of the command line, behind ``pyao``.

    Raises:
        ConfigError: says since when it is gone, and what to do instead.
    """
    for gone in REMOVED_OPTIONS:
        _, command, option = gone.setting.split()
        if command in words[:1] and option in words:
            raise ConfigError(
                f"{gone.setting} was removed in version {gone.version}. {gone.instead}",
                key="setting-removed",
            )


def refuses_removed(cls: C) -> C:
    """Have a dataclass of settings refuse, as it is made, arguments that earlier versions took."""
    make: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(make)
    def __init__(*args: Any, **settings: Any) -> None:
        for name in {*REMOVED_SETTINGS, "zo2_order"}.intersection(settings):
            refuse_removed(name, name, settings.pop(name))
        make(*args, **settings)

    type.__setattr__(cls, "__init__", __init__)
    return cls
