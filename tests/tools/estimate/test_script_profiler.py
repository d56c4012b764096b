"""``pyao profile SCRIPT``: scripts that know nothing of hf_pyao, and those that do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.step.recorded_step import RecordedStep

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, GPT2Config

torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
model = AutoModelForCausalLM.from_config(config).train()
ATTACH
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(int(sys.argv[1])):
    ids = torch.randint(64, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {number} {loss.item():.9f}", flush=True)
print("the script has ended")
"""

USES_IT = """
from hf_pyao import PyAOConfig, attach
offloader = attach(model, PyAOConfig(policy="budget", budget=3, min_bytes=0, window=0))
"""


def run(
    folder: Path, *arguments: str, attach: str = "", num_steps: int = 9, is_module: bool = False
) -> subprocess.CompletedProcess[str]:
    script = folder / "train_tiny.py"
    script.write_text(SCRIPT.replace("ATTACH", attach))
    what = ["-m", "train_tiny"] if is_module else [str(script)]
    return subprocess.run(
        [sys.executable, "-m", "hf_pyao.cli", "profile", *arguments, *what, str(num_steps)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.thorough
def test_a_script_is_profiled_and_ended(tmp_path: Path) -> None:
    found = run(tmp_path, "--steps", "2", "-o", "p.json")
    assert found.returncode == 0, found.stderr
    assert len(losses(found.stdout)) == 2
    assert "the script has ended" not in found.stdout
    assert "| part of a layer |" in found.stdout
    profile = Profile.from_dict(json.loads((tmp_path / "p.json").read_text()))
    assert profile.num_micro_batches == 2
    assert profile.title.startswith("GPT2LMHeadModel")
    assert profile.program is not None, profile.why_no_program
    assert RecordedStep.from_dict(profile.program).layer_names == tuple(profile.layer_names)
    assert profile.settings["policy"] == "all"


@pytest.mark.thorough
def test_a_script_runs_on_and_computes_the_same(tmp_path: Path) -> None:
    found = run(tmp_path, "--keep-running", "--steps", "1", is_module=True, num_steps=4)
    assert found.returncode == 0, found.stderr
    assert "the script has ended" in found.stdout
    plain = subprocess.run(
        [sys.executable, "train_tiny.py", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert losses(found.stdout) == losses(plain.stdout)
    assert len(losses(plain.stdout)) == 4


@pytest.mark.thorough
def test_a_script_that_uses_it_keeps_its_own_settings(tmp_path: Path) -> None:
    found = run(tmp_path, "--steps", "1", attach=USES_IT)
    assert found.returncode == 0, found.stderr
    profile = Profile.from_dict(json.loads((tmp_path / "profile.json").read_text()))
    assert profile.settings["policy"] == "budget"
    assert profile.metrics["offloaded_bytes"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "num_steps", "words"),
    [
        (["--steps", "20"], 2, "it ended before 20 micro-batches"),
        (["--steps", "0"], 2, "--steps is 0"),
        (["--model", "opt:1.3b"], 2, "either a script"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    arguments: list[str], num_steps: int, words: str, tmp_path: Path
) -> None:
    found = run(tmp_path, *arguments, num_steps=num_steps)
    assert found.returncode == 2
    assert words in found.stderr.splitlines()[-1]
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.thorough
def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    found = run(tmp_path, attach="raise ZeroDivisionError('mine')")
    assert found.returncode == 1
    assert "ZeroDivisionError: mine" in found.stderr


PARALLEL = """
import os
import torch.distributed
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
if rank == 1:
    # Slower on one rank, so that means and extremes differ.
    import time
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.05))
model = torch.nn.parallel.DistributedDataParallel(model)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [[], ["--keep-running"]], ids=["ended", "kept running"])
def test_ranks_become_one_profile(arguments: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train_tiny.py"
    script.write_text(SCRIPT.replace("ATTACH", PARALLEL))
    found = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"),
            *("-m", "hf_pyao.cli", "profile", "--steps", "2", *arguments, str(script), "5"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    profile = Profile.from_dict(json.loads((tmp_path / "profile.json").read_text()))
    assert profile.num_ranks == 2, found.stderr
    assert profile.layer_forward is not None
    assert profile.layer_forward.most_ms >= 50
    assert profile.layer_forward.least_ms < 50
    assert profile.program is not None, profile.why_no_program
    assert "least_d2h_gib_per_s" in profile.link
