"""Budgets that are predicted take what real ones take."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.bench import OK, OUT_OF_MEMORY
from hf_pyao.plan.hardware.presets import HARDWARE
from hf_pyao.plan.paper.sweep import parse_budgets
from hf_pyao.plan.policies.budget import OffloadBudget, leaving
from hf_pyao.plan.predict.predict import predict
from hf_pyao.tools.bench import peers
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.predicted_sweep import predict_points, predict_sweep
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers import ARCHITECTURES

BATCH, LENGTH = 2, 16
KIB = 2**10
MIB = 2**20


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.sampled(every=1000)
def test_the_same_bytes_leave(architecture: str, checkpointing: bool, dtype: str) -> None:
    given = ",".join(f"{key}={value}" for key, value in ARCHITECTURES[architecture].items())
    config = config_of(parse_model(f"{architecture}:{given}"))
    config.use_cache = False
    training = FakeTraining(
        config=config,
        checkpointing=checkpointing,
        training_state="device",
        operations_of="cpu",
        dtype=dtype,
    )
    program = record_step(training, BATCH, LENGTH)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    ids = torch.randint(1, config.vocab_size, (BATCH, LENGTH))
    found = []
    with ExitStack() as stack:
        if checkpointing:
            stack.enter_context(peers.checkpointing(model))
        for budget in (0, 1, 2, 5, 1000, "3KiB", "20KiB"):
            for keep_last_layers in (0, 1):
                settings = PyAOConfig(
                    policy="budget", budget=budget, min_bytes=64, keep_last_layers=keep_last_layers
                )
                with attach(model, settings) as offloader:
                    model(input_ids=ids, labels=ids).loss.backward()
                    counted = offloader.metrics()["offloaded_bytes"]
                is_count = isinstance(budget, int)
                policy = OffloadBudget(
                    64,
                    max_tensors=budget if is_count else None,  # type: ignore[arg-type]
                    max_bytes=None if is_count else int(str(budget).removesuffix("KiB")) * KIB,
                )
                leaves = leaving(program, policy, keep_last_layers)
                assert predict(program, leaves, window_bytes=None).offloaded_bytes == counted
                found.append(counted)
    assert found[:2] == [0, 0]
    assert max(found) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 2])
def test_the_same_inputs_of_segments_leave(every: int) -> None:
    """The segment that holds the last layer is kept, by the engine and as predicted."""
    given = {**ARCHITECTURES["llama"], "num_hidden_layers": 4}
    config = config_of(parse_model("llama:" + ",".join(f"{k}={v}" for k, v in given.items())))
    config.use_cache = False
    levers = Levers(checkpoint_every=every)
    training = FakeTraining(config=config, operations_of="cpu")
    program = record_step(training, BATCH, LENGTH, levers=levers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.randint(1, config.vocab_size, (BATCH, LENGTH))
    found = []
    for budget in (0, 1, 9):
        settings = PyAOConfig(policy="budget", budget=budget, min_bytes=64, checkpoint_every=every)
        with attach(model, settings) as offloader:
            model(input_ids=ids, labels=ids).loss.backward()
            found.append(offloader.metrics()["offloaded_bytes"])
        points = predict_points(
            program,
            parse_budgets(str(budget)),
            HARDWARE["rtx4070"],
            tokens=BATCH * LENGTH,
            settings=settings,
        )
        assert [point.offloaded_bytes for point in points if point.budget == budget] == found[-1:]
    nbytes = program.slots[0].nbytes
    assert found == [0, nbytes, {1: 3, 2: 1}[every] * nbytes]


@pytest.mark.thorough
def test_what_does_not_fit_is_a_row_with_its_figures() -> None:
    config = config_of(parse_model("llama:" + _of("llama")))
    program = record_step(FakeTraining(config=config), BATCH, LENGTH)
    card, settings = HARDWARE["rtx4070"], PyAOConfig(policy="all")
    points = predict_points(
        program, parse_budgets("0,3"), card, tokens=BATCH * LENGTH, settings=settings
    )
    assert {point.status for point in points} == {OK}
    small = type(card)(
        name="small", device=card.device, link=card.link, memory_gib=1e-6, source="made up"
    )
    points = predict_points(
        program, parse_budgets("0,3"), small, tokens=BATCH * LENGTH, settings=settings
    )
    assert {point.status for point in points} == {OUT_OF_MEMORY}
    assert all("of small can be used" in point.reason for point in points)
    assert all(point.memory_bytes and point.tokens_per_s for point in points)


@pytest.mark.thorough
@pytest.mark.parametrize("window", ["layer", "64MiB", None])
def test_neurocache_s_memory_falls_by_its_18_mib_a_tensor(window: str | None) -> None:
    """Its section 4.1 and Table 2: 97.93 M parameters, checkpointing, 16-bit moments of Adam.

    What may be in flight in the window counts: no host is sure to see that it has left.
    """
    report = predict_sweep(
        parse_model(
            "gpt2:vocab_size=16000,n_positions=768,n_embd=768,n_layer=12,n_head=12,resid_pdrop=0.0,"
            "embd_pdrop=0.0,attn_pdrop=0.0,bos_token_id=0,eos_token_id=0"
        ),
        HARDWARE["rtx2050"],
        parse_budgets("0,1,2,3,4,5,6,8,10"),
        micro_batch=8,
        sequence_length=768,
        dtype="float32",
        checkpointing=True,
        settings=PyAOConfig(window=window),
    )
    in_flight = {"layer": 0, "64MiB": 64 // 18, None: 256 // 18}[window]
    peaks = {row.budget: row.memory_bytes.mean / MIB for row in report.rows if row.memory_bytes}
    saved = {k: 18 * max(0, k - in_flight) for k in peaks}
    assert {k: peaks[0] - peaks[k] for k in peaks} == pytest.approx(saved, abs=0.01)
    assert peaks[0] == pytest.approx(2545.6, rel=0.02)
    assert report.knee is None


def _of(architecture: str) -> str:
    return ",".join(f"{key}={value}" for key, value in ARCHITECTURES[architecture].items())
