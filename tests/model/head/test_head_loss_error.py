"""Whole models in low precision: their head loss in chunks is no farther from the float64 truth."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.head.head_loss import install_head_loss
from tests.helpers.head_loss_models import gradients, make_batch, make_model
from tests.model.losses.reference import relative_error

SEEDS = range(9)
NAMES = ("opt", "gpt2", "llama", "gemma2", "cohere", "granite", "phi", "gptj")
"""Tied and not, soft-cap, scale, division, bias."""

Found = tuple[Tensor, dict[str, Tensor]]


def step(model: Any, batch: dict[str, Tensor]) -> Found:
    """Return the model's loss and its gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: grad.clone() for name, grad in gradients(model).items()}


def truth_of(model: Any, batch: dict[str, Tensor]) -> Found:
    """Return the same in float64 throughout: models round their logits to float32."""
    exact = copy.deepcopy(model).double()
    logits = exact(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    loss.backward()
    return loss.detach(), gradients(exact)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_median_error_is_at_most_the_own_losss(name: str, dtype: torch.dtype) -> None:
    own = make_model(name, dtype)
    mine = copy.deepcopy(own)
    handle = install_head_loss(mine, "chunked", chunk_tokens=16)
    errors: dict[str, dict[str, list[float]]] = {"mine": {}, "own": {}}
    for seed in SEEDS:
        batch = make_batch(seed=seed)
        loss, grads = truth_of(own, batch)
        # The error of all gradients together: some of a tied pair's parts are zero but for rounding.
        expected = torch.cat([grad.flatten() for grad in grads.values()])
        head = next(iter(own.get_output_embeddings().parameters()))
        (head_name,) = [key for key, value in own.named_parameters() if value is head]
        for way, model in (("mine", mine), ("own", own)):
            got_loss, got = step(model, batch)
            together = torch.cat([got[key].flatten() for key in grads])
            for part, value, wanted in (
                ("loss", got_loss, loss),
                ("head", got[head_name], grads[head_name]),
                ("all", together, expected),
            ):
                errors[way].setdefault(part, []).append(relative_error(value, wanted))
    assert handle.metrics()["head_loss_num_chunked"] == len(SEEDS)
    for part, found in errors["mine"].items():
        bound = 1.1 * statistics.median(errors["own"][part])
        assert 0 < statistics.median(found) <= bound, part
