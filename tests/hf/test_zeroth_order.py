"""``PyAOZerothOrderTrainer`` against a plain Trainer whose step is a plain MeZO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_pyao import (
    PyAOConfig,
    PyAOTrainingArguments,
    PyAOZerothOrderTrainer,
    ZerothOrderSettings,
)
from hf_pyao.errors import ConfigError, ConflictError
from tests.helpers import tiny_model
from tests.helpers.plain_mezo import PlainMeZO
from tests.hf.test_trainer import arguments as trainer_arguments
from tests.hf.test_trainer import examples

EPSILON, RATE = 1e-2, 1e-2


class PlainTrainer(Trainer):
    """Makes each step by :class:`PlainMeZO`; its optimizer never sees a gradient."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.train()
        if not hasattr(self, "mezo"):
            self.mezo = PlainMeZO(model, EPSILON, seed=5)
        inputs = self._prepare_inputs(inputs)
        num_items = args[0] if args else kwargs.get("num_items_in_batch")  # as Trainer counts them

        class Losses:
            batches = (inputs,)

            def __call__(_, model: nn.Module) -> list[torch.Tensor]:
                return [self.compute_loss(model, dict(inputs), num_items_in_batch=num_items)]

        self.mezo.step(Losses(), self._get_learning_rate())
        return torch.tensor(0.0)


def arguments(folder: Path, kind: type = TrainingArguments, **more: Any) -> TrainingArguments:
    own = {"max_steps": 4, "learning_rate": RATE, "max_grad_norm": 0.0, "save_strategy": "steps"}
    return trainer_arguments(folder, kind, **{**own, **more})


def trainer_of(model: nn.Module, folder: Path, **more: Any) -> PyAOZerothOrderTrainer:
    of_settings = {name: more.pop(name) for name in ("momentum", "transfer_dtype") if name in more}
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5, **of_settings)
    options = {name: more.pop(name) for name in ("head_loss",) if name in more}
    return PyAOZerothOrderTrainer(
        model=model,
        args=arguments(folder, **more),
        train_dataset=examples(),
        eval_dataset=examples(4),
        zeroth_order=settings,
        num_resident=1,
        **options,
    )


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_it_trains_evaluates_and_saves_as_a_plain_one(tmp_path: Path) -> None:
    model = tiny_model("opt", dropout=0.1)
    plain = copy.deepcopy(model)
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
    reference = PlainTrainer(
        model=plain,
        args=arguments(tmp_path / "plain", **more),
        train_dataset=examples(),
        eval_dataset=examples(4),
    )
    reference.train()
    ours = trainer_of(model, tmp_path / "ours", **more)
    ours.train()
    assert_same(model, plain)
    assert ours.zeroth_order is None
    losses = [
        [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        for trainer in (ours, reference)
    ]
    assert losses[0] == losses[1]
    assert ours.evaluate()["eval_loss"] == reference.evaluate()["eval_loss"]
    assert all("grad_norm" not in each for each in ours.state.log_history)
    saved = type(model).from_pretrained(tmp_path / "ours" / "checkpoint-3")
    assert_same(saved, type(model).from_pretrained(tmp_path / "plain" / "checkpoint-3"))


@pytest.mark.parametrize(
    "more",
    [
        {"head_loss": "chunked"},
        {"momentum": 0.9, "gradient_accumulation_steps": 2, "transfer_dtype": "int8"},
    ],
)
def test_a_resumed_run_has_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama", dropout=0.1)
    halved = copy.deepcopy(model)
    trainer_of(model, tmp_path / "whole", save_steps=2, **more).train()
    resumed = trainer_of(halved, tmp_path / "resumed", **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(halved, model)


def test_a_failing_step_leaves_a_plain_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trainer = trainer_of(model, tmp_path)

    def fail(*_: Any) -> None:
        raise ValueError("no")

    hook = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    hook.remove()
    assert trainer.zeroth_order is None
    assert all(type(module._parameters) is dict for module in model.modules())
    trainer.train()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"fp16": True}, "fp16"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_settings_that_need_gradients_are_refused(
    more: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ConflictError), match=word):
        PyAOZerothOrderTrainer(model=tiny_model("opt"), args=arguments(tmp_path, **more))


def test_settings_for_activations_are_refused(tmp_path: Path) -> None:
    flags = arguments(
        tmp_path, PyAOTrainingArguments, activation_offload=True, activation_offload_policy="auto"
    )
    with pytest.raises(ConfigError, match="activation_offload"):
        PyAOZerothOrderTrainer(model=tiny_model("opt"), args=flags)
    with pytest.raises(ConfigError, match="pyao_config"):
        PyAOZerothOrderTrainer(
            model=tiny_model("opt"), args=arguments(tmp_path), pyao_config=PyAOConfig()
        )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="optimizers"):
        PyAOZerothOrderTrainer(
            model=tiny_model("opt"), args=arguments(tmp_path), optimizers=(optimizer, None)
        )
