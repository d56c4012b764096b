"""Run the recipes: in this process (imports are most of what a short run costs), or as scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"

# As pytest imports this file before the tests beside it, they can import the recipes' modules.
sys.path.insert(0, str(RECIPES))


def messages_in(stderr: str) -> list[str]:
    """Return the lines of *stderr* that a user would call a message.

    Triton's bindings may report, as the interpreter ends, what they did not free: "nanobind:" and
    an indented list. It says nothing about the run.
    """
    lines = [line for line in stderr.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(("nanobind:", " - ", "See https://nano"))]


@dataclass(frozen=True)
class FinishedRun:
    """What one run of a recipe left."""

    output: str
    folder: Path

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, training loss), as logged."""
        state = json.loads((self.folder / "trainer_state.json").read_text())
        return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the run ended with."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    @property
    def metrics(self) -> dict[str, Any]:
        """What the run reports about training and offloading."""
        metrics: dict[str, Any] = json.loads((self.folder / "train_results.json").read_text())
        return metrics

    def row(self, label: str) -> str:
        """Return what the table says behind *label*."""
        (line,) = [line for line in self.output.splitlines() if line.strip().startswith(label)]
        return line.strip().removeprefix(label).strip()


def run_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, *command: str | Path, timeout: float
) -> tuple[Path, str]:
    """Run Python with *command* in a folder, once for all workers of the test run.

    Returns:
        The folder, and what was printed.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, printed = root / name, root / f"{name}.txt"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            folder.mkdir()  # fails where a run failed before: its own worker says why
            done = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert messages_in(done.stderr) == []
            printed.write_text(done.stdout, encoding="utf-8")
    return folder, printed.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs: the text is the same."""
    return tmp_path_factory.mktemp("text_cache")


@pytest.fixture
def micro_options(text_cache: Path) -> list[str]:
    """Options that make a run as short as it can be."""
    return [
        *("--max_steps", "6", "--logging_steps", "1"),
        *("--block_size", "32", "--max_text_mib", "0.1", "--vocab_size", "400"),
        *("--max_eval_blocks", "4", "--per_device_train_batch_size", "4", "--use_cpu"),
        *("--warmup_steps", "1", "--disable_tqdm", "true", "--text_cache_dir", str(text_cache)),
    ]


Run = Callable[..., FinishedRun]


@pytest.fixture
def run_recipe(
    tmp_path: Path,
    micro_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """Return a function that runs ``train_<architecture>.py`` in this process."""

    def run(
        architecture: str, *options: str, folder: str = "run", size: str | None = "micro"
    ) -> FinishedRun:
        import causal_lm

        output_dir = tmp_path / folder
        script = str(RECIPES / f"train_{architecture}.py")
        argv = [script, *micro_options, "--output_dir", str(output_dir)]
        if size is not None:
            argv += ["--model_size", size]
        argv += options
        monkeypatch.setattr(sys, "argv", argv)
        capfd.readouterr()
        causal_lm.main(architecture)
        return FinishedRun(output=capfd.readouterr().out, folder=output_dir)

    return run


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python with arguments in a process of its own, in *tmp_path*."""

    def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
