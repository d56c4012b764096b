"""Batches in which no label counts: NaN where the model's own loss has NaN, zeros where zeros."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_pyao import PyAOConfig, PyAOTrainer
from hf_pyao.model.head.head_loss import install_head_loss
from tests.helpers.head_loss_models import gradients, make_batch, make_model

# PEFT warns about tied heads among the targets; the tests want just that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning"),
    # PEFT uses the older of two names, which transformers 5.23 warns about.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning"),
]

REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum of no items": {"num_items_in_batch": 0},
    "sum of no items, a tensor": {"num_items_in_batch": torch.tensor(0)},
    "sum of other batches' items": {"num_items_in_batch": torch.tensor(40)},
}
HEADS = {"plain": "llama", "tied": "gpt2", "bias": "phi", "soft-cap": "gemma2"}
BATCHES = {"all": [True], "all of two": [True, True], "one of three": [False, True, False]}


def make_pair(kind: str, lora: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return two equal models; the first has a chunked head loss."""
    own: Any = make_model(HEADS[kind], dtype)
    if lora:
        torch.manual_seed(1)
        own = get_peft_model(own, LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    mine = copy.deepcopy(own)
    install_head_loss(mine, "chunked", chunk_tokens=16)
    return mine.train(), own.train()


def run(model: nn.Module, ignored: list[bool], autocast: bool, **options: Any) -> list[Tensor]:
    """Accumulate the gradients of micro-batches, those marked without a label; return losses."""
    losses = []
    for seed, ignore in enumerate(ignored):
        batch = make_batch(seed=seed)
        if ignore:
            batch["labels"].fill_(-100)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch, **options).loss
        (loss / len(ignored)).backward()
        losses.append(loss.detach())
    return losses


def check(reduction: str, batches: str, kind: str, lora: bool, autocast: bool) -> None:
    mine, own = make_pair(kind, lora, torch.float32 if autocast else torch.float64)
    options = REDUCTIONS[reduction]
    losses = [run(model, BATCHES[batches], autocast, **options) for model in (mine, own)]
    tolerance = 0.05 if autocast else 1e-6
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=0, equal_nan=True)
    got, expected = gradients(mine), gradients(own)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.equal(got[name].isnan(), wanted.isnan()), name
        scale = float(wanted.nan_to_num().abs().max())  # 0 where the own loss gives zeros
        torch.testing.assert_close(
            got[name], wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
    if all(BATCHES[batches]):
        assert not any(grad.any() for grad in got.values())


CASES = [
    (reduction, batches, kind, lora, autocast)
    for reduction in REDUCTIONS
    for batches in BATCHES
    for kind in HEADS
    for lora in (False, True)
    for autocast in (False, True)
    # Tokens that count beside a number of items of zero: no step has that.
    if not ("no items" in reduction and batches == "one of three")
]


@pytest.mark.parametrize("case", CASES[::14], ids=str)
def test_gradients_are_those_of_the_models_own_loss(case: Any) -> None:
    check(*case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_models_own_loss_everywhere(case: Any) -> None:
    check(*case)


@pytest.mark.parametrize("lora", [False, True], ids=["linear head", "LoRA head"])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_factors_that_are_not_finite_reach_the_same_gradients(factor: float, lora: bool) -> None:
    # Tokens that count have NaN or infinite gradients, and those that do not have zeros.
    results = []
    for model in make_pair("plain", lora, torch.float64):
        embeds = torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(3)).double()
        embeds.requires_grad_()
        labels = make_batch()["labels"]
        labels[1:] = -100
        (model(inputs_embeds=embeds, labels=labels).loss * factor).backward()
        grads = {**gradients(model), "inputs_embeds": embeds.grad}
        results.append({name: grad.isfinite() for name, grad in grads.items()})
    mine, own = results
    assert mine.keys() == own.keys()
    assert all(torch.equal(mine[name], own[name]) for name in own)
    assert own["inputs_embeds"].any()
    assert not own["inputs_embeds"].all()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["off", "chunked"])
@pytest.mark.sampled(every=1000)
def test_training_goes_on_after_a_batch_without_labels(mode: str, tmp_path: Path) -> None:
    rows = make_batch(6, 12)
    data = [{key: value[i].clone() for key, value in rows.items()} for i in range(6)]
    data[3]["labels"].fill_(-100)
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, num_train_epochs=1, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    plain, mine = make_model("llama"), make_model("llama")
    Trainer(model=plain, args=arguments, train_dataset=data).train()
    config = PyAOConfig(policy="all", head_loss=mode, host_memory_gib=0.05)
    PyAOTrainer(model=mine, args=arguments, train_dataset=data, pyao_config=config).train()
    for wanted, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        assert parameter.isfinite().all()
        torch.testing.assert_close(parameter, wanted, rtol=0, atol=1e-3)
