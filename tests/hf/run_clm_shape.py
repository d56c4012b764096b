"""A causal-LM training script in the usual shape, knowing nothing of hf_pyao.

Model from a configuration, tokenizer trained on the given text, blocks of equal length, Trainer.
test_run_clm_shape.py trains it as it stands, and with its two class names replaced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    """Which model."""

    model_type: str = field(default="opt", metadata={"help": "Architecture to train."})
    config_overrides: str = field(default="", metadata={"help": "key=value,key=value"})
    vocab_size: int = field(default=96, metadata={"help": "Size of the tokenizer's vocabulary."})


@dataclass
class DataTrainingArguments:
    """Which text."""

    train_file: str | None = field(default=None, metadata={"help": "Text to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "Text to evaluate on."})
    block_size: int = field(default=16, metadata={"help": "Tokens in one example."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where datasets keeps its files."}
    )


def parse(argv: list[str]) -> tuple[Any, ...]:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(argv) == 1 and argv[0].endswith(".json"):
        return parser.parse_json_file(argv[0])
    return parser.parse_args_into_dataclasses(argv)


def train_tokenizer(text_file: str, vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<s>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train([text_file], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def blocks_of(raw: Dataset, tokenizer: PreTrainedTokenizerFast, block_size: int) -> Dataset:
    tokenized = raw.map(
        lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]},
        batched=True,
        remove_columns=raw.column_names,
    )

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        stream = [token for row in rows["input_ids"] for token in row]
        num_tokens = len(stream) // block_size * block_size
        blocks = [stream[i : i + block_size] for i in range(0, num_tokens, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    return tokenized.map(group, batched=True)


def main() -> None:
    model_args, data_args, training_args = parse(sys.argv[1:])
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset(
        "text",
        data_files={split: file for split, file in files.items() if file},
        cache_dir=data_args.cache_dir,
    )
    tokenizer = train_tokenizer(data_args.train_file, model_args.vocab_size)
    config = CONFIG_MAPPING[model_args.model_type](
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.update_from_string(model_args.config_overrides)
    model = AutoModelForCausalLM.from_config(config)

    blocks = {
        name: blocks_of(split, tokenizer, data_args.block_size) for name, split in raw.items()
    }
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
