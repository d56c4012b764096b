"""Settings that contradict each other: checks over several fields of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.text import echo

DEFAULT_DISK_WRITE_LIMIT_TB = 60
"""What ``disk_write_limit`` is where it is not given, in TB: a tenth of what drives of 1 TB usually
endure."""


LEAST_LAYERS = {"checkpoint_nested": 2, "save_attention": 1}
"""By setting that says how layers run again: what ``checkpoint_every`` must be for it."""


LEAST_LIKELY_BYTES = 64 * 1024  # a window below it, but for 0, was meant in another unit


def check_together(values: Mapping[str, Any], label: Callable[[str], str]) -> None:
    """Refuse settings that contradict each other.

    Args:
        values: every field of a configuration, in force.
        label: how messages call a field.

    Raises:
        ConfigError: two contradict each other; says which, and what to do.
    """
    policy, modules = values["policy"], values["modules"]
    if policy == "modules" and not modules:
        raise ConfigError(
            f"{label('policy')} is 'modules', which offloads only what {label('modules')} names, "
            f"and {label('modules')} is empty: name roles such as 'mlp_act', or choose 'all'.",
            key="setting-missing",
        )
    if modules and isinstance(policy, str) and policy != "modules":
        raise ConfigError(
            f"{label('modules')} is {echo(list(modules))}, which has no effect while "
            f"{label('policy')} is {policy!r}: choose policy 'modules', or drop the names.",
            key="setting-without-effect",
        )
    every = values["checkpoint_every"]
    for name, least in LEAST_LAYERS.items():
        if values[name] and every < least:
            why = "each layer runs again by itself" if every else "nothing is run again"
            raise ConfigError(
                f"{label(name)} is on, which has no effect while {label('checkpoint_every')} is "
                f"{every}: {why} then. Give {label('checkpoint_every')}, such as {least}, or drop "
                "it.",
                key="setting-without-effect",
            )
    if values["stream_embeddings"] == "on" and values["stream_weights"] == "off":
        raise ConfigError(
            f"{label('stream_embeddings')} is 'on', which has no effect while "
            f"{label('stream_weights')} is 'off'. Give {label('stream_weights')} too: 'auto', or "
            "the number of layers whose weights stay on the device.",
            key="setting-missing",
        )
    if values["disk_path"] is None:
        _check_without_disk(values, label)
    if values["checkpoint_every"]:
        _check_against_segments(values, label)
    for name, policies, example in (
        ("budget", ("budget",), "8 (tensors) or 2GiB"),
        ("plan", ("plan", "auto", "pyao"), "plan.json"),
    ):
        given = values[name]
        if given is None and policy == name:
            raise ConfigError(
                f"{label('policy')} is {policy!r}, and {label(name)} is not given: give one, such "
                f"as {example}, or choose 'all'.",
                key="setting-missing",
            )
        if given is not None and isinstance(policy, str) and policy not in policies:
            raise ConfigError(
                f"{label(name)} is {echo(given)}, which has no effect while {label('policy')} is "
                f"{policy!r}: choose policy {policies[0]!r}, or drop it.",
                key="setting-without-effect",
            )


def _check_without_disk(values: Mapping[str, Any], label: Callable[[str], str]) -> None:
    """Refuse what has no effect without a disk."""
    for name, left_alone in (("disk_gib", None), ("disk_write_limit", DEFAULT_DISK_WRITE_LIMIT_TB)):
        if values[name] != left_alone:
            raise ConfigError(
                f"{label(name)} is {echo(values[name])}, which has no effect while "
                f"{label('disk_path')} is not given: give {label('disk_path')}, a directory on a "
                "local disk, or drop it.",
                key="setting-without-effect",
            )


def _check_against_segments(values: Mapping[str, Any], label: Callable[[str], str]) -> None:
    """Refuse what has no effect in layers that run again as a whole."""
    every = f"{label('checkpoint_every')} is {values['checkpoint_every']}"
    if values["long_context"]:
        every += f" (as {label('long_context')} has it, unless it is given)"
    if values["recompute_modules"]:
        raise ConfigError(
            f"{label('recompute_modules')} is {echo(list(values['recompute_modules']))}, which has "
            f"no effect while {every}: layers run again as a whole then. Drop the names, or give "
            f"{label('checkpoint_every')}=0.",
            key="setting-without-effect",
        )
    if values["policy"] == "pyao":
        raise ConfigError(
            f"{label('policy')} is 'pyao', which chooses parts of a layer to recompute, and "
            f"{every}: layers run again as a whole then. Choose another policy, such as 'all', or "
            f"give {label('checkpoint_every')}=0.",
            key="settings-contradict",
        )
