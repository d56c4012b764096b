"""Trains a small model with its own loss and with the chunked one, and compares the curves.

Two runs that differ by any rounding drift apart, in bfloat16 within 20 steps. How far is measured
beside: a third run of each seed has the model's own loss, and one weight moved by the smallest step
that the layers can tell (of float32, or of bfloat16, to which autocast rounds it).
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_pyao.model.head.head_loss import install_head_loss
from text_data import standard_library
from tokenization import tokenize_with_own_bpe

NUM_VOCAB = 2048
NUM_SAMPLES, NUM_TOKENS = 8, 64
TEXT_MIB = 1.0
CHUNK_TOKENS = 128
WAYS = ("own", "chunked", "nudged")


def compare_curves(num_steps: int, num_seeds: int) -> list[dict[str, Any]]:
    """Train every way from each seed, in float32 and under bfloat16 autocast.

    Returns:
        One row per precision: the curves, and how far they are apart, beside how far the model's
        own curves are from one another, and from those of a nudged model.
    """
    corpus = standard_library(TEXT_MIB)
    _, tokens = tokenize_with_own_bpe(corpus.documents, NUM_VOCAB)
    text = torch.from_numpy(tokens.astype("int64"))
    rows = []
    for precision in ("float32", "bfloat16 autocast"):
        curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
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
    elif way == "nudged":
        with torch.no_grad():
            weight = model.transformer.h[0].mlp.c_fc.weight.view(-1)[:1]
            narrow = weight.to(torch.bfloat16 if autocast else torch.float32)
            weight.copy_(torch.nextafter(narrow, narrow + 1))
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
    per_step = list(zip(*curves["own"], strict=True))
    spread = [statistics.stdev(losses) for losses in per_step]
    mean_curves = {way: _mean_curve(found) for way, found in curves.items()}
    return {
        "final_loss": {way: [curve[-1] for curve in found] for way, found in curves.items()},
        "mean_difference": _mean_difference(curves["own"], curves["chunked"]),
        "largest_difference": _largest_difference(curves["own"], curves["chunked"]),
        "mean_difference_nudged": _mean_difference(curves["own"], curves["nudged"]),
        "largest_difference_nudged": _largest_difference(curves["own"], curves["nudged"]),
        "mean_curve_difference": _mean_difference([mean_curves["own"]], [mean_curves["chunked"]]),
        "mean_spread_of_seeds": statistics.mean(spread),
        "smallest_spread_of_seeds": min(spread),
        "curves": curves,
    }


def _mean_curve(curves: list[list[float]]) -> list[float]:
    return [statistics.mean(losses) for losses in zip(*curves, strict=True)]


def _mean_difference(left: list[list[float]], right: list[list[float]]) -> float:
    return statistics.mean(_differences(left, right))


def _largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    return max(_differences(left, right))


def _differences(left: list[list[float]], right: list[list[float]]) -> list[float]:
    """Return how far curves of the same seed are apart, at every step of every seed."""
    pairs = zip(left, right, strict=True)
    return [abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)]


def _print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['precision']:18}: chunked and own differ by {row['mean_difference']:.2e} on average "
        f"({row['largest_difference']:.2e} at most), nudged and own by "
        f"{row['mean_difference_nudged']:.2e} ({row['largest_difference_nudged']:.2e}); means over "
        f"seeds by {row['mean_curve_difference']:.2e}; seeds by {row['mean_spread_of_seeds']:.2e}"
    )
