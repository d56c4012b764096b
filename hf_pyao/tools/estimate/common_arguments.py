"""Options that several commands have: how a model is trained, on which card, where results go."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.beside_step import FUSED, IMPLEMENTATIONS
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.weights.base_names import ADAPTER_DTYPES, ALL_LINEAR, BASES, PLAIN
from hf_pyao.text import one_line, say

ENGINES = {"plain": "device", "zero2": "host"}
"""Name -> where gradients and optimizer are."""

OPTIMIZER_BYTES = {"adamw": 4, "adamw-32bit": 8, "adamw-8bit": 2, "sgd": 0}
"""Bytes of an optimizer's states for each trained parameter, where they are on the device."""


ATTENTIONS = ("flash", "cudnn")
"""Kernels of attention that may be assumed."""


def add_training_arguments(what: argparse._ArgumentGroup) -> None:
    """Add how a model is trained: LoRA, gradients, optimizer."""
    what.add_argument(
        "--lora",
        type=int,
        nargs="?",
        const=16,
        metavar="RANK",
        help="train LoRA adapters of this rank (16); needs peft",
    )
    what.add_argument(
        "--lora-targets",
        default=ALL_LINEAR,
        metavar="NAME,...",
        help="modules with adapters, as target_modules of PEFT. all-linear puts them on fused "
        "experts too, which then cannot be streamed (default: all-linear)",
    )
    what.add_argument(
        "--adapter-dtype",
        choices=ADAPTER_DTYPES,
        default=ADAPTER_DTYPES[0],
        help="float32 is PEFT's own choice, here under autocast in bfloat16 as with Trainer's "
        "bf16=True; bfloat16: autocast_adapter_dtype=False (default: float32)",
    )
    what.add_argument(
        "--base",
        choices=BASES,
        default=PLAIN,
        help="with --lora: how bitsandbytes stores linear layers but the head. nf4-double: with "
        "bnb_4bit_use_double_quant=True (default: bf16, not quantised)",
    )
    what.add_argument(
        "--engine",
        choices=ENGINES,
        default="plain",
        help="plain: gradients and optimizer are on the device. zero2: each gradient moves to the "
        "host when it is complete, and the optimizer is there (default: plain)",
    )
    what.add_argument(
        "--optimizer",
        choices=OPTIMIZER_BYTES,
        default="adamw",
        help="its states on the device, with engine plain: two moments in the dtype of what is "
        "trained (adamw), in 32 or 8 bits, or none (default: adamw)",
    )
    what.add_argument(
        "--optimizer-step",
        choices=IMPLEMENTATIONS,
        default=FUSED,
        help="torch's implementation of the optimizer on the device. fused allocates nothing more "
        "(transformers' default), foreach as much as all weights (torch's default), for-loop as "
        "much as the two largest weights (default: fused)",
    )
    what.add_argument(
        "--deterministic",
        action="store_true",
        help="torch.use_deterministic_algorithms(True): kernels of attention allocate more",
    )
    what.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="flash",
        help="the kernel of attention without a mask in 16 bits: FlashAttention-2, or cuDNN's, "
        "which torch prefers on compute capability 9.0 and 10.0 unless "
        "torch.backends.cuda.enable_cudnn_sdp(False) is called (default: flash)",
    )


def given_training(args: argparse.Namespace) -> list[str]:
    """Return the options of :func:`add_training_arguments` that are given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_training_arguments(parser.add_argument_group())
    default = vars(parser.parse_args([]))
    return [
        "--" + name.replace("_", "-")
        for name, value in default.items()
        if getattr(args, name) != value
    ]


def training_fields(
    hardware: Hardware,
    *,
    engine: str = "plain",
    optimizer: str = "adamw",
    optimizer_step: str = FUSED,
    lora_rank: int | None = None,
    lora_targets: str = ALL_LINEAR,
    adapter_dtype: str = ADAPTER_DTYPES[0],
    base: str = PLAIN,
    deterministic: bool = False,
    attention: str = "flash",
) -> dict[str, Any]:
    """Return fields of :class:`~hf_pyao.tools.estimate.fake_step.FakeTraining`, as the options
    say.

    Raises:
        ConfigError: a base is quantised and all its parameters are trained.
    """
    if base != PLAIN and lora_rank is None:
        raise ConfigError(
            f"--base is {base}, and quantised weights are not trained: give --lora.",
            key="nothing-to-stream",
        )
    optimizer_bytes = OPTIMIZER_BYTES[optimizer]
    if optimizer == "adamw" and lora_rank is not None and adapter_dtype == "float32":
        optimizer_bytes = OPTIMIZER_BYTES["adamw-32bit"]
    return {
        "training_state": ENGINES[engine],
        "optimizer_bytes": optimizer_bytes,
        "implementation": optimizer_step,
        "lora_rank": lora_rank,
        "lora_targets": lora_targets,
        "adapter_dtype": adapter_dtype,
        "base": base,
        "kernels": hardware.kernels._replace(
            is_deterministic=deterministic, prefers_cudnn=attention == "cudnn"
        ),
    }


def training_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return options of :func:`add_training_arguments` as arguments of :func:`training_fields`."""
    names = (
        *("lora_targets", "adapter_dtype", "base", "engine", "optimizer", "optimizer_step"),
        *("deterministic", "attention"),
    )
    return {"lora_rank": args.lora, **{name: getattr(args, name) for name in names}}


def training_fields_of(args: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Return fields as :func:`training_fields` does, for :func:`add_training_arguments`."""
    return training_fields(hardware, **training_options(args))


def add_allocator_argument(group: argparse._ActionsContainer) -> None:
    """Add the settings of PyTorch's allocator."""
    group.add_argument(
        "--alloc-conf",
        default="",
        metavar="SETTINGS",
        help="what PYTORCH_CUDA_ALLOC_CONF is to be, such as expandable_segments:True (default: "
        "PyTorch's default)",
    )


def add_card_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the card, its memory and its link; return their group."""
    card = parser.add_argument_group("what it is trained on")
    card.add_argument(
        *("--device", "--gpu"),
        default="rtx4070",
        metavar="NAME",
        help="a card, see below (default: rtx4070)",
    )
    card.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of the card, such as 12GiB, if another; the CUDA context is taken off",
    )
    card.add_argument(
        "--link",
        metavar="SPEED",
        help="speed of the link in each direction, such as 25GiB/s, if another",
    )
    add_disk_argument(card)
    add_allocator_argument(card)
    return card


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


def add_disk_argument(group: argparse._ActionsContainer) -> None:
    """Add ``--disk``."""
    group.add_argument(
        "--disk",
        metavar="SPEED",
        help="with streamed weights and --host-memory: a disk that has what the host has no room "
        "for, and how fast it is read, such as 3GiB/s (`pyao doctor --disk FOLDER` measures it)",
    )


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


def add_output_arguments(group: argparse._ActionsContainer) -> None:
    """Add where the result goes."""
    group.add_argument("--json", action="store_true", help="print JSON, which `pyao report` reads")
    group.add_argument("--output", type=Path, metavar="FILE.json", help="write the JSON here too")


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
        flags = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise ConfigError(
            f"{flags} has no effect with {flag}: drop one of them.", key="setting-without-effect"
        )


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Refuse options, by their names in *args*, that are given and smaller than this.

    Raises:
        ConfigError: one is.
    """
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is {value}; expected {smallest} or more.", key="setting-value"
            )
