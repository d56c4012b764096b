"""The recipes' command line: three dataclasses, and the parser that explains them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import HfArgumentParser

from hf_pyao import PyAOTrainingArguments
from hf_pyao.errors import ConfigError, nearest, unknown_name
from hf_pyao.files import read_json_object
from hf_pyao.tools.estimate.model_sizes import DEFAULT_SIZE, MODEL_SIZES, PAPER_SIZES, find_size
from text_data import HUB_MIB, LIBRARY_MIB
from tokenization import default_cache_dir

DEFAULT_MAX_STEPS = 240
FINE_TUNING_LEARNING_RATE = 5e-5


def _option(default: Any, help: str) -> Any:
    """Make a field; one whose default is None says in *help* what happens then."""
    silence = "%(default).0s" if default is None else ""
    return field(default=default, metadata={"help": help + silence})


@dataclass
class ModelArguments:
    """Which model to train."""

    _argument_group_name = "model"

    model_name_or_path: str | None = _option(
        None,
        "Train these weights further: a model on the hub, or a folder with one (such as an "
        "--output_dir of a recipe). Any causal language model of transformers will do.",
    )
    model_size: str | None = _option(
        None,
        "Train a new model of this shape, with random weights; the names are listed at the top "
        f"(default: {DEFAULT_SIZE}, unless --model_name_or_path is given).",
    )
    tokenizer_name: str | None = _option(
        None,
        "A tokenizer on the hub, or a folder with one (default: the model's own; a new model gets "
        "a BPE trained on the text).",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = _option(
        "float32",
        "How the weights are held. float32 with --bf16 computes in bfloat16 and keeps exact "
        "weights; bfloat16 alone halves everything, weights and optimizer states too.",
    )
    attn_implementation: str | None = _option(
        None, "sdpa, eager, flash_attention_2, ... (default: transformers chooses)."
    )


@dataclass
class DataArguments:
    """Which text to train on."""

    _argument_group_name = "text"

    dataset_name: str | None = _option(
        None, "A dataset on the hub, streamed; needs the datasets library."
    )
    dataset_config_name: str | None = _option(None, "Its configuration, if it has several.")
    dataset_split: str = _option("train", "The split of it to read.")
    text_column: str = _option("text", "The column of it that holds the text.")
    train_file: str | None = _option(
        None,
        "A plain text file, UTF-8 (default: neither file nor dataset, but the sources of this "
        "Python's standard library, which every machine has).",
    )
    max_text_mib: float | None = _option(
        None,
        "Read no more text than this, in MiB (2**20 bytes; default: "
        f"{LIBRARY_MIB:g} of the standard library, {HUB_MIB:g} of a dataset, all of a file).",
    )
    block_size: int = _option(128, "Tokens in a training sample: the sequence length.")
    vocab_size: int = _option(
        4096, "Most tokens of the BPE that is trained on the text, where one is."
    )
    eval_fraction: float = _option(
        0.05, "Share of the blocks that is held out, evenly over the text, to evaluate on."
    )
    max_eval_blocks: int = _option(128, "Evaluate on at most this many of the blocks held out.")
    text_cache_dir: str | None = _option(
        None,
        "Where a trained BPE and the tokens are kept for the next run (default: "
        f"{default_cache_dir()}, which $HF_HOME, else $XDG_CACHE_HOME, moves).",
    )


@dataclass
class RecipeTrainingArguments(PyAOTrainingArguments):
    """``PyAOTrainingArguments`` with offloading on, and defaults that suit a first try."""

    _argument_group_name = "training (transformers' TrainingArguments, and offloading)"

    activation_offload: bool = _option(
        True,
        "Move what backward needs from device to host memory during forward, and back in time for "
        "backward. --no_activation_offload trains the same model to the same weights without.",
    )
    max_steps: int | None = _option(  # type: ignore[assignment]
        None,
        f"Optimizer steps (default: {DEFAULT_MAX_STEPS}, unless --num_train_epochs is given).",
    )
    num_train_epochs: float | None = _option(  # type: ignore[assignment]
        None, "Passes over the text, instead of --max_steps."
    )
    learning_rate: float | None = _option(  # type: ignore[assignment]
        None,
        "Peak learning rate (default: for a new model the one listed with its size, for loaded "
        "weights 5e-05).",
    )
    warmup_steps: int = _option(10, "Steps in which the learning rate rises to its peak.")
    logging_steps: int = _option(20, "Log the loss every so many steps.")
    logging_first_step: bool = _option(True, "Log the first step too.")
    save_steps: int = _option(120, "Write a checkpoint every so many steps.")
    save_total_limit: int | None = _option(2, "Keep this many checkpoints, the newest.")
    eval_on_start: bool = _option(
        True, "Evaluate before the first step, for the table's column 'before'."
    )
    prediction_loss_only: bool = _option(
        True, "Evaluate the loss alone, without gathering the logits."
    )
    ddp_find_unused_parameters: bool | None = _option(
        False, "Look for parameters without a gradient; none of these models has any."
    )
    report_to: str = _option("none", "Trackers to log to: tensorboard, wandb, ..., all, or none.")
    resume_from_checkpoint: str | None = _option(
        None,
        "Go on from this checkpoint folder, or with 'last' from the newest one in --output_dir. "
        "Give the other options as in the run that wrote it.",
    )

    def __post_init__(self) -> None:
        """Resolve the defaults that depend on other values or on the machine."""
        if self.max_steps is None:
            self.max_steps = DEFAULT_MAX_STEPS if self.num_train_epochs is None else -1
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0  # transformers' own; max_steps decides
        if torch.backends.mps.is_available():
            # Its memory is the host's: there is nothing to offload to.
            self.use_cpu = True
        if self.use_cpu or not torch.accelerator.is_available():
            self.dataloader_pin_memory = False
            self._count_on_a_cpu()
        super().__post_init__()

    def _count_on_a_cpu(self) -> None:
        """Offload everything, so that there is something to see: 'auto' would do nothing."""
        given: Any = self
        decides = ("policy", "config", "device_memory_gib")
        if given.activation_offload is True and all(
            getattr(given, f"activation_offload_{name}") is None for name in decides
        ):
            given.activation_offload_policy = "all"


Arguments = tuple[ModelArguments, DataArguments, RecipeTrainingArguments]


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """State the defaults, and leave the description's lines as they are."""


def parse_arguments(architecture: str, argv: Sequence[str] | None = None) -> Arguments:
    """Parse the command line of the recipe for *architecture*.

    A single argument that ends in ``.json`` names a file with the options.

    Raises:
        ConfigError: an option is unknown or bad, the size is, or the JSON file is.
        SystemExit: the command line is bad in another way, or asks for help.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    script = f"train_{architecture}"
    classes: Any = (ModelArguments, DataArguments, RecipeTrainingArguments)
    parser = HfArgumentParser(
        classes,
        prog=f"{script}.py",
        usage=f"accelerate launch recipes/{script}.py [options]",
        description=_description(architecture),
        formatter_class=_HelpFormatter,
    )
    parser.set_defaults(output_dir=f"outputs/{script}")
    if len(argv) == 1 and argv[0].endswith(".json"):
        parser.set_defaults(**_read_options(argv[0], parser))
        argv = []
    _refuse_unknown_options(argv, parser)
    given, _ = parser.parse_known_args(argv)
    if given.learning_rate is None:
        # Before the arguments are made: they hand it on to DeepSpeed at once.
        rate = _learning_rate(architecture, given.model_name_or_path, given.model_size)
        parser.set_defaults(learning_rate=rate)
    try:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses(argv)
    except ConfigError:
        raise
    except ValueError as error:  # of TrainingArguments, which looks at the machine
        reason = " ".join(str(error).split())
        raise ConfigError(f"{reason.rstrip('.')}.{_remedy(reason)}") from error
    return model_args, data_args, training_args


def _learning_rate(architecture: str, name_or_path: str | None, size: str | None) -> float:
    """Return a peak learning rate that suits the model."""
    if name_or_path is not None:
        return FINE_TUNING_LEARNING_RATE
    return find_size(architecture, size or DEFAULT_SIZE).learning_rate


def _refuse_unknown_options(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    _, unknown = parser.parse_known_args(argv)
    if not unknown:
        return
    known = [option for action in parser._actions for option in action.option_strings]
    name = unknown[0].partition("=")[0]
    raise ConfigError(
        f"unknown option {name!r}{nearest(name, known) or '.'} --help explains every option."
    )


def _remedy(reason: str) -> str:
    """Return what to do about an error of TrainingArguments, as far as we know it."""
    if "bf16" in reason and not torch.accelerator.is_available():
        return " Give --use_cpu to compute in bfloat16 on a CPU (slow), or drop --bf16."
    return " --help explains every option."


def _read_options(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    options = read_json_object(
        path, ConfigError, what="the options file", expected="--help explains every option."
    )
    known = set(vars(parser.parse_args([])))
    for name in options:
        if name not in known:
            raise unknown_name(f"option in {path!r}:", name, known)
    return options


def _description(architecture: str) -> str:
    run = f"accelerate launch recipes/train_{architecture}.py"
    sizes = "\n".join(
        f"  {name:<6} {size.summary} (learning rate {size.learning_rate:g})"
        for name, size in MODEL_SIZES[architecture].items()
    )
    return f"""\
Train a causal language model with its activations offloaded to host memory.

Without options, a tiny model learns from the sources of Python's standard library: offline, in
about two minutes on two CPU cores. At the end a table says what was learned, what autograd would
have held on the device, what it held, what was moved, and what was kept and why. On a CPU the
host stands in for the device: bytes are counted there, and none are saved.

Try
  {run}
  {run} --no_activation_offload       the same weights, without offloading
  {run} --resume_from_checkpoint last   go on where a run was stopped
  {run} --train_file my.txt --block_size 512 --num_train_epochs 1
  {run} --model_size {PAPER_SIZES[architecture]} --bf16 --block_size 512

The options that set memory and speed
  --per_device_train_batch_size   the micro-batch: raise it as far as offloading lets it fit
  --gradient_accumulation_steps   micro-batches for one optimizer step
  --block_size                    longer sequences, more activations
  --activation_offload_...        what leaves the device, and how much may be in flight

Model sizes (--model_size)
{sizes}
"""
