"""Names and help of the ``--activation_offload...`` flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.settings.setting import Setting

PREFIX = "activation_offload_"

HIDDEN: Mapping[str, Any] = {"help": argparse.SUPPRESS, "nargs": "?"}
"""What HfArgumentParser hands on to argparse for a flag that is not listed."""


def flag_of(name: str) -> str:
    """Return the name of the flag, and of its field, for a field of the configuration."""
    return PREFIX + name


def flag_text(name: str) -> str:
    """Return the flag as a command line has it."""
    return f"--{flag_of(name)}"


def flags_of(config: PyAOConfig) -> str:
    """Return the flags of a script that trains with *config*."""
    words = [f"{flag_text(name)} {value}" for name, value in config.given.items()]
    return " ".join(["--activation_offload", *words])


def flag_metadata(setting: Setting) -> Mapping[str, Any]:
    """Return what HfArgumentParser hands on to argparse; the default is stated in the help."""
    # argparse formats the help with %. The empty %(default) keeps it from adding "(default: None)".
    text = setting.help(flag_text).replace("%", "%%")
    metadata = {"help": f"{text}%(default).0s", "metavar": setting.kind.metavar}
    if setting.kind.alone is not None:
        metadata |= {"nargs": "?", "const": setting.kind.alone}
    return metadata


@dataclass
class OffloadSwitches:
    """The flags that are no settings themselves."""

    activation_offload: bool = field(
        default=False,
        metadata={
            "help": "Move what backward needs from device to host memory during forward, and back "
            "in time for backward. Turn it on when activations, not weights, fill the device: a "
            "larger micro-batch or longer sequences then fit, with the same gradients."
        },
    )
    activation_offload_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON file with any of the settings below, under the same names without the "
            "prefix; PyAOConfig.to_json_file writes one. A flag given beside it wins."
            "%(default).0s",
            "metavar": "FILE",
        },
    )
