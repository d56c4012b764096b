"""What several commands make of their options: a training, a card, where results go."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.beside_step import FUSED
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.weights.base_names import ADAPTER_DTYPES, ALL_LINEAR, PLAIN
from hf_pyao.text import one_line, say
from hf_pyao.tools.option_table import flag_of

OPTIMIZER_BYTES = {"adamw": 4, "adamw-32bit": 8, "adamw-8bit": 2, "sgd": 0}
"""Bytes of an optimizer's states for each trained parameter, where they are on the device."""


def training_fields(
    hardware: Hardware,
    *,
    engine: str = "plain",
    optimizer: str = "adamw",
    optimizer_step: str = FUSED,
    lora_rank: int | None = None,
    lora_targets: str = ALL_LINEAR,
    lora_dropout: float = 0.0,
    adapter_dtype: str = ADAPTER_DTYPES[0],
    base: str = PLAIN,
    kbit_prepared: bool = False,
    dtype: str = "bfloat16",
    deterministic: bool = False,
    attention: str = "flash",
) -> dict[str, Any]:
    """Return fields of :class:`~hf_pyao.tools.estimate.fake_step.FakeTraining`, as the options
    say.

    Raises:
        ConfigError: a base is quantised and all its parameters are trained, or an option of
            adapters is given and there are none.
    """
    if lora_rank is None and (kbit_prepared or lora_dropout):
        flag = "--kbit-prepared" if kbit_prepared else "--lora-dropout"
        raise ConfigError(
            f"{flag} has no effect without --lora: give it, too.", key="setting-missing"
        )
    if not 0 <= lora_dropout < 1:
        raise ConfigError(
            f"--lora-dropout is {lora_dropout}; expected a share of 0 or more, and below 1.",
            key="setting-value",
        )
    if base != PLAIN and lora_rank is None:
        raise ConfigError(
            f"--base is {base}, and quantised weights are not trained: give --lora.",
            key="nothing-to-stream",
        )
    optimizer_bytes = OPTIMIZER_BYTES[optimizer]
    if optimizer == "adamw" and lora_rank is not None and adapter_dtype == "float32":
        optimizer_bytes = OPTIMIZER_BYTES["adamw-32bit"]
    return {
        "training_state": "host" if engine == "zero2" else "device",
        "optimizer_bytes": optimizer_bytes,
        "implementation": optimizer_step,
        "lora_rank": lora_rank,
        "lora_targets": lora_targets,
        "lora_dropout": lora_dropout,
        "adapter_dtype": "float32" if adapter_dtype == "float32" else dtype,
        "base": base,
        "is_kbit_prepared": kbit_prepared,
        "dtype": dtype,
        "kernels": hardware.kernels._replace(
            is_deterministic=deterministic, prefers_cudnn=attention == "cudnn"
        ),
    }


def training_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return options of heading ``trained`` as arguments of :func:`training_fields`."""
    names = (
        *("lora_targets", "lora_dropout", "adapter_dtype", "base", "kbit_prepared", "dtype"),
        *("engine", "optimizer", "optimizer_step", "deterministic", "attention"),
    )
    return {"lora_rank": args.lora, **{name: getattr(args, name) for name in names}}


def training_fields_of(args: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Return fields as :func:`training_fields` does, for heading ``trained``."""
    return training_fields(hardware, **training_options(args))


def hardware_of(args: argparse.Namespace) -> Hardware:
    """Return the card that the options describe.

    Raises:
        ConfigError: it is unknown, or a size or speed is none.
    """
    return hardware_with(find_hardware(args.device), args)


def hardware_with(hardware: Hardware, args: argparse.Namespace) -> Hardware:
    """Return *hardware* with the memory, the link and the disk that the options give.

    Raises:
        ConfigError: a size or speed is none.
    """
    from hf_pyao.settings.sizes import Size

    if args.device_memory is not None:
        nbytes = Size().check("--device-memory", args.device_memory)
        if int(nbytes) <= hardware.context_gib * GIB:
            raise ConfigError(
                f"--device-memory is {args.device_memory!r}, which is {int(nbytes):,} bytes; "
                f"expected more than the {hardware.context_gib} GiB that the CUDA context takes, "
                "such as 24GiB.",
                key="setting-value",
            )
        hardware = dataclasses.replace(hardware, memory_gib=int(nbytes) / GIB)
    if args.link is not None:
        hardware = hardware.with_link(link_gib_per_s(args.link))
    if getattr(args, "disk", None) is not None:  # not all commands that ask for a device have it
        hardware = hardware.with_disk(link_gib_per_s(args.disk, "--disk"))
        if args.host_memory is None:
            raise ConfigError(
                "--disk is a disk for what the host has no room for, and the host has room for "
                "everything: give --host-memory, such as 32GiB, too.",
                key="setting-missing",
            )
        host_gib = int(Size().check("--host-memory", args.host_memory)) / GIB
        hardware = dataclasses.replace(hardware, host_memory_gib=host_gib)
    return hardware


def lengths_of(args: argparse.Namespace) -> tuple[int, int] | None:
    """Return the shortest and the longest text of ``--lengths``; None where it is not given.

    Raises:
        ConfigError: it is no such pair, or there is a length of all texts too.
    """
    if args.lengths is None:
        return None
    shortest, dash, longest = args.lengths.partition("-")
    is_pair = bool(dash) and shortest.isdecimal() and longest.isdecimal()
    if not is_pair or not 2 <= int(shortest) < int(longest) or args.sequence_length is not None:
        raise ConfigError(
            f"--lengths is {args.lengths!r}; expected two numbers of tokens, such as 91-8192, and "
            "no --sequence-length beside it.",
            key="setting-value",
        )
    return int(shortest), int(longest)


def link_gib_per_s(text: str, label: str = "--link") -> float:
    """Return the speed that *label* states.

    Raises:
        ConfigError: it is none.
    """
    from hf_pyao.settings.sizes import Size

    text = text.strip()
    speed = int(Size().check(label, text.removesuffix("/s")))
    if not text.endswith("/s") or speed <= 0:
        raise ConfigError(
            f"{label} is {text!r}; expected a speed, such as 25GiB/s or 50GB/s.",
            key="setting-value",
        )
    return speed / GIB


def tell(
    report: Any, *, as_json: bool, output: Path | None, also_written: Iterable[Path] = ()
) -> None:
    """Print a document, and write it.

    Args:
        report: the document.
        as_json: print it as JSON; otherwise as tables.
        output: the JSON file to write; None: none.
        also_written: further files, which were written already.
    """
    from hf_pyao.plan.documents.schema import to_plain, write_json
    from hf_pyao.tools.report.terminal import show

    if output is not None:
        write_json(output, report)
    if as_json:
        say(json.dumps(to_plain(report), indent=2))
        return
    show(report)
    for path in (*(() if output is None else (output,)), *also_written):
        say(f"written: {one_line(str(path))}")


def refuse_without_effect(args: argparse.Namespace, names: Iterable[str], flag: str) -> None:
    """Refuse options, by their names in *args*, that are given and do nothing beside *flag*.

    Raises:
        ConfigError: one is given.
    """
    if useless := [name for name in names if getattr(args, name) not in (None, False)]:
        flags = ", ".join(map(flag_of, useless))
        raise ConfigError(
            f"{flags} has no effect with {flag}: drop one of them.", key="setting-without-effect"
        )
