"""Training with the trainer, the mixin or the callback equals plain training, bit for bit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_pyao import (
    PyAOAccelerator,
    PyAOCallback,
    PyAOConfig,
    PyAOTrainer,
    PyAOTrainerMixin,
    PyAOTrainingArguments,
    attach,
)
from hf_pyao.errors import ConfigError, ConflictError
from tests.helpers import VOCAB, assert_same_parameters, num_hooks, tiny_model

# TRL sets the older of the two names of checkpointing, which transformers 5.23 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is depre:FutureWarning")

RENAMED = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"

EVERYTHING = PyAOConfig(policy="all", min_bytes=0, keep_last_layers=1, host_memory_gib=0.25)
"""Tiny models save tiny tensors: offload those too."""


def tiny_opt(dropout: float = 0.0) -> PreTrainedModel:
    return tiny_model("opt", dropout=dropout)


def tiny_llama(dropout: float = 0.0) -> PreTrainedModel:
    return tiny_model("llama", dropout=dropout)


MODELS = {"opt": tiny_opt, "llama": tiny_llama}


def examples(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCAB, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def arguments(
    folder: Path, cls: type[TrainingArguments] = TrainingArguments, **values: Any
) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    return cls(str(folder), **{**defaults, **values})


def trainer_for(cls: type[Trainer], model: nn.Module, args: TrainingArguments, **more: Any) -> Any:
    data = examples()
    return cls(model=model, args=args, train_dataset=data, eval_dataset=data[:4], **more)


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


class FailsAt(TrainerCallback):
    """Raises in the middle of training."""

    def __init__(self, error: BaseException, step: int = 2) -> None:
        self.error, self.step = error, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise self.error


class CountsHooks(TrainerCallback):
    """Records how many hooks the model has at each step, to show that something was attached."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.counts.append(num_hooks(kwargs["model"]))


SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "plain": (0.0, {}),
    "dropout": (0.1, {}),
    "bf16, accumulation, eval between": (
        0.1,
        {
            "bf16": True,
            "gradient_accumulation_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "max_steps": 2,
        },
    ),
    "checkpointing": (0.1, {CHECKPOINTING: True}),
    "eval on start": (0.0, {"eval_on_start": True, "eval_strategy": "epoch"}),
}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", MODELS)
def test_training_is_bitwise_the_same(architecture: str, setting: str, tmp_path: Path) -> None:
    dropout, values = SETTINGS[setting]
    reference = trainer_for(Trainer, MODELS[architecture](dropout), arguments(tmp_path, **values))
    reference.train()

    hooks = CountsHooks()
    trainer = trainer_for(
        PyAOTrainer,
        MODELS[architecture](dropout),
        arguments(tmp_path, **values),
        pyao_config=EVERYTHING,
        callbacks=[hooks],
    )
    trainer.train()

    assert_same_parameters(trainer.model, reference.model)
    assert logged(trainer, "loss") == logged(reference, "loss")
    assert logged(trainer, "eval_loss") == logged(reference, "eval_loss")
    assert min(hooks.counts) > num_hooks(reference.model)
    assert num_hooks(trainer.model) == num_hooks(reference.model)
    assert min(logged(trainer, "pyao/offloaded_bytes")) > 0


@pytest.mark.thorough
def test_metrics_are_of_every_logged_step_and_survive_the_training(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = trainer_for(PyAOTrainer, tiny_llama(), args, pyao_config=EVERYTHING)
    assert trainer.offload_metrics == {}
    trainer.train()
    offloaded = logged(trainer, "pyao/offloaded_bytes")
    assert len(offloaded) == len(logged(trainer, "loss")) == 3
    # Each log has its last micro-batch, the totals have all of the 3 × 2.
    assert trainer.offload_metrics["offloaded_bytes"] == 2 * sum(offloaded)
    for entry in trainer.state.log_history:
        has_metrics = any(key.startswith("pyao/") for key in entry)
        assert has_metrics == ("loss" in entry), "eval and summary logs are left alone"


@pytest.mark.thorough
def test_a_training_that_saves_nothing_in_the_layers_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    model.model.requires_grad_(False)
    trainer = trainer_for(
        PyAOTrainer, model, arguments(tmp_path, max_steps=1), pyao_config=PyAOConfig(policy="all")
    )
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        trainer.train()
    warnings = [r.getMessage() for r in caplog.records if "saved nothing in them" in r.getMessage()]
    assert len(warnings) == 1, "after one step, though no further forward follows it"


@pytest.mark.thorough
def test_checkpointing_is_warned_about_once_a_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(tmp_path, **{CHECKPOINTING: True})
    trainer = trainer_for(PyAOTrainer, tiny_opt(), args, pyao_config=EVERYTHING)
    with caplog.at_level(logging.WARNING, logger="hf_pyao.no_effect"):
        for num_trainings in (1, 2):
            trainer.train()
            warned = [r for r in caplog.records if r.name == "hf_pyao.no_effect"]
            assert len(warned) == num_trainings
    assert "only each layer's input" in warned[0].getMessage()


@pytest.mark.thorough
@pytest.mark.parametrize("error", [RuntimeError("mid-train"), KeyboardInterrupt()])
def test_a_failed_training_leaves_the_model_as_it_was(error: BaseException, tmp_path: Path) -> None:
    model = tiny_opt()
    before = num_hooks(model)
    trainer = trainer_for(
        PyAOTrainer,
        model,
        arguments(tmp_path),
        pyao_config=EVERYTHING,
        callbacks=[FailsAt(error)],
    )
    with pytest.raises(type(error)):
        trainer.train()
    assert num_hooks(model) == before
    assert trainer.offloader is None
    assert trainer.offload_metrics["offloaded_bytes"] > 0
    # Nothing is left that would make the next attachment an error.
    attach(model, PyAOConfig(policy="all", min_bytes=1)).detach()


@pytest.mark.thorough
@pytest.mark.parametrize("make_callbacks", [lambda: [], lambda: [FailsAt(RuntimeError("once"))]])
def test_a_second_training_is_bitwise_the_same_too(
    make_callbacks: Callable[[], list[TrainerCallback]], tmp_path: Path
) -> None:
    def train_twice(cls: type[Trainer], **more: Any) -> Any:
        callbacks = make_callbacks()
        trainer = trainer_for(cls, tiny_opt(0.1), arguments(tmp_path), callbacks=callbacks, **more)
        if callbacks:
            with pytest.raises(RuntimeError, match="once"):
                trainer.train()
            trainer.remove_callback(callbacks[0])
        else:
            trainer.train()
        trainer.train()
        return trainer

    reference = train_twice(Trainer)
    trainer = train_twice(PyAOTrainer, pyao_config=EVERYTHING)
    assert_same_parameters(trainer.model, reference.model)
    assert trainer.offload_metrics["offloaded_bytes"] > 0
    assert num_hooks(trainer.model) == num_hooks(reference.model)


@pytest.mark.thorough
def test_auto_find_batch_size_attaches_anew_each_try(tmp_path: Path) -> None:
    attached: list[int] = []

    class OutOfMemory:
        """Fails inside forward, with the device's words, unless the batch is small."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
            attached.append(num_hooks(model))
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory. (not really)")
            return loss

    class Plain(OutOfMemory, Trainer):  # type: ignore[misc]
        pass

    class Offloading(PyAOTrainerMixin, OutOfMemory, Trainer):  # type: ignore[misc]
        pass

    values = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
    reference = trainer_for(Plain, tiny_opt(), arguments(tmp_path, **values))
    reference.train()
    attached.clear()
    trainer = trainer_for(
        Offloading, tiny_opt(), arguments(tmp_path, **values), pyao_config=EVERYTHING
    )
    trainer.train()
    assert trainer.state.train_batch_size == reference.state.train_batch_size
    assert len(attached) > 3, "a try failed before the three good steps"
    assert attached[0] > 0
    assert len(set(attached)) == 1, "every try has the same hooks, none left from an earlier one"
    assert num_hooks(trainer.model) == 0
    assert_same_parameters(trainer.model, reference.model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("log_metrics", "keys"),
    [
        ("off", set()),
        ("summary", {"offloaded_bytes", "held_bytes"}),
        ("all", {"would_hold_bytes", "link_bytes", "stall_forward_ms", "kept_bytes/last layer"}),
    ],
)
@pytest.mark.parametrize("how", ["trainer", "callback"])
def test_logs_have_what_was_asked_for(
    how: str, log_metrics: str, keys: set[str], tmp_path: Path
) -> None:
    config = replace(EVERYTHING, log_metrics=log_metrics)
    cls, more = (
        (PyAOTrainer, {"pyao_config": config})
        if how == "trainer"
        else (Trainer, {"callbacks": [PyAOCallback(config)]})
    )
    trainer = trainer_for(cls, tiny_opt(), arguments(tmp_path, max_steps=1), **more)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    found = {key.removeprefix("pyao/") for key in entry if key.startswith("pyao/")}
    assert found >= keys if log_metrics == "all" else found == keys


def test_a_mixin_after_the_trainer_is_refused_when_the_class_is_made() -> None:
    class MyTrainer(Trainer):
        pass

    class Other:
        pass

    with pytest.raises(ConfigError, match=r"mixin first: class X\(PyAOTrainerMixin, Trainer\)"):

        class X(Trainer, PyAOTrainerMixin):
            pass

    with pytest.raises(ConfigError, match=r"class Y\(Other, PyAOTrainerMixin, MyTrainer\)"):

        class Y(MyTrainer, Other, PyAOTrainerMixin):
            pass

    class Part(PyAOTrainerMixin):
        """A mixin of a user's own that has ours in it."""

    class Right(Part, MyTrainer):
        pass

    class Also(MyTrainer, PyAOTrainer):
        """Their methods come first, and call ours."""

    assert issubclass(Right, Trainer)
    assert issubclass(Also, PyAOTrainer)


def flags(folder: Path, **values: Any) -> TrainingArguments:
    return arguments(
        folder,
        PyAOTrainingArguments,
        activation_offload=True,
        activation_offload_policy="all",
        activation_offload_min_bytes=0,
        activation_offload_host_memory_gib=0.25,
        **values,
    )


@pytest.mark.thorough
def test_flags_under_a_plain_trainer_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(cls: type[Trainer], args: TrainingArguments, **more: Any) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_pyao"):
            trainer_for(cls, tiny_opt(), args, **more).train()
        return sum("the trainer does not know this flag" in r.getMessage() for r in caplog.records)

    args = flags(tmp_path, max_steps=1)
    args.get_process_log_level()  # as scripts do before they make a trainer
    assert warned(Trainer, args) == 1
    assert warned(PyAOTrainer, flags(tmp_path, max_steps=1)) == 0
    assert warned(Trainer, flags(tmp_path, max_steps=1), callbacks=[PyAOCallback()]) == 0
    off = arguments(tmp_path, PyAOTrainingArguments, max_steps=1)
    assert warned(Trainer, off) == 0


def test_one_variable_switches_everything_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYAO", "off")
    caplog.set_level(logging.INFO, "hf_pyao")
    model, ids = tiny_opt(), torch.arange(6).reshape(2, 3)
    with attach(model, EVERYTHING) as offloader:
        offloader.run_micro_batch(lambda: model(ids).logits.sum().backward())
        offloader.warn_if_idle()
        assert num_hooks(model) == 0 and offloader.metrics() == {}
    assert num_hooks(PyAOAccelerator(cpu=True).prepare(tiny_opt())) == 0
    args = flags(tmp_path, max_steps=1, activation_offload_auto_micro_batch="largest")
    for cls, more in ((PyAOTrainer, {}), (Trainer, {"callbacks": [PyAOCallback(EVERYTHING)]})):
        trainer = trainer_for(cls, tiny_opt(), args, **more)
        trainer.add_callback(hooks := CountsHooks())
        trainer.train()
        assert hooks.counts == [0]
    said = [r.getMessage() for r in caplog.records]
    assert said == ["hf_pyao is switched off by PYAO=off: nothing is attached."] * 4
    monkeypatch.setenv("PYAO", "sometimes")
    with pytest.raises(ConfigError, match="PYAO is 'sometimes'"):
        attach(model)


@pytest.mark.thorough
def test_model_init_gives_every_training_its_own_model(tmp_path: Path) -> None:
    trainer = PyAOTrainer(
        model_init=lambda: tiny_opt(),
        args=arguments(tmp_path),
        train_dataset=examples(),
        pyao_config=EVERYTHING,
    )
    for _ in range(2):
        trainer.train()
        assert trainer.offload_metrics["offloaded_bytes"] > 0
        assert num_hooks(trainer.model) == 0


@pytest.mark.thorough
def test_resumed_training_is_bitwise_the_same(tmp_path: Path) -> None:
    def train(cls: type[Trainer], folder: Path, **more: Any) -> Any:
        values = {"save_strategy": "steps", "save_steps": 2}
        args = arguments(folder, **values)
        trainer_for(cls, tiny_opt(0.1), args, callbacks=[], **more).train()
        resumed = trainer_for(cls, tiny_opt(0.1), args, **more)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return resumed

    reference = train(Trainer, tmp_path / "plain")
    trainer = train(PyAOTrainer, tmp_path / "offload", pyao_config=EVERYTHING)
    assert_same_parameters(trainer.model, reference.model)
    saved = (tmp_path / "offload" / "checkpoint-2" / "trainer_state.json").read_text()
    assert "pyao/offloaded_bytes" in saved


@pytest.mark.thorough
def test_the_callback_does_it_for_a_plain_trainer(tmp_path: Path) -> None:
    reference = trainer_for(Trainer, tiny_opt(0.1), arguments(tmp_path))
    reference.train()
    callback = PyAOCallback(EVERYTHING)
    trainer = trainer_for(Trainer, tiny_opt(0.1), arguments(tmp_path), callbacks=[callback])
    trainer.train()
    assert_same_parameters(trainer.model, reference.model)
    assert num_hooks(trainer.model) == 0
    offloaded = logged(trainer, "pyao/offloaded_bytes")
    assert len(offloaded) == 3
    assert callback.totals["offloaded_bytes"] == sum(offloaded) > 0


@pytest.mark.thorough
def test_after_a_failure_the_callback_detaches_on_request(tmp_path: Path) -> None:
    callback = PyAOCallback(EVERYTHING)
    failing = FailsAt(RuntimeError("mid-train"))
    trainer = trainer_for(Trainer, tiny_opt(), arguments(tmp_path), callbacks=[callback, failing])
    with pytest.raises(RuntimeError, match="mid-train"):
        trainer.train()
    callback.detach()
    callback.detach()
    assert num_hooks(trainer.model) == 0
    assert callback.totals["offloaded_bytes"] > 0


def test_configuration_and_flags_that_disagree_are_refused(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, PyAOTrainingArguments, activation_offload=True, activation_offload_min_bytes=1
    )
    with pytest.raises(ConfigError, match=r"min_bytes=1 \(.*pyao_config says min_bytes=0"):
        trainer_for(PyAOTrainer, tiny_opt(), args, pyao_config=EVERYTHING)
    off = arguments(tmp_path, PyAOTrainingArguments)
    with pytest.raises(ConfigError, match="activation_offload=False"):
        trainer_for(PyAOTrainer, tiny_opt(), off, pyao_config=EVERYTHING)


def test_conflicts_are_found_when_the_trainer_is_made(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"offload": True}}
    )
    with pytest.raises(ConflictError, match="offload=True"):
        trainer_for(PyAOTrainer, tiny_opt(), args)
    with pytest.raises(ConflictError, match="offload=True"):
        trainer_for(Trainer, tiny_opt(), args, callbacks=[PyAOCallback()])
    trainer = trainer_for(Trainer, tiny_opt(), args)
    with pytest.raises(ConflictError, match="offload=True"):
        PyAOCallback().on_train_begin(args, trainer.state, trainer.control, model=trainer.model)
