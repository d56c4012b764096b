"""Examples of settings, files, conflicts, and the Python API."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOArguments, PyAOConfig, attach
from hf_pyao.auto.install import conflicts
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.run import check_report_path
from tests.catalogue.examples.table import example
from tests.helpers import EVERYTHING, tiny_batch, tiny_model


@example("setting-value")
def _(folder: Path) -> None:
    PyAOConfig(host_memory_gib="4")  # type: ignore[arg-type]


@example("bytes-without-unit")
def _(folder: Path) -> None:
    PyAOConfig(window=300)


@example("unknown-name")
def _(folder: Path) -> None:
    PyAOConfig.from_dict({"polcy": "all"})


@example("setting-removed")
def _(folder: Path) -> None:
    PyAOConfig(activation_memory_budget=0.5)  # type: ignore[call-arg]


@example("setting-missing")
def _(folder: Path) -> None:
    PyAOConfig(policy="modules")


@example("setting-without-effect")
def _(folder: Path) -> None:
    PyAOConfig(policy="all", modules=("mlp_act",))


@example("settings-contradict")
def _(folder: Path) -> None:
    PyAOConfig(policy="pyao", checkpoint_every=1)


@example("wrong-argument")
def _(folder: Path) -> None:
    attach("model")  # type: ignore[arg-type]


@example("file-unreadable")
def _(folder: Path) -> None:
    PyAOConfig.from_json_file(folder / "none.json")


@example("file-damaged")
def _(folder: Path) -> None:
    (folder / "cut.json").write_text('{"policy": ')
    PyAOConfig.from_json_file(folder / "cut.json")


@example("file-other-version")
def _(folder: Path) -> None:
    PyAOConfig.from_dict({"schema_version": 99})


@example("file-kind")
def _(folder: Path) -> None:
    Plan.from_dict({"kind": "profile"})


@example("file-unwritable")
def _(folder: Path) -> None:
    check_report_path(folder)


@example("missing-package")
def _(folder: Path) -> None:
    from hf_pyao.tools.report.plots.look import need_matplotlib

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        need_matplotlib()


@example("needs-gpu")
def _(folder: Path) -> None:
    from hf_pyao.tools.bench.memory import pick_device

    pick_device("xpu:7")


@example("data-parallel")
def _(folder: Path) -> None:
    attach(nn.DataParallel(tiny_model("llama")))


@example("unified-memory")
def _(folder: Path) -> None:
    args: Any = SimpleNamespace(n_gpu=1, device=torch.device("mps"))
    conflicts.check_training_arguments(args)


@example("other-offloader")
def _(folder: Path) -> None:
    with torch.autograd.graph.save_on_cpu():
        attach(tiny_model("llama"))


@example("other-checkpointing")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    attach(model, PyAOConfig(checkpoint_every=1))


@example("compiled-autograd")
def _(folder: Path) -> None:
    import torch._dynamo.config

    with torch._dynamo.config.patch(compiled_autograd=True):
        attach(tiny_model("llama"))


@example("noise-after-save")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = nn.RReLU()
    attach(model)


@example("attached-already")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model):
        attach(model, PyAOConfig(policy="budget", budget=2))


@example("no-layers-found")
def _(folder: Path) -> None:
    attach(nn.Sequential(nn.Linear(2, 2)))


@example("selects-nothing")
def _(folder: Path) -> None:
    attach(tiny_model("llama"), PyAOConfig(policy="modules", modules=("mlp_atc",)))


@example("modules-overlap")
def _(folder: Path) -> None:
    attach(tiny_model("llama"), PyAOConfig(layers=("model.layers", "model.layers.0.mlp")))


@example("module-map")
def _(folder: Path) -> None:
    from hf_pyao import ModuleMap

    ModuleMap(layers=())


@example("internal")
def _(folder: Path) -> None:
    from hf_pyao.engine.transfer.mover import MovedBytes, Phase

    moved: Any = SimpleNamespace(
        label="'mlp.act_fn:0' of layer 'model.layers.0'", phase=Phase.RELEASED
    )
    MovedBytes.to(moved, Phase.AWAY)


@example("streaming-sharded")
def _(folder: Path) -> None:
    conflicts.check_engine_of_streaming(SimpleNamespace(fsdp="full_shard"), "stream_weights")


@example("nothing-to-stream")
def _(folder: Path) -> None:
    attach(tiny_model("llama"), PyAOConfig(stream_weights=0))


def frozen(model_type: str = "llama") -> Any:
    """Return a tiny model whose layers are frozen, but for their norms."""
    model = tiny_model(model_type)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


@example("streaming-host-memory")
def _(folder: Path) -> None:
    attach(frozen(), PyAOConfig(stream_weights=0, host_memory_gib=1e-6))


@example("streaming-compiled")
def _(folder: Path) -> None:
    model = frozen()
    attach(torch.compile(model), PyAOConfig(stream_weights=0))


@example("weights-copied-per-process")
def _(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        attach(frozen(), PyAOConfig(stream_weights=0)).detach()


@example("streamed-weight-trained")
def _(folder: Path) -> None:
    model = frozen()
    with attach(model, PyAOConfig(stream_weights=0)):
        model.requires_grad_(True)
        model(**tiny_batch()).loss.backward()


@example("streamed-weight-replaced")
def _(folder: Path) -> None:
    model = frozen()
    with attach(model, PyAOConfig(stream_weights=0)):
        model.half()


@example("streamed-weight-changed")
def _(folder: Path) -> None:
    from hf_pyao.engine.weights.device_weight import lost_write

    raise lost_write("model.layers.0.mlp.up_proj.weight")


@example("changed-in-place")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    saved: list[torch.Tensor] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, x, y: saved.append(x[0]))
    with attach(model, EVERYTHING):
        loss = model(**tiny_batch()).loss
        with torch.no_grad():
            saved[0].mul_(2)
        loss.backward()


@example("changed-before-second-run")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model, PyAOConfig(checkpoint_every=1)):
        loss = model(**tiny_batch()).loss
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.add_(1)
        loss.backward()


@example("recompute-differs")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    mlp, calls = model.model.layers[1].mlp, []
    forward = mlp.forward

    def other(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(x) if len(calls) == 1 else forward(x[:, :1]).expand_as(x)

    mlp.forward = other
    with attach(model, PyAOConfig(checkpoint_every=1)):
        model(**tiny_batch()).loss.backward()


@example("nothing-offloaded")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model, dataclasses.replace(EVERYTHING, min_bytes=2**40)):
        for _ in range(3):
            model(**tiny_batch()).loss.backward()


@example("no-effect")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model, dataclasses.replace(EVERYTHING, window=2**30)):
        for _ in range(6):
            model(**tiny_batch()).loss.backward()


@example("host-memory-full")
def _(folder: Path) -> None:
    from hf_pyao.engine.stores.host_pool import HostPool

    HostPool(2**20, pin=False).acquire(2**21)


@example("host-memory-not-pinned")
def _(folder: Path) -> None:
    from hf_pyao.engine.stores.slabs import _warn_of_pageable

    _warn_of_pageable(2**30, "cudaHostRegister: error 2")


@example("codec-without-triton")
def _(folder: Path) -> None:
    from hf_pyao.engine.codecs.backend import _working_kernels

    _working_kernels.__wrapped__("no_device")


@example("shared-link")
def _(folder: Path) -> None:
    from hf_pyao.engine.stores.host_pool import HostPool
    from hf_pyao.engine.transfer.link import LinkContext
    from hf_pyao.engine.transfer.stream_transport import transport_for

    link = LinkContext(transport_for(torch.device("cpu")), HostPool(2**20, pin=False), 2**20)
    attach(tiny_model("llama"), PyAOConfig(window=2**21), link=link)


@example("backward-twice")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model, PyAOConfig(head_loss="chunked")):
        loss = model(**tiny_batch()).loss
        loss.backward()
        loss.backward()


@example("second-derivatives")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    with attach(model, PyAOConfig(policy="off", head_loss="chunked")):
        loss = model(**tiny_batch()).loss
        torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


@example("setting-given-twice")
def _(folder: Path) -> None:
    path = folder / "settings.json"
    path.write_text(json.dumps({"policy": "all", "min_bytes": 5}))
    arguments = PyAOArguments(
        activation_offload=True, activation_offload_config=str(path), activation_offload_min_bytes=7
    )
    arguments.pyao_config()


@example("mixin-order")
def _(folder: Path) -> None:
    from transformers import Trainer

    from hf_pyao import PyAOTrainerMixin

    type("Mine", (Trainer, PyAOTrainerMixin), {})


@example("plugin-bound")
def _(folder: Path) -> None:
    from accelerate import Accelerator

    from hf_pyao import PyAOPlugin

    plugin = PyAOPlugin()
    plugin.bind(Accelerator(cpu=True))
    plugin.bind(Accelerator(cpu=True))


@example("micro-batch-conflict")
def _(folder: Path) -> None:
    from hf_pyao.hf.micro_batch.checks import check_auto_micro_batch

    args = SimpleNamespace(auto_find_batch_size=True)
    check_auto_micro_batch(args, PyAOConfig(auto_micro_batch="fastest"))


@example("micro-batch-trainer")
def _(folder: Path) -> None:
    from hf_pyao.hf.micro_batch.checks import refuse_without_trainer

    refuse_without_trainer(PyAOConfig(auto_micro_batch="fastest"), "PyAOPlugin")


@example("micro-batch-trial")
def _(folder: Path) -> None:
    from hf_pyao.hf.micro_batch.trial_step import check_undoable

    model = tiny_model("llama")
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    check_undoable(model)


@example("one-copy-setup")
def _(folder: Path) -> None:
    from hf_pyao import one_copy_per_node

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        with one_copy_per_node():
            pass


@example("one-copy-model")
def _(folder: Path) -> None:
    from hf_pyao.hf.shared_loading import _check

    _check(SimpleNamespace(device_map={"": "cuda:0"}))


@example("length-too-long")
def _(folder: Path) -> None:
    from hf_pyao.tools.estimate.model_specs import check_sequence_length

    check_sequence_length(SimpleNamespace(max_position_embeddings=2048), 4096)


@example("model-spec")
def _(folder: Path) -> None:
    from hf_pyao.tools.estimate.model_specs import config_of, parse_model

    config_of(parse_model("llama:hidden_size=64,tiny"))


@example("plan-invalid")
def _(folder: Path) -> None:
    from hf_pyao.plan.documents.plan_facts import PlanFacts

    PlanFacts(step_ms=-1.0)


@example("logits-gradient")
def _(folder: Path) -> None:
    from hf_pyao.model.head.put_off_call import _AfterLoss

    _AfterLoss.apply(torch.ones(2), torch.ones(1, requires_grad=True)).sum().backward()


@example("micro-batch-data")
def _(folder: Path) -> None:
    from hf_pyao.hf.micro_batch.sample_batches import SampleBatches

    SampleBatches(SimpleNamespace(dataset=[]))


@example("one-copy-rank-lost")
def _(folder: Path) -> None:
    from hf_pyao.hf.shared_loading import _hear, _Member

    silent: Any = SimpleNamespace(num_ranks=1, heard_from=lambda rank: None)
    _hear(silent, _Member(1, 4711))


@example("hooks-taken-down")
def _(folder: Path) -> None:
    from hf_pyao.engine.torch_hooks import saved_tensor_hooks as hooks

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    vars(pack)[hooks._IS_ON] = True
    hooks.pop_hooks(pack, "model.layers.0")


@example("host-memory-refused")
def _(folder: Path) -> None:
    from hf_pyao.engine.stores import slabs

    owner = next(c for c in vars(slabs).values() if hasattr(c, "_warn_of_smaller"))
    owner._warn_of_smaller(SimpleNamespace(_is_refusal_logged=False), 2**30, 2**28, "no memory")


@example("zeroth-order-untrained")
def _(folder: Path) -> None:
    from hf_pyao import ZerothOrder, ZerothOrderSettings

    ZerothOrder(tiny_model("llama").requires_grad_(False), ZerothOrderSettings())


@example("ranks-not-told")
def _(folder: Path) -> None:
    from hf_pyao.auto.ranks import rank_exchange

    two = SimpleNamespace(rank=0, num_ranks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_exchange, "process_rank", lambda: two)
        rank_exchange.RankExchange("a profile")


@example("speeds-unknown")
def _(folder: Path) -> None:
    from hf_pyao.plan.hardware import device_speeds

    none = SimpleNamespace(tflop_per_s=None, memory_gib_per_s=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_speeds, "measure_device", lambda device: none)
        patch.setattr(device_speeds, "measure_link", lambda device: none)
        device_speeds._measured(torch.device("cuda"), "NVIDIA X")


@example("nothing-measured")
def _(folder: Path) -> None:
    from hf_pyao.cli import make_parser

    script = folder / "train"
    script.write_text("pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(sys.argv))
        output = str(folder / "profile.json")
        args = make_parser().parse_args(["profile", "-o", output, str(script)])
        args.run(args)


@example("zeroth-order-resume")
def _(folder: Path) -> None:
    from hf_pyao import ZerothOrder, ZerothOrderSettings

    with ZerothOrder(tiny_model("llama"), ZerothOrderSettings(seed=1)) as order:
        state = order.state_dict()
    with ZerothOrder(tiny_model("llama"), ZerothOrderSettings(seed=2)) as order:
        order.load_state_dict(state)


@example("zeroth-order-reference")
def _(folder: Path) -> None:
    from hf_pyao import ZerothOrder

    model = tiny_model("llama")
    model.model.layers[0].mlp.lstm = nn.LSTM(4, 4)
    ZerothOrder(model)


@example("zeroth-order-attached")
def _(folder: Path) -> None:
    from hf_pyao import PyAOConfig, ZerothOrder, attach

    model = tiny_model("llama")
    with attach(model, PyAOConfig(policy="auto")):
        ZerothOrder(model)


@example("zeroth-order-model")
def _(folder: Path) -> None:
    from hf_pyao import ZerothOrder

    model = tiny_model("llama")
    model.model.layers[0].compile(backend="eager")
    ZerothOrder(model)


@example("zeroth-order-threads")
def _(folder: Path) -> None:
    import threading

    from hf_pyao import ZerothOrder

    model = tiny_model("llama")
    with ZerothOrder(model) as order:
        has_begun, may_end = threading.Event(), threading.Event()

        def run() -> None:
            with order.visits.in_use:
                has_begun.set()
                may_end.wait()

        other = threading.Thread(target=run)
        other.start()
        has_begun.wait()
        try:
            order.accumulate(model, lambda model: model)
        finally:
            may_end.set()
            other.join()
