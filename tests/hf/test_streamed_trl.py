"""TRL's trainers with streamed weights: losses and final weights of the resident run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_pyao import PyAOConfig, PyAOTrainerMixin
from tests.helpers import VOCAB, tiny_model
from tests.helpers.adapters import tiny_lora

datasets = pytest.importorskip("datasets", reason="TRL's trainers are given data sets")
trl = pytest.importorskip("trl", reason="its trainers are tested")

STREAMED = PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1, stream_weights=0)
ADAPTERS: dict[str, Any] = {"target_modules": "all-linear", "r": 2, "lora_dropout": 0.1}

pytestmark = pytest.mark.filterwarnings("ignore")


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="w0",
        eos_token="w1",
        model_input_names=["input_ids", "attention_mask"],  # TRL 0.24 hands all to `generate`
    )


def words(seed: int, count: int = 6) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(3, VOCAB, (count,), generator=generator))


def pairs() -> Any:
    rows = [
        {"prompt": words(i), "chosen": words(50 + i), "rejected": words(90 + i)} for i in range(8)
    ]
    return datasets.Dataset.from_list(rows)


def texts() -> Any:
    return datasets.Dataset.from_list([{"text": words(i, 10)} for i in range(8)])


def prompts() -> Any:
    return datasets.Dataset.from_list([{"prompt": words(i)} for i in range(32)])


def even_share(completions: list[str], **_: Any) -> list[float]:
    """A reward that follows from the text alone."""
    return [sum(word[-1] in "02468" for word in each.split()) / 8 for each in completions]


GENERATES: dict[str, Any] = {
    "options": {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0},
    "reward_funcs": even_share,
}


def trained(base: Any, config: Any, data: Any, model: nn.Module, folder: Path, **more: Any) -> Any:
    """Return the trainer after its steps: three of two micro-batches, if *more* has no options."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **more.pop("options", {}),
    }
    torch.manual_seed(11)  # adapters that the trainer adds
    trainer = base(
        model=model,
        args=config(**options),
        train_dataset=data,
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return trainer


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SFT": ("SFTTrainer", "SFTConfig", {}),
    "SFT, adapters by the trainer, bf16": (
        "SFTTrainer",
        "SFTConfig",
        {"peft_config": True, "options": {"bf16": True}},
    ),
    "SFT without checkpointing": (
        "SFTTrainer",
        "SFTConfig",
        {"options": {"gradient_checkpointing": False, "bf16": False}},
    ),
    "DPO, reference by disabled adapter": ("DPOTrainer", "DPOConfig", {"peft_config": True}),
    "DPO, reference by a second adapter": ("DPOTrainer", "DPOConfig", {}),
    "DPO, reference computed before": (
        "DPOTrainer",
        "DPOConfig",
        {"peft_config": True, "options": {"precompute_ref_log_probs": True, "bf16": False}},
    ),
    "GRPO": (
        "GRPOTrainer",
        "GRPOConfig",
        {
            "peft_config": True,
            "reward_funcs": even_share,
            "options": {**GENERATES["options"], "bf16": False, "beta": 0.1},
        },
    ),
}

DATA = {"SFTTrainer": texts, "DPOTrainer": pairs, "GRPOTrainer": prompts}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_losses_and_final_weights_are_those_of_the_resident_run(case: str, tmp_path: Path) -> None:
    trainer_name, config_name, more = CASES[case]
    base, config = getattr(trl, trainer_name), getattr(trl, config_name)
    data = DATA[trainer_name]()
    model = tiny_model("llama") if more.get("peft_config") else tiny_lora("llama", dropout=0.1)
    if more.get("options", {}).get("bf16", True):  # as TRL has it: the base is of autocast's dtype
        of_base = [p for name, p in model.named_parameters() if "lora" not in name and p.dim() > 1]
        for parameter in of_base:
            parameter.data = parameter.data.bfloat16()
    plain = copy.deepcopy(model)
    ours = type("Ours", (PyAOTrainerMixin, base), {})

    def options() -> dict[str, Any]:
        given = copy.deepcopy(more)
        if given.get("peft_config"):
            given["peft_config"] = LoraConfig(**ADAPTERS)
        return given

    expected = trained(base, config, data, plain, tmp_path / "plain", **options())
    found = trained(ours, config, data, model, tmp_path / "ours", pyao_config=STREAMED, **options())
    assert losses_of(found) == losses_of(expected)
    assert len(losses_of(found)) == 3
    assert found.offload_metrics["offloaded_bytes"] > 0
    parameters = dict(found.model.named_parameters())
    trained_names = [name for name, p in expected.model.named_parameters() if p.requires_grad]
    assert trained_names
    for name, value in expected.model.named_parameters():
        assert torch.equal(parameters[name], value), name
    start = dict(plain.named_parameters())
    assert any(start[n].abs().max() > 0 for n in start if "lora_B" in n), "adapters were trained"


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
