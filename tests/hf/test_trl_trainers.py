"""TRL's trainers under policy auto: final parameters of the same trainer without hf_pyao, bit for bit.

GRPO and RLOO generate and score in between, without gradients.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    TrainingArguments,
)

from hf_pyao import PyAOConfig, PyAOTrainerMixin
from tests.helpers import VOCAB, tiny_model
from tests.helpers.storages import LiveStorages
from tests.hf.test_streamed_trl import GENERATES, pairs, prompts, texts, words
from tests.hf.test_streamed_trl import trained as trained_by

datasets = pytest.importorskip("datasets", reason="TRL's trainers are given data sets")
trl = pytest.importorskip("trl", reason="its trainers are tested")

pytestmark = pytest.mark.filterwarnings("ignore")

RENAMED = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"

NUM_STEPS, NUM_ACCUMULATED = 5, 2
PROFILE_STEPS = 2

AUTO = PyAOConfig(
    policy="auto",
    profile_steps=PROFILE_STEPS,
    device_memory_gib=1e-6,  # nothing fits: the plan is the one with the least memory
    min_bytes=256,
    window=2**14,
    host_memory_gib=0.1,
)


def ratings() -> Any:
    rows = [
        {"prompt": words(i), "completion": words(50 + i), "label": i % 2 == 0} for i in range(16)
    ]
    return datasets.Dataset.from_list(rows)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SFT": (texts, {}),
    "DPO": (pairs, {}),
    "KTO": (ratings, {}),
    "Reward": (pairs, {}),
    "GRPO": (prompts, GENERATES),
    "RLOO": (prompts, GENERATES),
}


def model_for(name: str) -> PreTrainedModel:
    if name != "Reward":
        return tiny_model("llama", num_hidden_layers=4)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def trained(
    name: str, model: nn.Module, folder: Path, *, is_lora: bool, config: PyAOConfig | None = None
) -> Any:
    """Return the trainer after five steps, and what each loss left alive in ``held_bytes``."""
    data, given = CASES[name]
    base, arguments = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    bases = (base,) if config is None else (PyAOTrainerMixin, base)
    more: dict[str, Any] = {} if config is None else {"pyao_config": config}

    class Counted(*bases):  # type: ignore[misc]
        held_bytes: ClassVar[list[int]] = []
        plans: ClassVar[list[Any]] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            offloader = getattr(self, "pyao_offloader", None)
            is_host = (lambda _: False) if offloader is None else offloader.host_pool.owns
            ledger = LiveStorages(is_host)
            with ledger:
                loss = super().compute_loss(*args, **kwargs)
                self.held_bytes.append(ledger.live_bytes)
            if offloader is not None:
                self.plans.append(offloader.plan)
            return loss

    options = {
        "max_steps": NUM_STEPS,
        "gradient_accumulation_steps": NUM_ACCUMULATED,
        "bf16": False,
        CHECKPOINTING: False,
        **given.get("options", {}),
    }
    more |= {key: value for key, value in given.items() if key != "options"}
    if is_lora:
        more["peft_config"] = LoraConfig(target_modules="all-linear", r=2)
    return trained_by(Counted, arguments, data(), model, folder, options=options, **more)


def assert_same_parameters(found: Any, expected: Any, start: nn.Module) -> None:
    parameters = dict(found.model.named_parameters())
    changed = 0
    before = dict(start.named_parameters())
    for name, value in expected.model.named_parameters():
        assert torch.equal(parameters[name], value), name
        changed += name not in before or not torch.equal(before[name], value)
    assert changed > 4, "nothing was trained"


@pytest.mark.thorough
@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("name", CASES)
def test_final_parameters_are_those_without_us(name: str, is_lora: bool, tmp_path: Path) -> None:
    check(name, tmp_path, is_lora=is_lora)


@pytest.mark.thorough
def test_a_trainer_that_generates(tmp_path: Path) -> None:
    """A short case of the test above."""
    check("GRPO", tmp_path, is_lora=False)


def trained_both_ways(
    name: str, folder: Path, *, is_lora: bool, config: PyAOConfig = AUTO, base: Path | None = None
) -> tuple[Any, Any, nn.Module]:
    """Return the trainer with hf_pyao, the one without, and the model that both began with.

    Trainers load their reference model from *base*, which is in *folder* if it is None.
    """
    base = base or folder / "base"
    model = model_for(name)
    model.save_pretrained(base)  # on the first rank alone, where there are several
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    model.config._name_or_path = str(base)
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    expected = trained(name, plain, folder / "plain", is_lora=is_lora)
    found = trained(name, model, folder / "ours", is_lora=is_lora, config=config)
    return found, expected, start


def most_held(name: str) -> float:
    """Return the most that may be held for backward, as a part of what is held without hf_pyao."""
    return 0.6 if name in ("GRPO", "RLOO") else 0.9


def check(name: str, folder: Path, *, is_lora: bool) -> None:
    found, expected, start = trained_both_ways(name, folder, is_lora=is_lora)
    assert_same_parameters(found, expected, start)
    check_plan(name, found, expected)


def check_plan(name: str, found: Any, expected: Any) -> None:
    """Check what the run with hf_pyao planned, counted and held."""
    num_micro_batches = NUM_STEPS * NUM_ACCUMULATED
    assert len(found.held_bytes) == num_micro_batches
    totals = found.offload_metrics
    assert totals["num_micro_batches"] == num_micro_batches, (
        "passes without gradients count nowhere"
    )
    assert [plan is None for plan in found.plans[:PROFILE_STEPS]] == [True] * PROFILE_STEPS
    assert found.plans[-1] is not None, "it plans from micro-batches with gradients"
    # Of the last micro-batch, long after the first ones in which everything is offloaded.
    held = found.held_bytes[-1] / expected.held_bytes[-1]
    assert held <= most_held(name), f"{held:.0%} of what autograd holds after the loss"
