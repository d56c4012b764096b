"""The model and tokenizer that the options ask for: loaded, or new in one of our sizes."""

from __future__ import annotations

from typing import Any

import torch

from hf_pyao.errors import ConfigError
from hf_pyao.tools.estimate.model_sizes import DEFAULT_SIZE, build_config, find_size
from recipe_arguments import ModelArguments
from tokenization import special_ids


def check_model_arguments(architecture: str, args: ModelArguments) -> None:
    """Refuse options that cannot be, before any work.

    Raises:
        ConfigError: both a size and a name or path are given, or there is no such size.
    """
    if args.model_size is not None and args.model_name_or_path is not None:
        raise ConfigError(
            f"--model_size {args.model_size} asks for a new model, and --model_name_or_path "
            f"{args.model_name_or_path} for an existing one. Give one of them."
        )
    find_size(architecture, args.model_size or DEFAULT_SIZE)


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from the hub or a folder.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", name_or_path, error) from error


def build_model(architecture: str, args: ModelArguments, tokenizer: Any, block_size: int) -> Any:
    """Load the model, or make a new one of the size asked for.

    Raises:
        ConfigError: there is no such model or size, or the text does not suit the model.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, args.dtype)}
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    if (name_or_path := args.model_name_or_path) is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
        except (OSError, ValueError) as error:
            raise _cannot_load("model", name_or_path, error) from error
        check_fit(model.config, block_size, len(tokenizer))
    else:
        config = build_config(
            architecture,
            find_size(architecture, args.model_size or DEFAULT_SIZE),
            vocab_size=len(tokenizer),
            **special_ids(tokenizer),
        )
        check_fit(config, block_size, len(tokenizer))
        model = AutoModelForCausalLM.from_config(config, **options)
    model.config.use_cache = False  # keys and values of past tokens are of no use in training
    return model


def check_fit(config: Any, block_size: int, vocab_size: int) -> None:
    """Refuse blocks or tokens that the model has no embeddings for.

    Raises:
        ConfigError: the blocks are too long, or the vocabulary too large.
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise ConfigError(
            f"--block_size is {block_size}, and the model has {longest} positions. "
            f"Give --block_size {longest} or less."
        )
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, and the model embeds {config.vocab_size}. "
            "Give the tokenizer that belongs to the model, or a smaller --vocab_size."
        )


def _cannot_load(kind: str, name_or_path: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ConfigError(
        f"cannot load a {kind} from {name_or_path!r}: {reason} "
        "Give a name on the hub, or a folder that save_pretrained wrote."
    )
