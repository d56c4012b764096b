"""What the ``train_*.py`` recipes share: text, model, ``PyAOTrainer``, and the table at the end.

Read :func:`run` first; it is the whole recipe. With offloading, ``PyAOTrainer`` and
``RecipeTrainingArguments`` stand where ``Trainer`` and ``TrainingArguments`` would.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_pyao.errors import ConfigError
from hf_pyao.tools.estimate.model_sizes import DEFAULT_SIZE
from recipe_arguments import (
    Arguments,
    DataArguments,
    ModelArguments,
    RecipeTrainingArguments,
    parse_arguments,
)
from recipe_model import build_model, check_model_arguments, load_tokenizer
from recipe_process import run_recipe
from run_summary import RunObserver, RunSummary, format_summary
from text_data import (
    HUB_MIB,
    LIBRARY_MIB,
    Blocks,
    Corpus,
    hub_dataset,
    split_blocks,
    standard_library,
    text_file,
)
from tokenization import tokenize, tokenize_with_own_bpe

STATE_FILE = "trainer_state.json"
"""What makes a folder a checkpoint of a Trainer."""


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """Text made ready for one tokenizer."""

    corpus: Corpus
    tokenizer: Any
    train_blocks: Blocks
    eval_blocks: Blocks


def main(architecture: str) -> None:
    """Run the recipe for *architecture* (transformers' ``model_type``)."""
    run_recipe(lambda: run(architecture, parse_arguments(architecture)))


def run(architecture: str, arguments: Arguments) -> None:
    """Train as the arguments say, and print the table.

    Raises:
        PyAOError: a setting cannot be.
    """
    from transformers import default_data_collator, set_seed

    from hf_pyao import PyAOTrainer

    model_args, data_args, training_args = arguments
    check_model_arguments(architecture, model_args)
    # One process of a machine tokenises, the others find the result in the cache.
    with training_args.main_process_first(desc="tokenising"):
        text = prepare_text(model_args, data_args)
    set_seed(training_args.seed)
    model = build_model(architecture, model_args, text.tokenizer, data_args.block_size)
    checkpoint = find_checkpoint(training_args, model.config)

    observer = RunObserver()
    trainer = PyAOTrainer(
        model=model,
        args=training_args,
        train_dataset=text.train_blocks,
        eval_dataset=text.eval_blocks,
        processing_class=text.tokenizer,
        data_collator=default_data_collator,
        callbacks=[observer],
    )
    observer.trainer = trainer
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    evaluated = trainer.evaluate()
    offload_metrics = trainer.offload_metrics
    trainer.save_metrics("train", {**trained.metrics, **offload_metrics})
    trainer.save_metrics("eval", evaluated)

    if trainer.is_world_process_zero():
        summary = RunSummary(
            title=describe(architecture, model_args, model, text),
            device_name=device_name(training_args.device),
            num_processes=training_args.world_size,
            # Not the one asked for: --auto_find_batch_size may have settled on a smaller one.
            micro_batch=trainer.state.train_batch_size or training_args.per_device_train_batch_size,
            block_size=data_args.block_size,
            loss_before=observer.loss_before,
            loss_after=evaluated["eval_loss"],
            step_ms=tuple(observer.step_ms),
            device_peak_bytes=observer.device_peak_bytes,
            offload_metrics=offload_metrics,
            head_loss_metrics=observer.head_loss_metrics,
        )
        print(format_summary(summary))
        print(f"results in {training_args.output_dir}")


def prepare_text(model_args: ModelArguments, args: DataArguments) -> TrainingText:
    """Read the text, tokenise it, and cut it into blocks.

    Raises:
        ConfigError: the text or the tokenizer cannot be had, or a setting is bad.
    """
    corpus = read_corpus(args)
    tokenizer_name = model_args.tokenizer_name or model_args.model_name_or_path
    if tokenizer_name is None:
        cache_dir = None if args.text_cache_dir is None else Path(args.text_cache_dir)
        tokenizer, tokens = tokenize_with_own_bpe(corpus.documents, args.vocab_size, cache_dir)
    else:
        tokenizer = load_tokenizer(tokenizer_name)
        tokens = tokenize(tokenizer, corpus.documents)
    train_blocks, eval_blocks = split_blocks(
        tokens,
        block_size=args.block_size,
        eval_fraction=args.eval_fraction,
        max_eval_blocks=args.max_eval_blocks,
    )
    return TrainingText(
        corpus=corpus, tokenizer=tokenizer, train_blocks=train_blocks, eval_blocks=eval_blocks
    )


def read_corpus(args: DataArguments) -> Corpus:
    """Return the text that the options ask for.

    Raises:
        ConfigError: the options contradict each other, or the text cannot be read.
    """
    if args.dataset_name is not None and args.train_file is not None:
        raise ConfigError("--dataset_name and --train_file are both given. Give one of them.")
    if args.max_text_mib is not None and not args.max_text_mib > 0:
        raise ConfigError(f"--max_text_mib is {args.max_text_mib}; expected more than 0.")
    if args.train_file is not None:
        return text_file(args.train_file, args.max_text_mib)
    if args.dataset_name is not None:
        return hub_dataset(
            args.dataset_name,
            config=args.dataset_config_name,
            split=args.dataset_split,
            column=args.text_column,
            max_mib=args.max_text_mib or HUB_MIB,
        )
    return standard_library(args.max_text_mib or LIBRARY_MIB)


def find_checkpoint(args: RecipeTrainingArguments, config: Any) -> str | None:
    """Return the checkpoint folder to go on from; None to start anew.

    Raises:
        ConfigError: the folder holds no checkpoint, or one of another model.
    """
    from transformers.trainer_utils import get_last_checkpoint

    path = args.resume_from_checkpoint
    if path is None:
        return None
    output_dir = str(args.output_dir)
    last = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if path == "last":
        if last is None:
            raise ConfigError(
                f"there is no checkpoint in --output_dir {output_dir!r} to go on from."
            )
        path = last
    if not (Path(path) / STATE_FILE).is_file():
        hint = f"The newest in --output_dir is {last!r}." if last else "Give a checkpoint-N folder."
        raise ConfigError(
            f"--resume_from_checkpoint {path!r} is no checkpoint of a Trainer. {hint}"
        )
    check_checkpoint(path, args, config)
    return path


def check_checkpoint(path: str, args: RecipeTrainingArguments, config: Any) -> None:
    """Refuse a checkpoint that is of another model, or at the end of its training.

    Raises:
        ConfigError: it is.
    """
    from transformers import AutoConfig, TrainerState

    num_steps = TrainerState.load_from_json(str(Path(path) / STATE_FILE)).global_step
    if 0 < (args.max_steps or -1) <= num_steps:
        raise ConfigError(
            f"the checkpoint {path!r} is of step {num_steps}, and --max_steps is "
            f"{args.max_steps}: no step is left. Raise --max_steps."
        )
    saved = AutoConfig.from_pretrained(path)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        theirs, ours = (getattr(c, name, None) for c in (saved, config))
        if theirs != ours:
            raise ConfigError(
                f"the checkpoint {path!r} has {name} {theirs!r}, and this run's model {ours!r}. "
                "Give the options of the run that wrote it."
            )


def describe(architecture: str, model_args: ModelArguments, model: Any, text: TrainingText) -> str:
    """Say in two lines what was trained on what."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    name = (
        model_args.model_name_or_path or f"{architecture} {model_args.model_size or DEFAULT_SIZE}"
    )
    return (
        f"{name}: {num_parameters / 1e6:,.1f} million parameters, {model_args.dtype}\n"
        f"on {text.corpus.name}: {len(text.train_blocks)} blocks to train on, "
        f"{len(text.eval_blocks)} to evaluate on"
    )


def device_name(device: torch.device) -> str | None:
    """Return what an accelerator calls itself; None for a CPU."""
    if device.type == "cpu":
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))
