"""The BPE of a text, and its cache: whatever happens to the file, the tokens are right."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tokenization import END_OF_TEXT, tokenize_with_own_bpe

DOCUMENTS = ("def add(a, b):\n    return a + b\n" * 20, "naïve ☃ text\n" * 20)


def cached_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_tokens_decode_to_the_text(tmp_path: Path) -> None:
    tokenizer, tokens = tokenize_with_own_bpe(DOCUMENTS, 300, tmp_path)
    assert tokenizer.decode(tokens.tolist()) == "".join(text + END_OF_TEXT for text in DOCUMENTS)
    assert 258 < len(tokenizer) <= 300
    assert 0 <= tokens.min() <= tokens.max() < len(tokenizer)
    assert len(tokens) < sum(len(text.encode()) for text in DOCUMENTS) / 2


def damages(content: bytes) -> dict[str, bytes]:
    """Return damaged versions of a file."""
    cut = {f"cut to {n}": content[:n] for n in (0, 1, 50, len(content) // 2, len(content) - 1)}
    flipped = {}
    for position in range(0, len(content), len(content) // 40):
        changed = bytearray(content)
        changed[position] ^= 0x55
        flipped[f"byte {position} flipped"] = bytes(changed)
    return {**cut, **flipped, "no archive": b"garbage" * 100, "zeros": bytes(len(content))}


def test_damaged_cache_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tokenizer, tokens = tokenize_with_own_bpe(DOCUMENTS, 300, tmp_path)
    path = cached_file(tmp_path)
    whole = path.read_bytes()
    num_noticed = 0
    for damage, content in damages(whole).items():
        path.write_bytes(content)
        caplog.clear()
        again, again_tokens = tokenize_with_own_bpe(DOCUMENTS, 300, tmp_path)
        assert np.array_equal(again_tokens, tokens), damage
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str(), damage
        if caplog.records:  # a flipped byte of the archive's date, say, does no damage
            num_noticed += 1
            assert "damaged" in caplog.text
            assert cached_file(tmp_path).stat().st_size == len(whole)
    assert num_noticed > 30
