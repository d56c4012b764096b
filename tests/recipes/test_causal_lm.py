"""Whole runs of the recipes, in this process."""

from __future__ import annotations

import math

import pytest
import torch

from hf_pyao.tools.estimate import model_sizes
from run_summary import COUNTED_ON_CPU
from tests.recipes.conftest import FinishedRun, Run

OFFLOAD_SMALL_TENSORS = ("--activation_offload_min_bytes", "1024")


def assert_same_training(run: FinishedRun, reference: FinishedRun) -> None:
    assert run.losses == reference.losses
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert torch.equal(run.weights[name], weight), name


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("architecture", model_sizes.MODEL_SIZES)
def test_run_learns_offloads_and_says_so(architecture: str, run_recipe: Run) -> None:
    run = run_recipe(architecture, *OFFLOAD_SMALL_TENSORS)
    assert COUNTED_ON_CPU in run.output
    before, after = (float(value) for value in run.row("loss, on held-out text").split())
    assert after < before - 0.05
    perplexities = [float(value) for value in run.row("perplexity").split()]
    assert perplexities == pytest.approx([math.exp(before), math.exp(after)], rel=1e-3, abs=0.1)

    totals = run.metrics
    assert totals["num_micro_batches"] == 6
    assert totals["offloaded_bytes"] == totals["reloaded_bytes"] > 0
    kept = sum(value for key, value in totals.items() if key.startswith("kept_bytes/"))
    assert totals["held_bytes"] == kept
    assert totals["would_hold_bytes"] == kept + totals["offloaded_bytes"]
    # The table is about one micro-batch; it has one digit behind the point.
    for label, key in [
        ("autograd would have held on the device", "would_hold_bytes"),
        ("moved to the host", "offloaded_bytes"),
        ("last layer", "kept_bytes/last layer"),
    ]:
        shown = float(run.row(label).removesuffix(" MiB"))
        assert shown == pytest.approx(totals[key] / 6 / 2**20, abs=0.05)


@pytest.mark.thorough
def test_a_micro_batch_is_chosen_within_a_cap(
    run_recipe: Run, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--activation_offload_auto_micro_batch", "--activation_offload_device_memory_gib")
    with caplog.at_level("INFO", logger="hf_pyao"):
        run = run_recipe("opt", *options, "0.0023", *("--gradient_accumulation_steps", "2"))
    said = (
        "hf_pyao trains with micro-batch 2 accumulated 4 times instead of micro-batch 4 accumulated"
    )
    assert said in caplog.text
    assert "Fastest: micro-batch 2 accumulated 4 times" in caplog.text
    assert "would take" in caplog.text
    assert run.row("micro-batch").startswith("2 x 32 tokens")
    assert len(run.losses) == 6


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", model_sizes.MODEL_SIZES)
def test_offloading_changes_no_loss_and_no_weight(architecture: str, run_recipe: Run) -> None:
    reference = run_recipe(architecture, "--no_activation_offload", folder="plain")
    assert "activations were not offloaded" in reference.output
    assert "offloaded_bytes" not in reference.metrics
    assert_same_training(run_recipe(architecture, *OFFLOAD_SMALL_TENSORS), reference)


# transformers 4.57 says so when two checkpoints are less than a second apart.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")
def test_resumed_run_equals_an_uninterrupted_one(run_recipe: Run) -> None:
    options = ("--save_steps", "2", "--save_total_limit", "5", *OFFLOAD_SMALL_TENSORS)
    whole = run_recipe("opt", *options, folder="whole")
    checkpoint = str(whole.folder / "checkpoint-4")
    resumed = run_recipe("opt", *options, "--resume_from_checkpoint", checkpoint, folder="resumed")
    assert "median of 2" in resumed.output
    assert_same_training(resumed, whole)
    # 'before' is the checkpoint's loss: better than a new model's.
    assert float(resumed.row("loss, on held-out text").split()[0]) < float(
        whole.row("loss, on held-out text").split()[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model_size", "tinny"], "unknown --model_size for opt 'tinny'; did you mean 'tiny'?"),
        (["--model_name_or_path", "gpt2"], "Give one of them."),
        (["--train_file", "missing.txt"], "cannot read --train_file 'missing.txt'"),
        (["--train_file", "a", "--dataset_name", "b"], "--dataset_name and --train_file"),
        (["--max_text_mib", "0"], "--max_text_mib is 0"),
        (["--block_size", "4096"], "--block_size is 4096, and the model has 2048 positions"),
        (["--tokenizer_name", "/nowhere"], "cannot load a tokenizer from '/nowhere'"),
        (["--resume_from_checkpoint", "last"], "there is no checkpoint in --output_dir"),
        (["--resume_from_checkpoint", "/nowhere"], "'/nowhere' is no checkpoint of a Trainer"),
        (
            ["--activation_ofload_codec", "int8"],
            "unknown option '--activation_ofload_codec'; did you mean '--activation_offload_codec'?",
        ),
        pytest.param(
            ["--use_cpu", "false", "--bf16"],
            "Give --use_cpu to compute in bfloat16 on a CPU (slow), or drop --bf16.",
            marks=pytest.mark.skipif(
                torch.accelerator.is_available(),
                reason="an accelerator computes in bfloat16, so that nothing is refused",
            ),
        ),
        (["--load_best_model_at_end"], "requires the save and eval strategy to match"),
    ],
)
def test_impossible_settings_end_with_one_line(
    options: list[str],
    message: str,
    run_recipe: Run,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as exit_info:
        run_recipe("opt", *options)
    assert exit_info.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if "error:" in line]
    assert line.startswith("train_opt.py: error: ")
    assert message in line
    assert "Traceback" not in captured.err
