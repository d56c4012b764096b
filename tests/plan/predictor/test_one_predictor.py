"""Commands and a run's first plan give the same figures for the same question."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_pyao import PyAOConfig, cli
from hf_pyao.auto.plans.draft import choice_of
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import HARDWARE
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predictor.predictor import SizedPlan
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.advise.advice import Adviser
from hf_pyao.tools.advise.script_watch import SeenTraining
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import AUTO, WAYS

MODELS = (
    "gpt2:n_layer={layers},n_embd={width},n_head=4,vocab_size=640,n_positions=256",
    "opt:num_hidden_layers={layers},hidden_size={width},ffn_dim=384,num_attention_heads=4,"
    "vocab_size=640,word_embed_proj_dim={width},max_position_embeddings=256",
    "llama:num_hidden_layers={layers},hidden_size={width},intermediate_size=320,"
    "num_attention_heads=4,num_key_value_heads=2,vocab_size=640,max_position_embeddings=256",
)


def refused(levers: Levers) -> StepProgram:
    raise LeversRefusedError(f"nothing is recorded here with {levers}")


def asked(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    cli.main(argv)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(every=20)
def test_one_question_has_one_answer(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    shape = {"layers": draw.randint(3, 5), "width": 32 * draw.randint(2, 5)}
    name = draw.choice(MODELS).format(**shape)
    micro_batch, length = draw.randint(1, 6), 64 * draw.randint(1, 3)
    card_name = draw.choice(["rtx4070", "h200"])
    hardware = HARDWARE[card_name]
    size = ["--micro-batch", str(micro_batch), "--sequence-length", str(length)]
    card = ["--device", card_name, "--optimizer", "sgd"]
    config = config_of(parse_model(name))

    # pyao estimate
    more = {"training_state": "device", "optimizer_bytes": 0}
    estimator = Estimator(config, hardware, sequence_length=length, **more)
    ways = {way.name: way for way in WAYS}
    kept, _ = estimator.predicted(ways["none"], micro_batch)
    everything, _ = estimator.predicted(ways["policy all"], micro_batch)
    limit = int(everything.memory.needed_bytes + draw.random() * 2**20)
    estimator.limit_bytes = limit
    best, _ = estimator.predicted(AUTO, micro_batch)

    # pyao advise, for a live model
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    ids = torch.zeros(micro_batch, length, dtype=torch.int64)
    seen = SeenTraining(
        model=model, seen=seen_forward((), {"input_ids": ids, "labels": ids}), was_ended=True
    )
    adviser = Adviser(seen, hardware, is_elsewhere=True)
    answers = {
        policy: adviser._plan(PyAOConfig(policy=policy), limit) for policy in ("off", "all", "auto")
    }
    for outcome, answer in zip((kept, everything, best), answers.values(), strict=True):
        assert isinstance(answer, SizedPlan)
        # A live model's step makes its loss once more: two operations that hold next to nothing.
        assert answer.step_ms == pytest.approx(outcome.step_ms, abs=0.01)
        assert answer.peak_bytes == pytest.approx(outcome.peak_bytes, abs=2**14)

    # pyao plan
    memory = ["--device-memory", f"{limit}B"]
    plan = asked(["plan", name, *size, *card, *memory, "--no-cache", "--json"], capsys)
    figures = {KEEP_ALL: kept, OFFLOAD_ALL: everything}
    assert plan["facts"]["kept_step_ms"] == pytest.approx(kept.step_ms, rel=1e-12)
    assert plan["facts"]["kept_peak_bytes"] == kept.peak_bytes
    offloaded = plan["figures"][f"step_ms/{OFFLOAD_ALL}"]
    assert offloaded == pytest.approx(everything.step_ms, rel=1e-12)
    assert plan["figures"][f"peak_bytes/{OFFLOAD_ALL}"] == everything.peak_bytes

    # a run's first plan, from a profile
    path = tmp_path / "profile.json"
    cli.main(["profile", "--model", name, *size, *card, "-o", str(path)])
    profile = Profile.from_json_file(path)
    binds = PlanRequest.of_config(PyAOConfig(), allocator=AllocatorSettings())
    simple = choice_of(dataclasses.replace(binds), profile, refused).resident.configured.simple()
    for way, outcome in figures.items():
        assert simple[way].step_ms == pytest.approx(outcome.step_ms, rel=1e-12)
        assert simple[way].peak_bytes == outcome.peak_bytes
        assert simple[way].memory.fits(limit) == outcome.memory.fits(limit)
