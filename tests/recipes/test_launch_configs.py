"""The launch files of `recipes/configs`, read by those that read them: accelerate and DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from recipe_arguments import parse_arguments
from tests.helpers.ranks import needs_deepspeed
from tests.recipes.conftest import RECIPES, REPOSITORY

CONFIGS = RECIPES / "configs"
LAUNCH_FILES = sorted(CONFIGS.glob("*.yaml"))
DEEPSPEED_FILES = sorted(CONFIGS.glob("*.json"))


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_accelerate_reads_the_file_and_launches_what_it_is_for(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert set(yaml.safe_load(path.read_text())) <= {*config.to_dict(), "deepspeed_config"}
    parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = _validate_launch_command(parsed)
    num_nodes = 1 if path.name == "one_gpu.yaml" else 5
    assert (args.num_machines, args.num_processes) == (num_nodes, num_nodes)
    assert bool(args.use_deepspeed) == ("zero2" in path.name)
    assert bool(args.multi_gpu) == ("ddp" in path.name)
    assert not args.use_cpu
    if args.use_deepspeed:
        assert args.deepspeed_multinode_launcher == "standard"  # any other wants pdsh
        assert (REPOSITORY / args.deepspeed_config_file).is_file()
        assert Path(args.deepspeed_config_file).stem in path.stem  # fp16 is in both, or in neither


def filled(path: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the file's settings as a Trainer fills in what is "auto" there."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = [
        *("--output_dir", str(tmp_path), "--use_cpu", "--per_device_train_batch_size", "4"),
        *("--gradient_accumulation_steps", "2", *options),
    ]
    _, _, args = parse_arguments("opt", arguments)
    args.bf16, args.fp16 = "bf16" in path.name, "fp16" in path.name  # which a CPU may refuse
    config = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    config.trainer_config_process(args)
    assert not config.mismatches
    values: dict[str, Any] = config.config
    return values


@needs_deepspeed
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's own
@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.name)
def test_deepspeed_reads_the_file_as_it_is_meant(path: Path, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    values = filled(path, tmp_path)
    assert values["optimizer"]["params"]["lr"] == 1e-3  # of the model's size
    read = DeepSpeedConfig(values)
    assert (read.zero_config.stage, read.zero_config.offload_optimizer.device) == (2, "cpu")
    assert read.zero_config.overlap_comm is True
    assert read.train_micro_batch_size_per_gpu == 4
    assert read.gradient_accumulation_steps == 2
    assert read.float16_config.enabled == ("fp16" in path.name)
    assert read.bfloat16_config.enabled == ("bf16" in path.name)
    if "fp16" in path.name:
        assert read.float16_config.initial_scale_power == 12
