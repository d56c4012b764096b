"""Gradients with a codec against gradients without, at the same weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.model.map.module_map import find_layers
from studies.compression_training import ALL_SLOTS, NONE, Variant, loss_of


def gradient_rows(
    model: nn.Module, precision: str, ids: Sequence[torch.Tensor], variants: Sequence[Variant]
) -> list[dict[str, Any]]:
    """Compare the gradients of each variant with those without, at the weights as they are.

    Args:
        model: is left as it was, and so is the generator of random numbers.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        ids: two batches: gradients are those of the first one; how far the second one's are from
            them is the measure of what training tolerates anyway.
        variants: what to compare.

    Returns:
        One row per variant, and one each for the control comparisons. ``layer_...`` are lists: what
        is outside of layers first, then layer by layer.
    """
    batch, other_batch = ids
    exact_loss, exact, _ = gradients(model, batch, precision, Variant(NONE))
    rows = []
    for variant in variants:
        loss, found, moved = gradients(model, batch, precision, variant)
        same = {"is_loss_equal": loss == exact_loss, **moved}
        rows.append({"codec": variant.codec, "slots": variant.slots, **same, **_far(found, exact)})
    _, other, _ = gradients(model, other_batch, precision, Variant(NONE))
    rows.append({"codec": "another batch", "slots": ALL_SLOTS, **_far(other, exact)})
    if precision != "fp32":
        model.eval()  # dropout's stream depends on the dtype
        _, full, _ = gradients(model, batch, "fp32", Variant(NONE))
        _, cast, _ = gradients(model, batch, precision, Variant(NONE))
        model.train()
        rows.append({"codec": f"{precision} itself", "slots": ALL_SLOTS, **_far(cast, full)})
    return rows


def gradients(
    model: nn.Module, ids: torch.Tensor, precision: str, variant: Variant, scale: float = 1.0
) -> tuple[float, dict[str, torch.Tensor], dict[str, int]]:
    """Return the loss, the gradient of each layer (flat, float64), and the bytes moved."""
    names = [fqn for fqn, _ in find_layers(model).layers]
    with torch.random.fork_rng(devices=()), variant.attached(model) as offloader:
        torch.manual_seed(0)
        loss = loss_of(model, ids, precision)
        (loss * scale).backward()
        metrics = {} if offloader is None else offloader.metrics()
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("outside layers", *names)}
    for fqn, parameter in model.named_parameters():
        owner = next((name for name in names if fqn.startswith(name + ".")), "outside layers")
        if parameter.grad is not None:
            parts[owner].append(parameter.grad.flatten().double())
            parameter.grad = None
    moved = {}
    if metrics:
        moved = {
            "raw_bytes": int(metrics["offloaded_bytes"] + metrics["reloaded_bytes"]),
            "link_bytes": int(metrics["link_bytes"]),
            "would_hold_bytes": int(metrics["would_hold_bytes"]),
        }
    return loss.item(), {name: torch.cat(part) for name, part in parts.items()}, moved


def _far(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Relative error and cosine, of all layers together and of each."""
    whole = _compare(torch.cat(list(found.values())), torch.cat(list(exact.values())))
    layers = [_compare(found[name], exact[name]) for name in exact]
    return {
        "relative_error": whole[0],
        "cosine": whole[1],
        "layer_relative_error": [pair[0] for pair in layers],
        "layer_cosine": [pair[1] for pair in layers],
    }


def over_probes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of several steps: a list over the steps, and of each layer the mean."""
    merged: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        merged.setdefault((row["codec"], row["slots"]), []).append(row)
    return [_merge(group) for group in merged.values()]


def _merge(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        **group[0],
        "is_loss_equal": all(row.get("is_loss_equal", True) for row in group),
        "relative_error": [_rounded(row["relative_error"]) for row in group],
        "cosine": [round(row["cosine"], 8) for row in group],
        "layer_relative_error": [
            _rounded(statistics.mean(values))
            for values in zip(*(row["layer_relative_error"] for row in group), strict=True)
        ],
        "layer_cosine": [
            round(statistics.mean(values), 8)
            for values in zip(*(row["layer_cosine"] for row in group), strict=True)
        ],
    }


def _rounded(value: float) -> float:
    """Keep four significant digits."""
    return float(f"{value:.3e}")


def _compare(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    norm = exact.norm()
    cosine = 1.0 if torch.equal(found, exact) else float(found @ exact / (found.norm() * norm))
    return float((found - exact).norm() / norm), cosine


def first_overflow(model: nn.Module, ids: torch.Tensor, variants: Sequence[Variant]) -> list[Any]:
    """Return, per variant, the smallest power of two by which an fp16 loss overflows if scaled.

    Found by bisection for the first variant, and looked for beside it for the others.
    """

    def overflows(exponent: int, variant: Variant) -> bool:
        _, found, _ = gradients(model, ids, "fp16", variant, 2.0**exponent)
        return not all(part.isfinite().all() for part in found.values())

    low, high = 0, 60
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overflows(middle, variants[0]) else (middle, high)
    exponents = [high]
    for variant in variants[1:]:
        exponent = high
        while overflows(exponent - 1, variant):
            exponent -= 1
        while not overflows(exponent, variant):
            exponent += 1
        exponents.append(exponent)
    return exponents
