"""A plan is followed after resuming only on a device like the one that it was made for."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pyao import Offloader, PyAOConfig, PyAOPlugin, attach
from hf_pyao.auto.policy import PLAN_FILE
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from tests.helpers import tiny_batch, tiny_model

VERSION_0_1 = Path(__file__).parents[1] / "plan" / "documents" / "version_0_1"
"""Plans that version 0.1 wrote for the model of :func:`train` within :data:`SMALL_GIB`."""

SMALL_GIB = 6.5e-4
"""Less than keeping everything needs, and more than the least that a plan needs."""

LARGE_GIB = 4e-3
"""Everything fits."""


def config(gib: float | None, **settings: Any) -> PyAOConfig:
    return PyAOConfig(
        min_bytes=256, host_memory_gib=0.1, device_memory_gib=gib, profile_steps=2, window="layer",
        **settings,
    )  # fmt: skip


def saves_memory(offloader: Offloader) -> bool:
    if offloader.engine.rests:
        return False
    metrics = offloader.metrics()
    return metrics["offloaded_bytes"] + metrics["recomputed_bytes"] > 0


def train(path: Path, gib: float | None, *, saves: bool = False, **settings: Any) -> list[str]:
    """Train from the plan in *path*, if there is one.

    Returns:
        For each micro-batch "saved" if layers held less than what they save for backward, because
        it was offloaded or recomputed, else "kept". Which of the two ways saves memory is up to
        the planner.
    """
    model = tiny_model("opt")
    batch = {name: torch.cat([value] * 8) for name, value in tiny_batch(0).items()}
    done: list[str] = []
    with attach(model, config(gib, **settings)) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(path)
        for _ in range(5):
            model.zero_grad()
            model(**batch).loss.backward()
            done.append("saved" if saves_memory(offloader) else "kept")
        if saves:
            offloader.auto.save(path)
    return done


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / PLAN_FILE
    assert train(path, SMALL_GIB, saves=True)[-1] == "saved"
    return path


def test_on_the_same_device_it_is_followed(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert train(saved, SMALL_GIB * 1.01) == ["saved"] * 5
    assert "the plan in the checkpoint" in caplog.text


def test_a_checkpoint_of_version_0_1_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its plan is followed; one with a setting that is gone is made anew, which is said once."""
    caplog.set_level(logging.INFO)
    assert train(VERSION_0_1 / "plan.json", SMALL_GIB) == ["saved"] * 5
    assert "the plan in the checkpoint" in caplog.text and "not followed" not in caplog.text
    for where in ("checkpoint", "file"):
        caplog.clear()
        path = tmp_path / where
        shutil.copy(VERSION_0_1 / "budget_plan.json", path)
        kept = {"plan": str(path)} if where == "file" else {}
        assert train(tmp_path / "none" if kept else path, SMALL_GIB, **kept)[-1] == "saved"
        (said,) = (each for each in caplog.messages if "activation_memory_budget" in each)
        assert "is 0.5; this setting was removed" in said
        assert ("is made anew" if kept else "is not followed") in said
    assert "activation_memory_budget" not in Plan.from_json_file(path).levers


def test_a_plan_of_version_0_1_that_is_to_be_followed_is_refused() -> None:
    path = VERSION_0_1 / "budget_plan.json"
    with pytest.raises(PlanError, match=r"activation_memory_budget is 0\.5; this setting was"):
        attach(tiny_model("opt"), PyAOConfig(policy="plan", plan=str(path)))


@pytest.mark.parametrize("gib", [8.0, LARGE_GIB])
def test_on_a_larger_device_it_is_made_anew(
    gib: float, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert train(saved, gib) == ["saved", "saved", "kept", "kept", "kept"]
    assert "the plan in the checkpoint is made anew: it is for a device with" in caplog.text


def test_the_plan_that_is_kept_is_made_anew_too(tmp_path: Path) -> None:
    path, none = tmp_path / "plan.json", tmp_path / "none"
    train(none, SMALL_GIB, plan=str(path))
    assert Plan.from_json_file(path).facts.device_limit_bytes == int(SMALL_GIB * 2**30)
    assert train(none, 8.0, plan=str(path))[-1] == "kept"
    assert train(none, 8.0, plan=str(path)) == ["kept"] * 5, "it is written anew"
    assert train(none, SMALL_GIB, plan=str(path))[-1] == "saved"


def test_on_a_cpu_without_a_limit_nothing_is_done(saved: Path) -> None:
    assert train(saved, None) == ["kept"] * 5


def test_a_plan_after_running_out_of_memory_is_followed_on_the_same_device(tmp_path: Path) -> None:
    """It is for less than the device has, which is no larger than it was."""
    path = tmp_path / PLAN_FILE
    model = tiny_model("opt")
    batch = {name: torch.cat([value] * 8) for name, value in tiny_batch(0).items()}
    with attach(model, config(LARGE_GIB)) as offloader:
        assert offloader.auto is not None
        for _ in range(3):
            model(**batch).loss.backward()
        offloader.micro_batches.tightening.tighter(torch.OutOfMemoryError())
        if offloader.plan is None:
            pytest.skip("nothing tighter is known")
        offloader.auto.save(path)
    done = train(path, LARGE_GIB)
    assert len(set(done)) == 1, "it is followed from the start"


def test_accelerate_shows_what_was_decided(capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate import Accelerator

    # Nothing fits 1e-6 GiB. The plan with the lowest peak is followed, which saves memory only
    # where the layers' peak is above the head's.
    batch = tiny_batch(0, size=8)
    for gib, words in ((8.0, "everything fits"), (1e-6, "instead of")):
        accelerator = Accelerator(cpu=True)
        plugin = PyAOPlugin(device_memory_gib=gib, profile_steps=2, min_bytes=256, window="layer")
        plugin.bind(accelerator)
        model = tiny_model("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(4):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
        shown = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("policy 'auto' (") and words in line for line in shown) == 1
