"""Examples of runs, of files of weights on a disk, and of commands."""

from __future__ import annotations

import dataclasses
import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import disk_blocks, disk_files
from hf_pyao.engine.stores.disk_blocks import BlockFile, file_of_blocks
from hf_pyao.engine.stores.disk_reader import DiskReader
from tests.catalogue.examples.table import example
from tests.helpers import EVERYTHING, tiny_batch, tiny_model


@example("device-memory-unknown")
def _(folder: Path) -> None:
    from hf_pyao.auto.install.weights import streaming_of

    unused: Any = None
    settings: Any = SimpleNamespace(value="auto", label="stream_weights", embeddings="off")
    streaming_of(unused, unused, settings, unused, torch.device("cuda"))


@example("no-tighter-plan")
def _(folder: Path) -> None:
    from hf_pyao.auto.machine.states import Question, SetState, State
    from hf_pyao.auto.performer import AutoActions

    def planned(state: State) -> None:
        raise RuntimeError("the layers saved other tensors than those that were planned")

    performer: Any = SimpleNamespace(_planned=planned)
    state = State(SetState(question=Question(less_memory=True)))
    AutoActions._make_plan(performer, state)


def _told(rule_name: str, event: Any) -> None:
    """Tell the machine of *event* while it follows a plan; show what it says by a rule."""
    from hf_pyao.auto.machine import actions, rules, states
    from hf_pyao.auto.performer import AutoActions

    now = states.SetState(mode=states.Mode.FOLLOWING)
    state = states.State(name="auto", num_rounds_left=1, now=now)
    found = getattr(rules, rule_name)(state, event)[1]
    for action in found:
        if isinstance(action, actions.Say) and action.key:
            AutoActions._show(SimpleNamespace(), action)  # type: ignore[arg-type]


@example("plan-not-adopted")
def _(folder: Path) -> None:
    from hf_pyao.auto.machine import events

    _told(
        "failed",
        events.Failed("RuntimeError: the step ran other layers than those that were recorded"),
    )


@example("plan-not-followed")
def _(folder: Path) -> None:
    from hf_pyao.auto.machine import events

    _told("refused", events.Refused("'model.layers.3' draws numbers of another thread"))


@example("offloads-everything")
def _(folder: Path) -> None:
    from hf_pyao.auto.machine import events

    _told("failed_after_once", events.Failed("layers that run once leave no plan that fits"))


@example("profile-other-model")
def _(folder: Path) -> None:
    config = dataclasses.replace(EVERYTHING, profile=folder / "profile.json", profile_steps=1)
    for architecture in ("llama", "gpt2"):
        model = tiny_model(architecture)
        with attach(model, config):
            for _ in range(2):
                model(**tiny_batch(), use_cache=False).loss.backward()


@example("plan-other-settings")
def _(folder: Path) -> None:
    from hf_pyao.plan.options.plan_levers import GivenLevers, levers_of_plan

    plan: Any = SimpleNamespace(levers={"checkpoint_every": 2})
    levers_of_plan(plan, GivenLevers.of(PyAOConfig(checkpoint_every=1)))


@example("levers-refused")
def _(folder: Path) -> Exception:
    from hf_pyao.levers import LeversRefusedError, or_refuse

    def record() -> None:
        raise TypeError("LlamaDecoderLayer.forward() got an unexpected keyword 'segment'")

    with pytest.raises(LeversRefusedError) as caught:
        or_refuse(record)
    return caught.value


@example("zeroth-order-ranks")
def _(folder: Path) -> None:
    from hf_pyao import ZerothOrder
    from hf_pyao.auto.zeroth_order import checks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "process_rank", lambda: SimpleNamespace(rank=0, num_ranks=4))
        ZerothOrder(tiny_model("llama"))


@example("attention-not-grouped")
def _(folder: Path) -> None:
    from torch.nn.attention import SDPBackend

    from hf_pyao.model.attention.attention_groups import Notes
    from hf_pyao.model.attention.kernels import other_kernel

    Notes("llama").say(other_kernel(SDPBackend.CUDNN_ATTENTION))


@example("logits-after-change")
def _(folder: Path) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, dataclasses.replace(EVERYTHING, head_loss="chunked")):
        outputs = model(**tiny_batch())
        outputs.loss.backward()
        optimizer.step()
        outputs.logits.argmax(-1)


def _file(folder: Path) -> BlockFile:
    return file_of_blocks(folder, [lambda: torch.zeros(9000, dtype=torch.uint8)])


@example("disk")
def _(folder: Path) -> None:
    BlockFile.open(folder / "blocks")


@example("disk-folder")
def _(folder: Path) -> None:
    (folder / "weights").write_text("")
    disk_files.private_folder(folder / "weights", "disk_folder")


@example("disk-not-direct")
def _(folder: Path) -> None:
    def refusing(path: Path, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return disk_files.open_to_read(path, direct=False)

    path = _file(folder).path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_blocks, "open_to_read", refusing)
        BlockFile.open(path)


@example("disk-read-again")
def _(folder: Path) -> None:
    import os

    failed: list[int] = []

    def failing_once(descriptor: int, buffers: Any, offset: int) -> int:
        if not failed:
            failed.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, list(buffers), offset)

    file, reader = _file(folder), DiskReader(failing_once)
    place = file.places[0]
    room = torch.zeros(disk_blocks.padded(place.nbytes) + 4096, dtype=torch.uint8)
    first = -room.data_ptr() % 4096
    target = room[first : first + disk_blocks.padded(place.nbytes)]
    reader.read(file, place, target, 0, place.nbytes).wait()
    reader.close()


@example("other-operations")
def _(folder: Path) -> None:
    from transformers import LlamaConfig

    from hf_pyao.plan.step.scaling import interpolate
    from hf_pyao.tools.estimate.fake_step import FakeTraining
    from hf_pyao.tools.estimate.recorded_step import record_step

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    steps = [
        record_step(FakeTraining(config=config, checkpointing=checkpointing), 2, 8)
        for checkpointing in (False, True)
    ]
    interpolate(list(zip((2, 3), steps, strict=True)))


@example("model-not-run")
def _(folder: Path) -> None:
    from hf_pyao.tools.estimate import jobs

    class Estimator:
        def __init__(self, *_: object, **__: object) -> None: ...

        def row(self, *_: object, **__: object) -> None:
            raise RuntimeError("Cannot call .item() on a fake tensor")

    options: Any = {"ways": (jobs.LONG_CONTEXT,), "options": {}, "micro_batch": None}
    config: Any = SimpleNamespace(model_type="my_model")
    job = jobs.Job(config=config, hardware=None, with_longest=False, **options)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "Estimator", Estimator)
        job.run(lambda name: None)


@example("nothing-advised")
def _(folder: Path) -> None:
    from hf_pyao.tools.advise.script_watch import watched

    script = folder / "train"
    script.write_text("pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        watched(str(script), [], 1, is_module=False)


@example("bench-process")
def _(folder: Path) -> None:
    from hf_pyao.tools.bench import processes

    class Child:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None: ...

        def receive(self, timeout_s: float) -> Any:
            return "", processes.Failure(processes.TIMED_OUT, f"stopped after {timeout_s:.0f} s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Child", Child)
        processes.probe("cuda", with_speeds=False)
