"""A script in the shape of transformers' run_clm.py trains with two class names swapped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("run_clm_shape.py")
TEXT = "\n".join(f"the {i} tensors leave the device and return in time" for i in range(60))
OVERRIDES = (
    "hidden_size=32,word_embed_proj_dim=32,ffn_dim=64,num_attention_heads=2,num_hidden_layers=3,"
    "max_position_embeddings=32"
)


def with_our_names(script: str) -> str:
    """Swap the two names, and where they come from."""
    imported = "    Trainer,\n    TrainingArguments,\n"
    assert script.count(imported) == 1
    script = script.replace(imported, "")
    script = re.sub(r"\b(Trainer|TrainingArguments)\b", r"PyAO\1", script)
    ours = "from hf_pyao import PyAOTrainer, PyAOTrainingArguments\n"
    return script.replace("from transformers import", f"{ours}from transformers import", 1)


def start(script: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    text = folder / "text.txt"
    command = [
        *(sys.executable, str(script), "--do_train", "--do_eval", *flags),
        *("--train_file", str(text), "--validation_file", str(text)),
        *("--config_overrides", OVERRIDES, "--cache_dir", str(folder / f"{script.stem}-cache")),
        *("--output_dir", str(folder / script.stem), "--use_cpu", "--report_to", "none"),
        *("--max_steps", "3", "--logging_steps", "1", "--per_device_train_batch_size", "2"),
        *("--learning_rate", "1e-2", "--disable_tqdm", "true", "--save_strategy", "no"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def logs_of(folder: Path) -> list[dict[str, Any]]:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry for entry in state["log_history"] if "loss" in entry]


@pytest.mark.thorough
def test_the_script_trains_the_same_with_the_names_swapped(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    swapped = tmp_path / "swapped.py"
    swapped.write_text(with_our_names(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")

    processes = [
        start(SCRIPT, tmp_path),
        start(
            swapped,
            tmp_path,
            *("--activation_offload", "--activation_offload_policy", "all"),
            *("--activation_offload_min_bytes", "0", "--activation_offload_log_metrics", "all"),
        ),
    ]
    for process in processes:
        finish(process)

    plain, offloaded = logs_of(tmp_path / SCRIPT.stem), logs_of(tmp_path / swapped.stem)
    assert [log["loss"] for log in offloaded] == [log["loss"] for log in plain]
    assert [log["grad_norm"] for log in offloaded] == [log["grad_norm"] for log in plain]
    assert len(plain) == 3
    assert min(log["pyao/offloaded_bytes"] for log in offloaded) > 0
    assert not any(key.startswith("pyao/") for log in plain for key in log)
    weights = load_file(tmp_path / SCRIPT.stem / "model.safetensors")
    for name, weight in load_file(tmp_path / swapped.stem / "model.safetensors").items():
        assert weight.equal(weights[name]), name
