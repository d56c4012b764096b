"""Estimates with streamed weights: of a model whose weights do not fit the card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_pyao.cli import main
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.step.streamed_step import block_bytes
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.jobs import all_jobs
from hf_pyao.tools.estimate.ways import STREAMED, WAYS
from tests.helpers.lora_steps import lora_config, lora_step

LARGE = "llama:hidden_size=1024,intermediate_size=2816,num_hidden_layers=12,vocab_size=4096,num_attention_heads=16"
"""294 MB of weights in layers."""


@pytest.mark.thorough
def test_weights_that_do_not_fit_are_streamed() -> None:
    card = dataclasses.replace(find_hardware("rtx4070"), memory_gib=0.95)
    estimator = Estimator(
        lora_config(12), card, training_state="device", sequence_length=128, lora_rank=4
    )
    resident = estimator.row(WAYS[0], micro_batch=1, with_longest=False)
    streamed = estimator.row(STREAMED, micro_batch=1, with_longest=False)
    assert not resident.fits
    assert streamed.fits
    assert streamed.largest_micro_batch > resident.largest_micro_batch
    assert streamed.num_streamed_blocks + (streamed.num_resident_blocks or 0) == 12
    block = block_bytes(lora_step(num_layers=12, micro_batch=1, length=128))[0]
    assert streamed.weights_host_bytes == streamed.num_streamed_blocks * block
    assert streamed.uploaded_bytes == 2 * (streamed.num_streamed_blocks - 2) * block
    # Two bytes a parameter at the card's arithmetic and link.
    flop_per_s = card.device.tflop_per_s * 1e12
    assert streamed.tokens_to_hide == pytest.approx(
        flop_per_s / card.link.h2d_gib_per_s / 2**30, rel=1e-6
    )
    assert streamed.tokens_to_hide_by_clock is not None
    assert resident.num_resident_blocks is None


def test_rows_stream_only_where_weights_are_frozen() -> None:
    def ways(options: dict[str, object]) -> set[str]:
        jobs = all_jobs(
            config=None, hardware=None, options=options, micro_batch=None, with_longest=False
        )
        return {way.name for job in jobs for way in job.ways}

    assert STREAMED.name in ways({"lora_rank": 8})
    assert STREAMED.name not in ways({"lora_rank": None})


@pytest.mark.thorough
def test_a_plan_with_streamed_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    command = ["plan", LARGE, "--lora", "--device-memory", "250MiB", "--sequence-length", "128"]
    assert main([*command]) == 2
    assert "stream_weights='auto' (0.2" in capsys.readouterr().err
    assert main([*command, "--stream-weights", "auto", "--save", str(path)]) == 0
    said = capsys.readouterr().out
    assert "layers are streamed through a ring of 0.05 GB" in said
    plan = Plan.from_dict(json.loads(path.read_text()))
    figures = plan.figures
    assert plan.facts.resident_blocks == figures["weights/resident_blocks"]
    assert figures["weights/streamed_blocks"] + figures["weights/resident_blocks"] == 12
    stay = int(figures["weights/resident_blocks"])
    assert main([*command, "--stream-weights", str(stay)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stream-weights", "auto"), "give --lora"),
        (("--lora", "--stream-weights", "some"), "expected off, auto, or how many"),
    ],
)
def test_bad_options_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama:1.2b", *options]) == 2
    assert message in capsys.readouterr().err
