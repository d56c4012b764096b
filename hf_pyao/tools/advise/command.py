"""``pyao advise``: which settings a training script should run with, ready to paste."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.text import describe_error, echo, one_line, say
from hf_pyao.tools.packages import need_torch

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_pyao.plan.hardware.presets import Hardware
    from hf_pyao.tools.advise.advice import Advice, AdvisedSetting
    from hf_pyao.tools.advise.script_watch import SeenTraining

DESCRIPTION = """\
Run the first steps of a training script, end it, and say which settings are worth having: which
tensor sets the peak of its memory, and three settings with the memory and time that are predicted
for each, ready to paste. The script needs no change. The kernel forbids it to write but to caches
and to a temporary folder that is deleted, where what Python writes goes. The time and the memory of
the settings are computed from one step of a copy of the model on fake tensors; nothing else is run.
An out-of-memory error of the script ends it early, and the advice is given.
"""

EPILOG = """\
examples
  pyao advise train.py --model_name_or_path ... --output_dir out
  pyao advise --gpu rtx4090 train.py -- --epochs 1    for another card; the script may run on a CPU
  pyao advise --device-memory 16GiB train.py          with less of the card's memory
  pyao advise -m my_package.train --config small.yaml
"""


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command; return 1 if the script failed.

    Raises:
        PyAOError: an option is bad, or the script has no step that can be predicted.
    """
    need_torch()
    from hf_pyao.tools.advise.redirected_writes import redirected_writes
    from hf_pyao.tools.advise.script_watch import watched

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "pyao advise looks at one process: run it without torchrun or accelerate launch. For "
            "several, pyao profile measures all ranks.",
            key="nothing-advised",
        )
    hardware = _given_hardware(args)  # refused before the script runs
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    try:
        with redirected_writes(args.script, is_forbidden=not args.unprotected):
            found = watched(args.script, arguments, args.steps, is_module=args.module)
            _say_advice(args, found, hardware)
    except PyAOError:
        raise
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        say(
            f"pyao: the script {echo(args.script)} failed before its step was seen to the end: "
            f"{one_line(describe_error(error))}. Run it without pyao to see whether it fails by "
            "itself. Under pyao advise compiled code and other processes write to caches and "
            "temporary files alone; with --unprotected they write as ever.",
            sys.stderr,
        )
        return 1
    return 0


def _given_hardware(args: argparse.Namespace) -> Hardware | None:
    """Return the card that is named; None if the script's own device is to be looked at."""
    import torch

    from hf_pyao.plan.hardware.presets import HARDWARE, find_hardware

    if args.gpu is not None:
        return find_hardware(args.gpu)
    if not torch.cuda.is_available():
        behind = ""
        if any(each.partition("=")[0] in ("--gpu", "--device") for each in args.arguments):
            behind = " What stands behind the script is the script's own: give --gpu before it."
        raise ConfigError(
            "torch sees no CUDA device here: name the card that the script is to run on, such as "
            f"--gpu rtx4090.{behind} Known: {', '.join(HARDWARE)}.",
            key="setting-missing",
        )
    return None


def _say_advice(args: argparse.Namespace, found: SeenTraining, given: Hardware | None) -> None:
    from hf_pyao.plan.hardware.device_speeds import hardware_of
    from hf_pyao.tools.advise.advice import Adviser, device_of
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.common_arguments import hardware_with

    device = device_of(found)
    if given is None and device.type == "cpu":
        raise ConfigError(
            "the model was trained on the CPU, where there is no device memory to save. Name the "
            "card that is meant: --gpu NAME.",
            key="setting-missing",
        )
    hardware = hardware_with(hardware_of(device) if given is None else given, args)
    logging.getLogger("hf_pyao").setLevel(logging.ERROR)
    adviser = Adviser(found, hardware, is_elsewhere=device.type != "cuda")
    advice = adviser.advise(card_memory(hardware).limit_bytes)
    say("\n".join(lines_of(advice, found, hardware.name)))


def lines_of(advice: Advice, found: SeenTraining, card: str) -> Iterator[str]:
    """Yield the lines that are printed."""
    plan, cause = advice.as_it_is.plan, advice.cause
    yield ""
    yield f"# Advice for {type(found.model).__name__} on {card}"
    yield ""
    held = " The gradients of earlier micro-batches are held." if advice.accumulates else ""
    ended = " The script ran out of memory." if found.ran_out_of_memory else ""
    yield f"One step with {', '.join(advice.step_shapes)}.{held}{ended}"
    yield (
        f"As it is, it takes {_gb(advice.as_it_is.memory_bytes)} and {_ms(plan.step_ms)}, where "
        f"{_gb(advice.limit_bytes)} may be reserved: it "
        f"{'fits' if plan.fits else 'does not fit'}. States of the optimizer are "
        f"{_gb(advice.state_bytes)} of it."
    )
    form = f" {cause.form}" if cause.form else ""
    yield (
        f"The peak of {_gb(plan.peak_bytes)} is in {cause.place}. What sets it is "
        f"{cause.tensor},{form} {_gb(cause.nbytes)}; without it the peak would be "
        f"{_gb(cause.next_peak_bytes)}."
    )
    yield ""
    if not any(each.plan.fits for each in advice.settings):
        is_whole = all(each.requires_grad for each in found.model.parameters())
        yield (
            "No setting fits. Those with the least memory are below; take a smaller micro-batch or "
            f"shorter sequences{', or train fewer weights (LoRA)' if is_whole else ''}."
        )
    for number, setting in enumerate(advice.settings, 1):
        yield from _setting_lines(number, setting, advice, found.trainer)
    if len(advice.settings) == 1:
        yield "No other setting that was looked at takes less memory."
    yield "Predicted, not measured: time within about 30 % where the card's speed is as assumed."


def _setting_lines(
    number: int, setting: AdvisedSetting, advice: Advice, trainer: Trainer | None
) -> Iterator[str]:
    plan, before = setting.plan, advice.as_it_is
    change = (
        f"{(plan.step_ms / before.plan.step_ms - 1) * 100:+.0f} % time"
        if (before.plan.step_ms)
        else ""
    )
    fits = "" if plan.fits else ", does not fit"
    yield (
        f"{number}. {_gb(setting.memory_bytes)}, {_ms(plan.step_ms)} ({change}){fits}: {plan.plan}"
    )
    if not setting.flags:
        yield "   Leave the script as it is."
    elif trainer is None:
        yield f"   flags (PyAOTrainer with PyAOTrainingArguments): {setting.flags}"
        yield f"   Python: attach(model, {setting.python})"
    else:
        name, arguments = type(trainer).__name__, type(trainer.args).__name__
        yield (
            f"   flags (class A(PyAOTrainerMixin, {name}) with class B(PyAOArguments, {arguments}))"
            f": {setting.flags}"
        )
        yield f"   Python: {name}(..., callbacks=[PyAOCallback({setting.python})])"
    yield ""


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _ms(time_ms: float) -> str:
    return f"{time_ms:.4g} ms"
