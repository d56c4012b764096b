"""The scripts as users start them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from run_summary import COUNTED_ON_CPU
from tests.recipes.conftest import RECIPES, REPOSITORY

Script = Callable[..., subprocess.CompletedProcess[str]]

# What is None there cannot be imported: a recipe needs torch, transformers and accelerate alone.
WITHOUT_EXTRAS = """
import sys
for name in ("datasets", "rich", "trl", "peft", "scipy", "matplotlib"):
    sys.modules[name] = None
"""


def launch(*options: str) -> tuple[str, ...]:
    return ("-m", "accelerate.commands.launch", "--dynamo_backend", "no", *options)


@pytest.mark.thorough
def test_accelerate_launch_ends_with_the_table_and_needs_no_extras(
    run_script: Script, micro_options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT_EXTRAS)
    script = str(RECIPES / "train_opt.py")
    done = run_script(
        *(*launch(), script, *micro_options, "--model_size", "micro"),
        PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), str(REPOSITORY)]),
    )
    assert done.returncode == 0, done.stderr
    assert COUNTED_ON_CPU in done.stdout
    assert "hf_pyao offloads" in done.stderr
    assert "Traceback" not in done.stderr
    # The default folder, below the one that the command was given in.
    assert (tmp_path / "outputs/train_opt/model.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_train_one_model_and_one_speaks(
    run_script: Script, micro_options: list[str], tmp_path: Path
) -> None:
    processes = launch("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    script = str(RECIPES / "train_opt.py")
    done = run_script(*processes, script, *micro_options, "--model_size", "micro")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(COUNTED_ON_CPU) == 1
    assert "4 x 32 tokens, each of 2 processes" in done.stdout
    before, after = re.findall(r"held-out text +([\d.]+) +([\d.]+)", done.stdout)[0]
    assert float(after) < float(before)


def test_loop_by_hand_offloads_and_learns_the_same(
    text_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = (
        *("--model_size", "micro", "--steps", "3", "--block_size", "32", "--batch_size", "4"),
        *("--max_text_mib", "0.1", "--vocab_size", "400"),
    )
    import accelerate_loop  # in this process: imports are most of what a short run costs

    monkeypatch.setenv("PYAO_MIN_BYTES", "1024")
    monkeypatch.setenv("HF_HOME", str(text_cache))
    monkeypatch.setattr(sys, "argv", ["accelerate_loop.py", *options])
    printed = []
    for enabled in ("true", "false"):
        monkeypatch.setenv("PYAO_ENABLED", enabled)
        accelerate_loop.train(accelerate_loop.parse_arguments())
        printed.append(capfd.readouterr().out)
    offloaded, plain = printed
    assert COUNTED_ON_CPU in offloaded
    (num_mib,) = re.findall(r"moved to the host: ([\d.]+) MiB", offloaded)
    assert float(num_mib) > 0
    assert "moved" not in plain

    losses, plain_losses = (re.findall(r"loss .*: ([\d.]+)", text) for text in printed)
    assert losses == plain_losses
    before, after = map(float, losses)
    assert after < before


@pytest.mark.thorough
def test_a_model_larger_than_the_cap_trains_with_the_bits_of_the_resident_one(
    run_script: Script, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "result.json"
    script = str(RECIPES / "lora_larger_than_the_card.py")
    done = run_script("-W", "ignore", script, "--smoke", "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["bits_are_equal"] is True
    assert result["peak_bytes"] <= result["cap_bytes"] < result["weights_bytes"] / 2.9
    assert result["resident_peak_bytes"] > result["weights_bytes"]
    assert result["uploads_per_step"] == 37, "38 in the first of two steps, 36 in the second"
