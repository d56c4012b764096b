"""Each method gives the gradients of none, and leaves no trace in the model."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.config import POLICY_NAMES
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import OK, UNAVAILABLE
from hf_pyao.tools.bench import peers
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.methods import MethodUnavailable, find_method, known_methods
from hf_pyao.tools.bench.setup import Trial
from hf_pyao.tools.bench.worker import run_trial

NOT_ON_A_CPU = {
    "trl-streams": "needs an accelerator|TRL is not installed",
    "trl-no-streams": "needs an accelerator|TRL is not installed",
    "deepspeed": "needs an accelerator|DeepSpeed is not installed",
    "checkpoint-offload": "needs an accelerator|has no `offload`",
    "pyao-single-stream": "a CPU has no streams",
    "pyao-one-copy-stream": "a CPU has no streams",
}
"""Method -> why."""
ON_A_CPU = (
    *(name for name in known_methods() if name not in NOT_ON_A_CPU),
    "pyao:window=4096,min_bytes=0",
    "pyao:policy=modules,modules=mlp_act+core_attn,min_bytes=0",
)
CPU = torch.device("cpu")


def _traces(model: nn.Module) -> list[object]:
    """Return what a method could leave behind."""
    return [
        (
            name,
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
            "forward" in vars(module),
            getattr(module, "gradient_checkpointing", None),
        )
        for name, module in model.named_modules()
    ] + [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]


@pytest.mark.thorough
@pytest.mark.sampled(every=1000)
@pytest.mark.parametrize("method", ON_A_CPU)
def test_gradients_are_those_of_none_and_no_trace_is_left(bench: Bench, method: str) -> None:
    reference = run_trial(bench, Trial(method="none", micro_batch=2))
    before = _traces(bench.model)
    row = run_trial(bench, Trial(method=method, micro_batch=2))
    assert (row.status, row.reason) == (OK, "")
    assert row.gradient_digest == reference.gradient_digest
    assert row.loss == reference.loss
    assert row.step is not None
    assert row.step.num_steps == 2
    assert row.tokens_per_s == pytest.approx(32 / row.step.median_ms * 1e3)
    assert _traces(bench.model) == before
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_every_policy_has_a_row() -> None:
    policies = {
        find_method(name).install.settings["policy"]
        for name in known_methods()
        if name.startswith("pyao-")
    }
    assert policies == set(POLICY_NAMES) - {"plan"}  # which is one model's


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "reason"), NOT_ON_A_CPU.items())
@pytest.mark.sampled(every=1000)
def test_what_cannot_run_here_says_why(bench: Bench, method: str, reason: str) -> None:
    row = run_trial(bench, Trial(method=method, micro_batch=2))
    assert row.status == UNAVAILABLE
    assert re.search(reason, row.reason), row.reason
    assert row.step is None


@pytest.mark.parametrize("method", ["trl-streams", "deepspeed"])
def test_a_missing_package_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(MethodUnavailable, match="is not installed"),
        find_method(method).install(nn.Module(), CPU),
    ):
        pass


def test_an_old_transformers_is_named() -> None:
    class Old(nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            pass

    with (
        pytest.raises(MethodUnavailable, match=r"has no `offload` for checkpointing; 5\.17 has"),
        find_method("checkpoint-offload").install(Old(), CPU),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpont", r"unknown method 'checkpont'; did you mean 'checkpoint'\?"),
        ("pyao:windw=1", r"unknown setting in 'pyao:windw=1': 'windw'; did you mean 'window'\?"),
        ("pyao:window", "unknown setting in 'pyao:window'"),
        ("tests.no_such_file:install", "method 'tests.no_such_file:install' cannot be imported"),
        ("tests.tools.bench.servers:none", r"cannot be imported.*Expected module:function"),
        (":install", "method ':install' cannot be imported"),
    ],
)
def test_an_unknown_method_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_method(name)


def test_a_function_of_another_module_is_a_method(bench: Bench) -> None:
    name = "tests.tools.bench.servers:halved_saved_tensors"
    row = run_trial(bench, Trial(method=name, micro_batch=3))
    reference = run_trial(bench, Trial(method="none", micro_batch=3))
    assert (row.method, row.label, row.status) == (name, name, OK)
    assert row.gradient_digest != reference.gradient_digest


def test_checkpointing_is_switched_off_again_after_an_error(bench: Bench) -> None:
    before = _traces(bench.model)

    def fail() -> None:
        with peers.checkpointing(bench.model):
            assert any(getattr(m, "gradient_checkpointing", False) for m in bench.model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _traces(bench.model) == before


# ---- peers that need a device, through a stand-in of their entry point --------------------------


class _Recorder:
    """A context that notes when it is entered and left."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> _Recorder:
        self.log.append("enter")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.log.append("exit")


CUDA = torch.device("cuda", 0)
"""A device that says it is CUDA; nothing is put there."""


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in content.items():
        setattr(sys.modules[name], key, value)
    found = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda n, *a: n == parts[0] or found(n, *a)
    )


def test_trl_is_entered_around_each_step_and_its_hooks_are_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def get_act_offloading_ctx_manager(model: nn.Module, use_streams: bool) -> _Recorder:
        log.append(f"streams {use_streams}")
        model.lm_head.register_forward_pre_hook(lambda *_: log.append("head"))
        model.lm_head.register_forward_hook(lambda *_: None, always_call=True)
        return _Recorder(log)

    _module(
        monkeypatch,
        "trl.models.activation_offloading",
        get_act_offloading_ctx_manager=get_act_offloading_ctx_manager,
    )
    before = _traces(bench.model)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with find_method("trl-no-streams").install(bench.model, CUDA) as installed:
        for _ in range(2):
            with installed.step():
                bench.model(input_ids=ids)
    assert log == ["streams False", *["enter", "head", "exit"] * 2]
    assert _traces(bench.model) == before
    assert not bench.model.lm_head._forward_hooks_always_called
