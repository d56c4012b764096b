"""Figure 6 on real nodes: the training recipes under ``accelerate launch``, one run a system.

Started on every node, with a launch file of ``recipes/configs``. It has not been run on five GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import published
from experiments.communication import COUNTINGS, num_rounds
from experiments.experiment import Options, progress
from experiments.rows import OK, Result, Row
from experiments.systems import (
    BASELINE,
    CHECKPOINTING,
    MODELS,
    PYAO,
    PYAO_CHUNKED,
    PYAO_INT8,
    System,
)
from hf_pyao.errors import ConfigError
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES

STEPS = 8
STEP_LINE = re.compile(r"time of an optimizer step, median of \d+\s+([\d.,]+) (ms|s)\b")
"""What the recipes print at their end (``run_summary.py``)."""

RUN = (BASELINE, PYAO, PYAO_INT8, CHECKPOINTING, PYAO_CHUNKED)


def time_to_target(options: Options) -> Result:
    """Train a few steps of each system; reckon the time to the target from the median step.

    Raises:
        ConfigError: this is no process of ``accelerate launch`` over several nodes.
    """
    num_nodes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_nodes < 2:
        raise ConfigError(
            "--real of Figure 6 runs on every node under `accelerate launch --config_file "
            "recipes/configs/five_nodes_zero2_fp16.yaml`; this is one process of its own."
        )
    rows = []
    for model in options.models:
        small, large = published.MICRO_BATCHES[model]
        for system in progress(RUN, model):
            micro_batch = small if system is BASELINE else large
            step_ms, reason = _step_ms(_command(model, system, micro_batch))
            for counting in COUNTINGS:
                if counting.is_one_step:
                    continue  # the recipe takes an optimizer step for each micro-batch
                rounds = num_rounds(published.TARGET, micro_batch, num_nodes, counting)
                rows.append(
                    Row(
                        model=MODELS[model],
                        system=system.name,
                        micro_batch=micro_batch,
                        quantity="time to 256",
                        unit="s",
                        value=None if step_ms is None else rounds * step_ms / 1e3,
                        status=OK if step_ms is not None else "failed",
                        note=reason,
                        detail={"counting": counting.name, "step_ms": step_ms},
                    )
                )
    if int(os.environ.get("RANK", "0")):
        raise SystemExit(0)  # the first node writes the file
    return Result(rows=rows, assumptions=[f"median of {STEPS} optimizer steps, times the rounds"])


def _command(model: str, system: System, micro_batch: int) -> list[str]:
    recipe = Path(__file__).parents[1] / f"train_{model}.py"
    options = [
        *("--model_size", PAPER_SIZES[model], "--block_size", str(published.SEQUENCE_LENGTH)),
        *("--per_device_train_batch_size", str(micro_batch), "--max_steps", str(STEPS), "--fp16"),
        *("--save_strategy", "no", "--max_eval_blocks", "1", "--disable_tqdm", "true"),
    ]
    if system.checkpointing:
        options += ["--gradient_checkpointing"]
    if not system.settings:
        options += ["--no_activation_offload"]
    for name, value in system.settings.items():
        options += [f"--activation_offload_{name}", str(value)]
    return [sys.executable, str(recipe), *options]


def _step_ms(command: Sequence[str]) -> tuple[float | None, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = step_ms_of(done.stdout)
    if done.returncode == 0 and (found is not None or os.environ.get("RANK", "0") != "0"):
        return found, ""
    lines = done.stderr.strip().splitlines()
    return None, lines[-1] if lines else f"exit status {done.returncode}"


def step_ms_of(output: str) -> float | None:
    """Return the median step that a recipe's table names; None if it has none."""
    found = STEP_LINE.search(output)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * (1.0 if found[2] == "ms" else 1e3)
