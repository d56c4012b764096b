"""The plugin and the accelerator: what is prepared is attached, by flags of the environment too."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, set_seed

from hf_pyao import PyAOAccelerator, PyAOConfig, PyAOPlugin
from hf_pyao.errors import ConfigError, ConflictError, NoLayersFoundError
from hf_pyao.plan.documents.run import RunReport
from tests.helpers import VOCAB, assert_same_parameters, num_hooks, tiny_model

SMALL: dict[str, Any] = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.25}
"""Tiny models save tiny tensors: offload those too."""


def tiny_llama(num_layers: int = 3) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=num_layers, dropout=0.1)


def train(accelerator: Accelerator, *wrapped: nn.Module, num_steps: int = 2) -> list[nn.Module]:
    """Prepare the models with an optimizer each, and train them a little on the same rows."""
    generator = torch.Generator().manual_seed(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in wrapped]
    prepared = accelerator.prepare(*wrapped, *optimizers)
    models, optimizers = prepared[: len(wrapped)], prepared[len(wrapped) :]
    set_seed(2)
    for _ in range(num_steps):
        rows = torch.randint(0, VOCAB, (2, 12), generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.train()
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            optimizer.step()
            optimizer.zero_grad()
    return list(models)


def test_fields_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PYAO_POLICY": "modules",
        "PYAO_MODULES": "mlp_act, core_attn",
        "PYAO_MIN_BYTES": "1024",
        "PYAO_WINDOW": "4 KiB",
        "PYAO_BENCH_START_METHOD": "spawn",  # of `pyao bench`: no setting
    }.items():
        monkeypatch.setenv(name, value)
    from_environment = PyAOConfig(
        policy="modules", modules=("mlp_act", "core_attn"), min_bytes=1024, window=4096
    )
    assert PyAOPlugin().config() == from_environment
    expected = dataclasses.replace(from_environment, min_bytes=7, window="layer")
    assert PyAOPlugin(min_bytes=7, window="layer").config() == expected


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PYAO_MIN_BYTES", "64k", r"PYAO_MIN_BYTES is '64k'; expected a whole number of bytes"),
        ("PYAO_ENABLED", "maybe", r"PYAO_ENABLED is 'maybe'; expected true or false"),
        (
            "PYAO_MODULES",
            "mlp_act",
            r"PYAO_MODULES is \['mlp_act'\], which has no effect while pol",
        ),
        ("PYAO_COPY_STREAMS", "1", r"PYAO_COPY_STREAMS is '1'; this setting .*StreamTransport"),
        ("PYAO_MINBYTES", "1", r"variable 'PYAO_MINBYTES'; did you mean 'PYAO_MIN_BYTES'"),
    ],
)
def test_a_bad_environment_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        PyAOPlugin()


def test_an_empty_variable_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYAO_MODULES", "")
    monkeypatch.setenv("PYAO_ENABLED", "")
    assert PyAOPlugin().config() == PyAOConfig()


@pytest.mark.parametrize("how", ["plugin", "accelerator", "environment"])
def test_a_prepared_model_trains_bitwise_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reference,) = train(Accelerator(cpu=True), tiny_llama())
    if how == "plugin":
        accelerator = Accelerator(cpu=True)
        plugin = PyAOPlugin(**SMALL).bind(accelerator)
    elif how == "accelerator":
        accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
        plugin = accelerator.pyao_plugin
    else:
        monkeypatch.setenv("PYAO_ENABLED", "true")
        monkeypatch.setenv("PYAO_MIN_BYTES", "0")
        monkeypatch.setenv("PYAO_POLICY", "all")
        accelerator = PyAOAccelerator(cpu=True)
        plugin = accelerator.pyao_plugin
    assert plugin.metrics() == {}
    (model,) = train(accelerator, tiny_llama())
    assert_same_parameters(model, reference)
    assert plugin.metrics()["offloaded_bytes"] > 0
    assert num_hooks(model) > num_hooks(reference)
    plugin.detach()
    assert num_hooks(model) == num_hooks(reference)
    assert plugin.offloaders == []


def test_disabled_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYAO_ENABLED", "false")
    accelerator = PyAOAccelerator(cpu=True)
    model = accelerator.prepare(tiny_llama())
    assert num_hooks(model) == 0
    assert accelerator.pyao_plugin.offloaders == []
    assert "prepare" not in vars(accelerator)


def test_a_backward_for_which_no_layer_saved_anything_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = Accelerator(cpu=True)
    plugin = PyAOPlugin(**SMALL).bind(accelerator)
    trained, teacher = accelerator.prepare(tiny_llama().train(), tiny_llama())
    teacher.requires_grad_(False)
    ids = torch.arange(8).reshape(2, 4)
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        with torch.no_grad():
            teacher(ids)
        accelerator.backward(trained(input_ids=ids, labels=ids).loss)
        assert not caplog.records, "one of the two models is trained"
        trained.model.requires_grad_(False)
        for _ in range(2):
            accelerator.backward(trained(input_ids=ids, labels=ids).loss)
    assert len(caplog.records) == 1
    plugin.detach()


def test_the_backward_of_another_model_is_no_sign_of_idleness(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    critic, ids = nn.Linear(5, 1), torch.arange(6).reshape(2, 3)
    actor, student = accelerator.prepare(tiny_llama().train(), tiny_llama(4).train())
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        accelerator.backward(critic(torch.ones(5)).sum())
        losses = [model(input_ids=ids, labels=ids).loss for model in (actor, student)]
        for loss in losses:
            accelerator.backward(loss)
        assert not caplog.records
        bypassed = accelerator.prepare(tiny_llama(2).train())
        for module in bypassed.modules():  # as code does that was compiled before
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        for _ in range(2):
            accelerator.backward(bypassed(input_ids=ids, labels=ids).loss)
    assert ["no layer was seen" in r.getMessage() for r in caplog.records] == [True]


def test_several_models_are_told_apart() -> None:
    references = train(Accelerator(cpu=True), tiny_llama(3), tiny_llama(2))
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    models = train(accelerator, tiny_llama(3), tiny_llama(2))
    for model, reference in zip(models, references, strict=True):
        assert_same_parameters(model, reference)
    metrics = accelerator.pyao_plugin.metrics()
    larger, smaller = (metrics[f"model{i}/offloaded_bytes"] for i in (0, 1))
    assert larger > smaller > 0


def test_a_model_that_is_prepared_again_stays_attached_once() -> None:
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    model = accelerator.prepare(tiny_llama())
    hooks = num_hooks(model)
    accelerator.prepare(model)
    assert num_hooks(model) == hooks
    assert len(accelerator.pyao_plugin.offloaders) == 1


def test_binding_is_idempotent_and_undone() -> None:
    accelerator = Accelerator(cpu=True)
    plugin = PyAOPlugin(**SMALL)
    assert plugin.bind(accelerator) is plugin
    wrapper = accelerator.prepare
    plugin.bind(accelerator)
    assert accelerator.prepare is wrapper

    model = accelerator.prepare(tiny_llama())
    plugin.unbind()
    plugin.unbind()
    assert not {"prepare", "free_memory", "end_training"} & set(vars(accelerator))
    assert num_hooks(model) > 0, "unbinding concerns the accelerator alone"
    other = accelerator.prepare(tiny_llama())
    assert num_hooks(other) == 0
    plugin.detach()
    plugin.detach()
    assert num_hooks(model) == 0


def test_unbinding_leaves_the_wrappers_of_others_in_place() -> None:
    accelerator = Accelerator(cpu=True)
    calls: list[str] = []

    def wrap(name: str) -> None:
        inner = accelerator.prepare

        def prepare(*objects: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*objects, **kwargs)

        accelerator.prepare = prepare

    wrap("before")
    plugin = PyAOPlugin(**SMALL).bind(accelerator)
    wrap("after")
    plugin.unbind()
    model = accelerator.prepare(tiny_llama())
    assert calls == ["after", "before"]
    assert num_hooks(model) == 0


def test_a_second_accelerator_needs_its_own_plugin() -> None:
    plugin = PyAOPlugin().bind(Accelerator(cpu=True))
    with pytest.raises(ConflictError, match="another Accelerator"):
        plugin.bind(Accelerator(cpu=True))


@pytest.mark.thorough
def test_a_pickled_accelerator_is_bound_to_itself() -> None:
    first = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    (trained,) = train(first, tiny_llama(2))
    other = pickle.loads(pickle.dumps(first))
    copied = other.pyao_plugin
    assert copied.offloaders == []
    (model,), (reference,) = (train(each, tiny_llama(2)) for each in (other, Accelerator(cpu=True)))
    assert_same_parameters(model, reference)
    assert len(copied.offloaders) == len(first.pyao_plugin.offloaders) == 1
    copied.detach()
    assert num_hooks(model) == 0 and "prepare" not in vars(other)
    assert num_hooks(trained) > 0 and "prepare" in vars(first)


def test_freeing_memory_lets_the_models_go() -> None:
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    (model,) = train(accelerator, tiny_llama(), num_steps=1)
    accelerator.free_memory()
    assert num_hooks(model) == 0
    assert accelerator.pyao_plugin.offloaders == []
    (model,) = train(accelerator, model, num_steps=1)
    assert accelerator.pyao_plugin.metrics()["offloaded_bytes"] > 0


def test_the_end_of_training_detaches_and_writes_the_reports(tmp_path: Path) -> None:
    plugin = PyAOPlugin(**SMALL, report=str(tmp_path / "report.json"))
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=plugin)
    models = train(accelerator, tiny_llama(3), tiny_llama(2))
    accelerator.end_training()
    assert [num_hooks(model) for model in models] == [0, 0]
    reports = [
        RunReport.from_json_file(tmp_path / name) for name in ("report.json", "report.model1.json")
    ]
    larger, smaller = (report.totals["offloaded_bytes"] for report in reports)
    assert larger > smaller > 0


def test_a_model_without_layers_is_an_error() -> None:
    accelerator = PyAOAccelerator(cpu=True)
    with pytest.raises(NoLayersFoundError):
        accelerator.prepare(nn.Linear(2, 2))


def test_models_without_layers_are_passed_over_beside_one_that_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    with caplog.at_level(logging.INFO, "hf_pyao"):
        head, model, noisy = accelerator.prepare(nn.Linear(4, 4), tiny_llama(), nn.RReLU())
        later = accelerator.prepare(nn.Linear(2, 2))
    assert [num_hooks(m) > 0 for m in (head, model, noisy, later)] == [False, True, False, False]
    passed = [r.getMessage() for r in caplog.records if "is not offloaded" in r.getMessage()]
    assert passed == [
        f"a {name} is not offloaded: it has no layers" for name in ("Linear", "RReLU", "Linear")
    ]
    assert len(accelerator.pyao_plugin.offloaders) == 1


def test_named_layers_say_which_model_is_meant() -> None:
    plugin = PyAOPlugin(**SMALL, layers=("blocks.*",))
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=plugin)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    model, critic = accelerator.prepare(tiny_llama(), Critic())
    assert num_hooks(model) == 0
    assert plugin.offloaders[0].layer_names == ("blocks.0", "blocks.1", "blocks.2")
    assert num_hooks(critic) > 0


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Remembers what it is given, as TensorBoard or W&B would."""

    name = "memory"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Tracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((dict(values), step))


@pytest.mark.parametrize("how", ["plugin", "accelerator"])
@pytest.mark.parametrize("log_metrics", ["off", "summary", "all"])
def test_trackers_get_the_metrics(how: str, log_metrics: str) -> None:
    tracker = Tracker()
    plugin = PyAOPlugin(**SMALL, log_metrics=log_metrics)
    if how == "plugin":
        accelerator = Accelerator(cpu=True, log_with=tracker)
        plugin.bind(accelerator)
    else:
        accelerator = PyAOAccelerator(cpu=True, log_with=tracker, pyao_plugin=plugin)
    accelerator.init_trackers("a run")
    (model,) = train(accelerator, tiny_llama(), num_steps=1)
    given = {"loss": 1.0, "pyao/held_bytes": -1.0}
    accelerator.log(given, step=7)
    accelerator.log(values={"eval_loss": 2.0}, step=7)
    assert given == {"loss": 1.0, "pyao/held_bytes": -1.0}, "the caller's own is left alone"
    (values, step), evaluated = tracker.logged
    assert step == 7
    assert values["pyao/held_bytes"] == -1.0, "what the caller says wins"
    assert evaluated == ({"eval_loss": 2.0}, 7), "no micro-batch has ended since"
    found = {key.removeprefix("pyao/") for key in values} - {"loss", "held_bytes"}
    if log_metrics == "all":
        assert {"would_hold_bytes", "kept_bytes/last layer"} < found
    else:
        assert found == ({"offloaded_bytes"} if log_metrics == "summary" else set())
    if log_metrics != "off":
        assert values["pyao/offloaded_bytes"] == plugin.metrics()["offloaded_bytes"] > 0
    train(accelerator, model, num_steps=1)
    accelerator.log({"loss": 1.0})
    assert ("pyao/offloaded_bytes" in tracker.logged[-1][0]) == (log_metrics != "off")
    plugin.detach()
    accelerator.log({"loss": 1.0})
    assert tracker.logged[-1][0] == {"loss": 1.0}


@pytest.mark.distributed
@pytest.mark.usefixtures("one_rank")
def test_under_ddp_it_is_bitwise_the_same() -> None:
    def prepared_by(accelerator: Accelerator) -> nn.Module:
        accelerator.state.distributed_type = DistributedType.MULTI_CPU
        (model,) = train(accelerator, tiny_llama())
        assert isinstance(model, DistributedDataParallel)
        return model

    reference = prepared_by(Accelerator(cpu=True))
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    model = prepared_by(accelerator)
    assert_same_parameters(model, reference)
    assert accelerator.pyao_plugin.metrics()["offloaded_bytes"] > 0


@pytest.mark.distributed
@pytest.mark.usefixtures("one_rank")
def test_under_fsdp2_which_bypasses_prepare_model_it_is_bitwise_the_same() -> None:
    def prepared_by(accelerator: Accelerator) -> nn.Module:
        # On a CPU Accelerate would fall back to DDP in silence.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        (model,) = train(accelerator, tiny_llama())
        assert type(model).__name__ == "FSDPLlamaForCausalLM"
        return model

    def full_parameters(model: nn.Module) -> list[torch.Tensor]:
        return [parameter.full_tensor() for parameter in model.parameters()]

    reference = full_parameters(prepared_by(Accelerator(cpu=True)))
    accelerator = PyAOAccelerator(cpu=True, pyao_plugin=PyAOPlugin(**SMALL))
    parameters = full_parameters(prepared_by(accelerator))
    assert all(torch.equal(p, r) for p, r in zip(parameters, reference, strict=True))
    assert accelerator.pyao_plugin.metrics()["offloaded_bytes"] > 0


@pytest.mark.thorough
def test_the_environment_passes_through_accelerate_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from hf_pyao import PyAOAccelerator\n"
        "plugin = PyAOAccelerator().pyao_plugin\n"
        "print('config:', plugin.enabled, plugin.config().min_bytes)\n",
        encoding="utf-8",
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launched = subprocess.run(
        [
            *launch,
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            script,
        ],
        env={**os.environ, "PYAO_ENABLED": "true", "PYAO_MIN_BYTES": "77"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    assert "config: True 77" in launched.stdout
