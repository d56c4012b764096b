"""Trains a small model with its own loss and with the chunked one, and compares the curves."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_pyao.integrations.head_loss import install_head_loss
from text_data import standard_library
from tokenization import tokenize_with_own_bpe

NUM_VOCAB = 2048
NUM_SAMPLES, NUM_TOKENS = 8, 64
TEXT_MIB = 1.0
CHUNK_TOKENS = 128


def compare_curves(num_steps: int, num_seeds: int) -> list[dict[str, Any]]:
    """Train both ways from each seed, in float32 and under bfloat16 autocast.

    Returns:
        One row per precision: the curves, and how far they are apart, beside how far the model's
        own curves are from one another.
    """
    corpus = standard_library(TEXT_MIB)
    _, tokens = tokenize_with_own_bpe(corpus.documents, NUM_VOCAB)
    text = torch.from_numpy(tokens.astype("int64"))
    rows = []
    for precision in ("float32", "bfloat16 autocast"):
        curves: dict[str, list[list[float]]] = {"own": [], "chunked": []}
        for seed in range(num_seeds):
            for way, found in curves.items():
                found.append(_train(text, seed, num_steps, way, "autocast" in precision))
        rows.append({"precision": precision, "corpus": corpus.name, **_compare(curves)})
        _print_row(rows[-1])
    return rows


def _train(text: torch.Tensor, seed: int, num_steps: int, way: str, autocast: bool) -> list[float]:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=NUM_VOCAB,
        n_embd=96,
        n_layer=2,
        n_head=4,
        n_positions=NUM_TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()  # tied, with dropout
    if way == "chunked":
        install_head_loss(model, "chunked", chunk_tokens=CHUNK_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(num_steps):
        starts = torch.randint(0, len(text) - NUM_TOKENS, (NUM_SAMPLES,)).tolist()
        ids = torch.stack([text[start : start + NUM_TOKENS] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    return losses


def _compare(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    pairs = zip(curves["own"], curves["chunked"], strict=True)
    apart = [[abs(a - b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    per_step = list(zip(*curves["own"], strict=True))
    spread = [statistics.stdev(losses) for losses in per_step]
    return {
        "final_loss": {way: [curve[-1] for curve in found] for way, found in curves.items()},
        "mean_difference": statistics.mean(value for curve in apart for value in curve),
        "largest_difference": max(value for curve in apart for value in curve),
        "mean_spread_of_seeds": statistics.mean(spread),
        "smallest_spread_of_seeds": min(spread),
        "curves": curves,
    }


def _print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['precision']:18}: chunked and own differ by {row['mean_difference']:.2e} on average "
        f"({row['largest_difference']:.2e} at most); seeds by {row['mean_spread_of_seeds']:.2e}"
    )
