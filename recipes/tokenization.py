"""A byte-level BPE trained on the recipe's own text, and the cache that keeps it.

A tokenizer of the right language is part of a language model; training one on the text at hand
takes seconds, works offline, and spends no vocabulary on words that never come.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_pyao.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
_CACHE_FORMAT = 1
_MIN_VOCAB_SIZE = 256 + 2  # every byte, and the two special tokens


def default_cache_dir() -> Path:
    """Return ``$HF_HOME/hf_pyao``, else ``$XDG_CACHE_HOME/hf_pyao``, else ``~/.cache/hf_pyao``."""
    if hf_home := os.environ.get("HF_HOME"):
        return Path(hf_home).expanduser() / "hf_pyao"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_pyao"


def tokenize_with_own_bpe(
    documents: Sequence[str], vocab_size: int, cache_dir: Path | None = None
) -> tuple[PreTrainedTokenizerFast, npt.NDArray[np.int32]]:
    """Train a BPE on *documents*; return it and their tokens, from the cache where it has them.

    A damaged cache file is replaced, and a cache that cannot be written is done without.

    Args:
        documents: the texts.
        vocab_size: most tokens of the BPE, the two special ones included; a short text gives fewer.
        cache_dir: where to keep the result; None for :func:`default_cache_dir`.

    Returns:
        The tokenizer, and the tokens of all documents, shape (num_tokens,), each document followed
        by an end-of-text token.

    Raises:
        ConfigError: *vocab_size* is too small for a byte-level BPE.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab_size is {vocab_size}; a byte-level BPE needs at least {_MIN_VOCAB_SIZE}."
        )
    cache_dir = cache_dir if cache_dir is not None else default_cache_dir()
    path = cache_dir / f"bpe-{_cache_key(documents, vocab_size)}.npz"
    if (cached := _load(path)) is not None:
        return cached
    tokenizer = _train_bpe(documents, vocab_size)
    tokens = tokenize(tokenizer, documents)
    _save(path, tokenizer, tokens)
    return tokenizer, tokens


def tokenize(tokenizer: Any, documents: Sequence[str]) -> npt.NDArray[np.int32]:
    """Return the tokens of all documents, shape (num_tokens,), end-of-text after each.

    A tokenizer without an end-of-text token adds none.
    """
    # verbose=False: that a whole document is longer than the model's context is expected.
    encoded = tokenizer(
        list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.concatenate([np.asarray([*ids, *end], dtype=np.int32) for ids in encoded])


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, under their names in a model's config."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: value for name in names if (value := getattr(tokenizer, name)) is not None}


def _train_bpe(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        # Sorted, for the alphabet comes in an order of its own in every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return _wrap(bpe)


def _wrap(bpe: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING
    )


def _cache_key(documents: Sequence[str], vocab_size: int) -> str:
    """Hash everything that the result depends on."""
    from tokenizers import __version__ as tokenizers_version

    versions = (_CACHE_FORMAT, platform.python_version(), tokenizers_version, vocab_size)
    digest = hashlib.sha256(repr(versions).encode())
    for document in documents:
        data = document.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _load(path: Path) -> tuple[PreTrainedTokenizerFast, npt.NDArray[np.int32]] | None:
    """Return what *path* holds; None if it is absent or damaged."""
    from tokenizers import Tokenizer

    try:
        # A zip file carries checksums: reading it through is the check.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tokens, bpe_json = archive["tokens"], archive["bpe_json"]
        bpe = Tokenizer.from_str(bpe_json.tobytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except Exception as error:  # damage shows as whatever the parser stumbled over
        logger.warning("the cached tokens in %s are damaged (%s); making them again", path, error)
        return None
    return _wrap(bpe), tokens


def _save(path: Path, tokenizer: PreTrainedTokenizerFast, tokens: npt.NDArray[np.int32]) -> None:
    """Write all or nothing: other processes may be reading, or writing the same."""
    bpe_json = np.frombuffer(tokenizer.backend_tokenizer.to_str().encode("utf-8"), dtype=np.uint8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                np.savez(file, tokens=tokens, bpe_json=bpe_json)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        logger.warning("cannot keep the tokens in %s (%s); going on without", path.parent, error)
