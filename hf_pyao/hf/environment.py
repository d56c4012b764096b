"""Settings from the environment: ``PYAO_<FIELD>``, which ``accelerate launch`` passes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_pyao.errors import unknown_name
from hf_pyao.settings.kind import Kind
from hf_pyao.settings.removed import REMOVED_SETTINGS, refuse_removed

ENV_PREFIX = "PYAO_"
"""Put before a setting's name in capitals."""

_OTHERS = "PYAO_BENCH_"
"""Begins the variables that are no settings: those of ``pyao bench``."""


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def read_environment(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the settings that the environment gives, checked one by one, by name.

    An empty variable counts as absent.

    Raises:
        ConfigError: a value is bad, or a variable is no setting; the nearest one is named.
    """
    names = {variable_of(name): name for name in kinds}
    given = {}
    for variable, text in os.environ.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_OTHERS):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        refuse_removed(name, variable, text.strip() or None)
        if name in REMOVED_SETTINGS:
            continue
        if variable not in names:
            raise unknown_name("environment variable", variable, names)
        if text.strip():
            given[name] = kinds[name].parse(variable, text.strip())
    return given
