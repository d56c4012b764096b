"""Options of commands that change the step itself: long context, and each part of it alone."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from hf_pyao.config import SETTINGS, PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers
from hf_pyao.tools.option_table import flag_of

if TYPE_CHECKING:
    from hf_pyao.plan.options.plan_request import PlanRequest

OFF, AUTO = "off", "auto"

LEVER_NAMES = ("long_context", *Levers.names())
"""Fields of the configuration that these options stand for. Estimates are of models that are not
compiled."""


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by name."""
    given = {name: getattr(args, name) for name in LEVER_NAMES}
    given["long_context"] = given["long_context"] or None
    return {name: value for name, value in given.items() if value is not None}


def given_levers(args: argparse.Namespace) -> list[str]:
    """Return which of these options were given, as they are written."""
    return list(map(flag_of, _given(args)))


def levers_of(args: argparse.Namespace) -> Levers:
    """Return what the options say.

    Raises:
        ConfigError: see :func:`lever_config_of`.
    """
    return Levers.of(lever_config_of(args))


def lever_config_of(args: argparse.Namespace, **more: Any) -> PyAOConfig:
    """Return the configuration of which these options are a part.

    Args:
        args: the options.
        more: further fields.

    Raises:
        ConfigError: a value is bad, or one has no effect without another.
    """
    given: dict[str, Any] = dict(more)
    for name, value in _given(args).items():
        is_text = isinstance(value, str)
        given[name] = SETTINGS[name].kind.parse(flag_of(name), value) if is_text else value
    labels = {name: flag_of(name) for name in LEVER_NAMES}
    return PyAOConfig.from_dict(given, labels)


def ends_on_host_of(args: argparse.Namespace) -> bool:
    """Return whether ``--stream-embeddings`` is on.

    Raises:
        ConfigError: it is, without ``--stream-weights``.
    """
    is_on: bool = args.stream_embeddings != OFF
    if is_on and args.stream_weights == OFF:
        raise ConfigError(
            "--stream-embeddings is on, which has no effect without --stream-weights: give that, "
            "too, as auto, or drop it.",
            key="setting-without-effect",
        )
    return is_on


def resident_blocks_of(args: argparse.Namespace, *, is_profile: bool = False) -> int | str:
    """Return ``--stream-weights``: ``"off"``, ``"auto"``, or how many blocks stay.

    Args:
        args: of the command.
        is_profile: the step is that of a profile, whatever was trained in it.

    Raises:
        ConfigError: it is none of these, or nothing is frozen.
    """
    text: str = args.stream_weights
    if text not in (OFF, AUTO) and not text.isdigit():
        raise ConfigError(
            f"--stream-weights is {text!r}; expected off, auto, or how many layers stay.",
            key="setting-value",
        )
    if text != OFF and args.lora is None and not is_profile:
        raise ConfigError(
            "--stream-weights streams frozen weights, and all parameters are trained: give --lora.",
            key="nothing-to-stream",
        )
    return int(text) if text.isdigit() else text


def binds_of(
    args: argparse.Namespace, config: PyAOConfig | None = None, *, is_profile: bool = False
) -> PlanRequest:
    """Return what binds a plan, as the options say.

    Args:
        args: of the command.
        config: what the step was run with; None: the levers among the options.
        is_profile: as for :func:`resident_blocks_of`.

    Raises:
        ConfigError: an option is bad.
    """
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.options.plan_request import PlanRequest
    from hf_pyao.settings.sizes import Size

    host_bytes = float("inf")
    if args.host_memory is not None:
        host_bytes = float(Size().check("--host-memory", args.host_memory))
    request = PlanRequest.of_config(
        lever_config_of(args) if config is None else config,
        host_limit_bytes=host_bytes,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    return dataclasses.replace(
        request,
        ends_on_host=ends_on_host_of(args),
        stream_weights=resident_blocks_of(args, is_profile=is_profile),
    )
