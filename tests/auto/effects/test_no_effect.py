"""No setting does nothing in silence: each case is said once, with reason and remedy."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate
import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from transformers import Trainer, TrainingArguments

from hf_pyao import (
    PyAOArguments,
    PyAOCallback,
    PyAOConfig,
    PyAOTrainer,
    PyAOTrainerMixin,
    PyAOTrainingArguments,
    attach,
)
from hf_pyao.auto.effects.arguments import (
    look_at_accelerator,
    look_at_arguments,
    warn_of_sequence_parallel,
)
from hf_pyao.errors import ConfigError, ConflictError, PyAOError
from hf_pyao.no_effect import OFFLOADING, EffectLedger, NoEffect
from hf_pyao.plan.documents.run import RunReport
from tests.helpers import EVERYTHING, tiny_batch, tiny_model

trl = pytest.importorskip("trl", reason="its trainer and its offloader are among the cases")

# TRL sets the older of the two names of checkpointing, which transformers 5.23 warns about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing. is depre:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Failed to load CPU gemm"),
]

RENAMED = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"

CPU = torch.device("cpu")


def facts_of(
    model: nn.Module,
    num_steps: int = 3,
    run: Callable[[nn.Module], object] | None = None,
    **given: Any,
) -> tuple[NoEffect, ...]:
    """Train a few steps, and return what was found without effect."""
    offloader = attach(model, dataclasses.replace(EVERYTHING, **given))
    with offloader:
        for _ in range(num_steps):
            (run or step)(model)
            offloader.warn_if_idle()
    return offloader.engine.effects.facts


def step(model: nn.Module) -> None:
    model(**tiny_batch()).loss.backward()


def captured_step(model: nn.Module) -> None:
    """Run a step as it runs while a CUDA graph is captured."""
    with patch("hf_pyao.engine.torch_hooks.passing_over.is_capturing", lambda: True):
        step(model)


def forward_alone(model: nn.Module) -> None:
    model(**tiny_batch())


def llama(**more: Any) -> Any:
    return tiny_model("llama", **more)


def checkpointed() -> nn.Module:
    model = llama()
    getattr(model, f"{CHECKPOINTING}_enable")()
    return model


def adapted(model: nn.Module, **more: Any) -> nn.Module:
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    found: nn.Module = peft.get_peft_model(model, settings, **more)
    return found


def offloaded_by_accelerate() -> nn.Module:
    model: nn.Module = accelerate.cpu_offload(adapted(llama()), execution_device=CPU)
    step(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 12 and not any(each.grad is not None for each in trained)
    return model


def bypassed() -> nn.Module:
    """A model that goes around its layers' hooks, as code compiled before attachment does."""
    model = llama()
    for layer in model.model.layers:
        layer.__class__ = type(
            type(layer).__name__,
            (type(layer),),
            {"__call__": lambda self, *a, **k: self.forward(*a, **k)},
        )
    return model


def liger_arguments() -> Any:
    return SimpleNamespace(use_liger_kernel=True)


CASES: dict[str, tuple[Callable[[], Sequence[NoEffect]], str, str]] = {
    "zero packs": (
        lambda: facts_of(bypassed()),
        OFFLOADING,
        "compiled code may bypass hooks",
    ),
    "a CUDA graph is captured": (
        lambda: facts_of(llama(), run=captured_step),
        OFFLOADING,
        "its replays call no hooks",
    ),
    "min_bytes above everything": (
        lambda: facts_of(llama(), min_bytes=2**30),
        OFFLOADING,
        "'below min_bytes'",
    ),
    "modules without match": (
        lambda: facts_of(llama(), policy="modules", modules=("self_attn.v_proj", "mlp_act")),
        "'self_attn.v_proj' in modules",
        "another module saved before",
    ),
    "recompute_modules without match": (
        lambda: facts_of(llama(), recompute_modules=("self_attn.v_proj",)),
        "recompute_modules=('self_attn.v_proj',)",
        "saves nothing",
    ),
    "keep_last_layers of all layers": (
        lambda: facts_of(llama(), keep_last_layers=3),
        OFFLOADING,
        "for its last run",
    ),
    "window above everything": (
        lambda: facts_of(llama(), window=2**30),
        "window=1073741824",
        "larger than everything",
    ),
    "a codec that takes nothing": (
        lambda: facts_of(llama(), codec="bitmask"),
        "codec='bitmask'",
        "takes none of the tensors",
    ),
    "a loss outside of the model": (
        lambda: facts_of(llama(), head_loss="chunked", run=loss_outside),
        "head_loss='chunked'",
        "outside of the model",
    ),
    "attention_groups without flash attention": (
        lambda: facts_of(llama(attn_implementation="eager"), attention_groups=2),
        "attention_groups=2",
        "another kernel",
    ),
    "checkpointing on already": (
        lambda: facts_of(checkpointed()),
        "offloading what layers save inside",
        "from its input",
    ),
    "use_liger_kernel": (
        lambda: [*look_at_arguments(liger_arguments(), PyAOConfig(head_loss="chunked"))],
        "head_loss='chunked'",
        "Liger",
    ),
    "fsdp_activation_checkpointing": (
        lambda: [
            *look_at_arguments(
                SimpleNamespace(
                    fsdp_config={"activation_checkpointing": "true"},
                    fsdp="full_shard",
                    distributed_state=SimpleNamespace(distributed_type="NO"),
                ),
                PyAOConfig(),
            )
        ],
        "fsdp_activation_checkpointing",
        "on a CPU",
    ),
    "fsdp_activation_checkpointing of Accelerate": (
        lambda: [
            *look_at_accelerator(
                SimpleNamespace(
                    distributed_type="MULTI_CPU",
                    fsdp_plugin=SimpleNamespace(activation_checkpointing=True),
                )
            )
        ],
        "fsdp_activation_checkpointing",
        "on a CPU",
    ),
    "DeepSpeed's activation_checkpointing": (
        lambda: [
            *look_at_arguments(
                SimpleNamespace(
                    deepspeed={"activation_checkpointing": {"cpu_checkpointing": True}}
                ),
                PyAOConfig(),
            )
        ],
        "activation_checkpointing in DeepSpeed's configuration",
        "do not call",
    ),
    "DeepSpeed's block, by Accelerate": (
        lambda: [
            *look_at_accelerator(
                SimpleNamespace(
                    deepspeed_plugin=SimpleNamespace(
                        deepspeed_config={"activation_checkpointing": {"profile": True}}
                    )
                )
            )
        ],
        "activation_checkpointing in DeepSpeed's configuration",
        "do not call",
    ),
    "cpu_offload and LoRA": (
        lambda: facts_of(offloaded_by_accelerate(), num_steps=1),
        "Accelerate's cpu_offload (or a device_map with 'cpu' or 'disk')",
        "gradients go to the copies",
    ),
    "adapters on meta": (
        lambda: facts_of(adapted(llama(), low_cpu_mem_usage=True), run=forward_alone, num_steps=1),
        "training of tensors on the meta device",
        "were not filled since",
    ),
    "eval mode": (lambda: facts_of(llama().eval()), OFFLOADING, "in eval mode"),
}


def loss_outside(model: nn.Module) -> None:
    batch = tiny_batch()
    logits = model(input_ids=batch["input_ids"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten()).backward()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"policy": "off"},
        {"policy": "modules", "modules": ("mlp_act",)},
        {"recompute_modules": ("pointwise",)},
        {"window": 2**12},
        {"codec": "int8"},
        {"head_loss": "chunked"},
        {"checkpoint_every": 1},
        {"long_context": True},
    ],
    ids=str,
)
@pytest.mark.sampled(every=2)
def test_what_has_an_effect_is_not_said(given: dict[str, Any]) -> None:
    assert facts_of(llama(), **given) == ()


@pytest.mark.parametrize(
    "args",
    [
        SimpleNamespace(use_liger_kernel=True),
        SimpleNamespace(fsdp_config={"activation_checkpointing": False}),
        SimpleNamespace(
            fsdp="full_shard",
            fsdp_config={"activation_checkpointing": True},
            distributed_state=SimpleNamespace(distributed_type="FSDP"),
        ),
        SimpleNamespace(deepspeed={"zero_optimization": {"stage": 2}}),
        SimpleNamespace(deepspeed="a file that is not there"),
    ],
    ids=["liger alone", "FSDP's off", "FSDP's on", "ZeRO", "no file"],
)
@pytest.mark.sampled(every=1)
def test_arguments_that_have_an_effect_are_not_said(args: Any) -> None:
    assert [*look_at_arguments(args, PyAOConfig())] == []


def test_a_forward_that_is_not_compared_is_compared_at_the_end() -> None:
    assert [fact.setting for fact in facts_of(llama(), num_steps=1, window=2**30)] == [
        "window=1073741824"
    ]


def test_the_report_has_the_facts(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    facts_of(llama(), window=2**30, report=str(path))
    (fact,) = RunReport.from_json_file(path).no_effect
    assert fact["setting"] == "window=1073741824"
    assert set(fact) == {"setting", "expected", "seen", "reason", "remedy"}


@pytest.mark.thorough
def test_zero_packs_after_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was compiled before, and is not forgotten, runs without our hooks."""
    monkeypatch.setattr("hf_pyao.auto.offloader.forget_compiled_code", lambda *_: None)
    model = llama()
    # Not by monkeypatch, which would delete the setting when it puts it back.
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        compiled = torch.compile(model, backend="eager")
        step(compiled)
        found = facts_of(compiled)
    torch._dynamo.reset()
    assert [fact.setting for fact in found] == [OFFLOADING]
    assert "compiled code" in found[0].reason


# ---- trainers ------------------------------------------------------------------------------------


class Untouched:
    """Data that nobody may prepare."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the data were asked for {name!r}")


class OurSFTTrainer(PyAOTrainerMixin, trl.SFTTrainer):
    pass


@dataclasses.dataclass
class OurSFTConfig(PyAOArguments, trl.SFTConfig):
    pass


@dataclasses.dataclass
class MixedInLast(trl.SFTConfig, PyAOArguments):
    pass


def sft_arguments(folder: Path, cls: type = trl.SFTConfig, **values: Any) -> Any:
    values = {CHECKPOINTING: False, **values}
    return cls(output_dir=str(folder), use_cpu=True, report_to=[], **values)


def with_noise() -> nn.Module:
    model = llama()
    model.model.layers[1].mlp.act_fn = nn.RReLU()
    return model


def with_torchs_offloader() -> nn.Module:
    model = llama()
    model.model.layers[1] = offload_wrapper(model.model.layers[1])
    return model


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], nn.Module]]] = {
    "TRL's activation_offloading": ({"activation_offloading": True}, {}, llama),
    "checkpointing's offload": (
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"offload": True}},
        {},
        llama,
    ),
    "torch's OffloadWrapper": ({}, {}, with_torchs_offloader),
    "gradient checkpointing and checkpoint_every": (
        {CHECKPOINTING: True},
        {"checkpoint_every": 1},
        llama,
    ),
    "the same, on the model": ({}, {"checkpoint_every": 1}, checkpointed),
    "FSDP's checkpointing and checkpoint_every": (
        {"fsdp_config": {"activation_checkpointing": True}},
        {"checkpoint_every": 1},
        llama,
    ),
    "torch_compile and stream_weights": ({"torch_compile": True}, {"stream_weights": 1}, llama),
    "auto_find_batch_size and auto_micro_batch": (
        {"auto_find_batch_size": True},
        {"auto_micro_batch": "fastest"},
        llama,
    ),
    "split_batches and auto_micro_batch": (
        {"accelerator_config": {"split_batches": True}},
        {"auto_micro_batch": "fastest"},
        llama,
    ),
    "policy pyao and auto_micro_batch": (
        {},
        {"policy": "pyao", "auto_micro_batch": "fastest"},
        llama,
    ),
    "several devices in one process": ({"_n_gpu": 2}, {}, llama),
    "nn.DataParallel": ({}, {}, lambda: nn.DataParallel(llama())),
    "RReLU": ({}, {}, with_noise),
}
"""By name: training arguments, settings, and the model."""


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(every=1)
def test_a_refused_combination_is_refused_before_data_is_prepared(
    name: str, tmp_path: Path
) -> None:
    given, settings, make = REFUSED[name]
    num_devices = given.get("_n_gpu", 0)
    args = sft_arguments(tmp_path, **{k: v for k, v in given.items() if k != "_n_gpu"})
    args._n_gpu = num_devices
    with pytest.raises((ConflictError, ConfigError)):
        OurSFTTrainer(
            model=make(),
            args=args,
            train_dataset=Untouched(),
            pyao_config=PyAOConfig(**settings),
        )


def test_flags_that_were_mixed_in_last_are_checked_before_data_are_prepared(tmp_path: Path) -> None:
    args = sft_arguments(tmp_path, MixedInLast, activation_offloading=True, activation_offload=True)
    with pytest.raises(ConflictError, match="activation_offloading is on"):
        OurSFTTrainer(model=llama(), args=args, train_dataset=Untouched())


def test_a_callback_refuses_as_the_trainer_is_made(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **{CHECKPOINTING: True})
    callback = PyAOCallback(PyAOConfig(checkpoint_every=1))
    with pytest.raises(ConflictError, match="checkpoint_every is 1"):
        Trainer(llama(), args, callbacks=[callback])


def trained(cls: type[Trainer], args: Any, **more: Any) -> Trainer:
    ids = torch.arange(8).remainder(7)
    data = [{"input_ids": ids, "labels": ids}] * 4
    trainer = cls(llama(), args, train_dataset=data, **more)
    trainer.train()
    return trainer


def plain_trainer_kept(folder: Path) -> None:
    flags = {"use_cpu": True, "report_to": [], "max_steps": 1, "activation_offload": True}
    trained(Trainer, PyAOTrainingArguments(str(folder), **flags))


def mixin_last(_: Path) -> None:
    type("Wrong", (Trainer, PyAOTrainerMixin), {})


def activation_offloading_of_trl(folder: Path) -> None:
    sft_arguments(folder, OurSFTConfig, activation_offloading=True, activation_offload=True)


OF_TRAINERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "plain Trainer kept": (
        plain_trainer_kept,
        "activation_offload has no effect",
        "the trainer does not know this flag",
    ),
    "mixin last among the bases": (
        mixin_last,
        "nothing would be offloaded",
        "Name the mixin first",
    ),
    "TRL's own flag": (
        activation_offloading_of_trl,
        "activation_offloading is on",
        "only the inner one of two offloaders gets the tensors",
    ),
}
"""By name: a run, what its one warning or its error says, and the reason or remedy in it."""


@pytest.mark.parametrize("name", [*CASES, *OF_TRAINERS])
@pytest.mark.sampled(every=1)
def test_a_setting_without_effect_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hf_pyao.no_effect")
    if name in OF_TRAINERS:
        run_with_trainer, seen, reason = OF_TRAINERS[name]
        try:
            run_with_trainer(tmp_path)
        except PyAOError as error:
            line = str(error)
        else:
            (record,) = caplog.records
            line = record.getMessage()
        assert seen in line
        assert reason in line
        return
    run, setting, reason = CASES[name]
    found = [fact for fact in run() if fact.setting == setting]
    (fact,) = found
    if not caplog.records:  # of arguments alone: whoever attaches notes it
        EffectLedger().note(fact)
    assert reason in fact.reason
    assert all(fact.to_dict().values())
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{setting} has")]
    assert lines == [f"{fact.line} [pyao:{fact.key}]"]
    assert "\n" not in fact.line


def test_what_training_arguments_switch_on_in_vain_is_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        max_steps=1,
        fsdp_config={"activation_checkpointing": True},
    )
    config = dataclasses.replace(EVERYTHING, report=str(path))
    trained(PyAOTrainer, args, pyao_config=config)
    (fact,) = RunReport.from_json_file(path).no_effect
    assert fact["setting"] == "fsdp_activation_checkpointing"


def test_ring_attention_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_sequence_parallel(SimpleNamespace(parallelism_config=SimpleNamespace(cp_size=2)))
    assert "cp_size=2" in caplog.text
    assert "ring attention" in caplog.text
    caplog.clear()
    warn_of_sequence_parallel(SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2)))
    warn_of_sequence_parallel(SimpleNamespace(parallelism_config=None))
    warn_of_sequence_parallel(SimpleNamespace())
    assert not caplog.text
