"""Plans drawn at random, of many architectures: predicted peaks against the engine's own run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest
from transformers import AutoConfig

from hf_pyao import PyAOConfig
from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.paper.pyao_plan import paths_of
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import Candidate, Planner
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.fake_peak import peak_of
from tests.helpers.simulation.replayed_step import replay_step
from tests.helpers.simulation.simulated_step import simulate_step
from tests.plan.predict.test_architectures import SHAPES, WIDTH
from tests.plan.predict.test_predict import check_lifetimes
from tests.plan.solve.test_lossy_plans import hardware_of

MICRO_BATCH, LENGTH = 2, 32
MIN_BYTES = 1024
CARD = find_hardware("rtx4070")

LAYERS_DIFFER = {"cohere2", "gemma2", "gemma3_text", "smollm3"}
"""Some layers get another mask, or rotate nothing: what one layer rebuilds stands for all, and may
be too much."""


def planner_of(training: FakeTraining) -> Planner:
    program = record_step(training, MICRO_BATCH, LENGTH)
    conditions = Conditions(link=CARD.link, window_bytes=2**20, min_bytes=MIN_BYTES)
    return Planner(program, operation_times_ms(program, CARD.device), conditions)


def random_plan(planner: Planner, random: Random) -> Candidate:
    """Draw what becomes of each slot: by its name, by itself, or recompute all of them."""
    program = planner.program
    style = random.choice(["by name", "by slot", "all"])
    weights = [random.random() for _ in range(3)]
    keep_last_layers = random.choice([0, 1])
    by_name: dict[str, str] = {}
    actions = []
    for slot in program.slots:
        action = random.choices([KEEP, OFFLOAD, RECOMPUTE], weights)[0]
        if style == "by name":
            action = by_name.setdefault(slot.name, action)
        elif style == "all":
            action = RECOMPUTE
        is_last = slot.layer >= program.num_layers - keep_last_layers
        is_decided = not is_last and slot.nbytes >= MIN_BYTES and slot.stays is None
        actions.append(action if is_decided else KEEP)
    share = random.choice([0.0, 0.5, 1.0])
    products = [path for path in sorted({*paths_of(program), ""}) if random.random() < share]
    conditions = dataclasses.replace(
        planner.conditions,
        keep_last_layers=keep_last_layers,
        window_bytes=random.choice([2**12, 2**15, 2**22]),
    )
    otherwise = [random.choice([KEEP, OFFLOAD])] * len(actions)
    return planner.candidate("drawn", actions, products, otherwise=otherwise, conditions=conditions)


def ran_bytes(training: FakeTraining, planner: Planner, drawn: Candidate, path: Path) -> int:
    plan_of(planner, drawn).to_json_file(path)
    return peak_of(training, settings_of(drawn, path), MICRO_BATCH, LENGTH).peak_bytes


def settings_of(drawn: Candidate, path: Path) -> PyAOConfig:
    return PyAOConfig(
        policy="plan",
        plan=path,
        window=drawn.window_bytes,
        min_bytes=MIN_BYTES,
        keep_last_layers=drawn.keep_last_layers,
        verify_recompute="off",  # fingerprints take some tens of KiB in the steps that are checked
        host_memory_gib=2.0**20,
    )


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.sampled(every=1000)
def test_peaks_are_the_engines_to_the_byte(architecture: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(architecture, **SHAPES[architecture])
    training = FakeTraining(config=config, training_state="device", optimizer_bytes=0)
    planner = planner_of(training)
    random = Random(architecture)
    num_rebuilt = 0
    for _ in range(6):
        drawn = random_plan(planner, random)
        ran = ran_bytes(training, planner, drawn, tmp_path / "plan.json")
        num_rebuilt += len(drawn.step.rebuilds)
        if architecture in LAYERS_DIFFER:
            assert ran <= drawn.peak_bytes <= 1.05 * ran
        else:
            assert drawn.peak_bytes == ran
    assert num_rebuilt


def test_a_mask_as_large_as_a_layers_input_is_not_taken_for_it(tmp_path: Path) -> None:
    """The first layer's input is stored though no operation of the layer saves it."""
    config = AutoConfig.for_model("gemma2", **{**SHAPES["gemma2"], "num_hidden_layers": 3})
    training = FakeTraining(config=config, training_state="device", optimizer_bytes=0)
    planner = planner_of(training)
    assert LENGTH == WIDTH
    conditions = dataclasses.replace(planner.conditions, keep_last_layers=0, window_bytes=2**12)
    for products in (["self_attn"], ["self_attn", "self_attn.k_proj", "self_attn.v_proj"]):
        drawn = planner.candidate(
            "drawn",
            [RECOMPUTE if slot.nbytes >= MIN_BYTES else KEEP for slot in planner.program.slots],
            products,
            otherwise=[KEEP] * len(planner.program.slots),
            conditions=conditions,
        )
        assert ran_bytes(training, planner, drawn, tmp_path / "plan.json") == drawn.peak_bytes


@pytest.mark.parametrize(
    ("architecture", "gib_per_s", "num_plans"),
    [
        ("opt", 0.2, 9),
        pytest.param("bloom", 0.02, 9, marks=pytest.mark.thorough),
        pytest.param("phi3", 0.1, 9, marks=pytest.mark.thorough),
        pytest.param("qwen3", 0.05, 9, marks=pytest.mark.thorough),
    ],
)
def test_times_are_the_engines(
    architecture: str, gib_per_s: float, num_plans: int, tmp_path: Path
) -> None:
    """On the virtual clock. In some of these plans compute waits for what a rebuild reads, or for
    room behind one."""
    hardware = hardware_of(gib_per_s, copy_engines=2)
    config = AutoConfig.for_model(architecture, **SHAPES[architecture])
    training = FakeTraining(config=config)
    program = record_step(training, MICRO_BATCH, LENGTH)
    conditions = Conditions(link=hardware.link, window_bytes=2**20, min_bytes=MIN_BYTES)
    planner = Planner(program, operation_times_ms(program, hardware.device), conditions)
    random = Random(f"{architecture}{gib_per_s}x")
    for _ in range(num_plans):
        drawn = random_plan(planner, random)
        plan_of(planner, drawn).to_json_file(tmp_path / "plan.json")
        settings = settings_of(drawn, tmp_path / "plan.json")
        ran = simulate_step(training, settings, hardware, MICRO_BATCH, LENGTH)
        assert drawn.step_ms == pytest.approx(ran.step_ms, rel=1e-9)


def test_attention_that_runs_again_holds_nothing_of_what_it_reads(tmp_path: Path) -> None:
    """Falcon indexes keys and values: 1 KiB a layer, made by an operation that is not replayed."""
    config = AutoConfig.for_model("falcon", **{**SHAPES["falcon"], "num_hidden_layers": 3})
    training = FakeTraining(config=config, training_state="device", optimizer_bytes=0)
    planner = planner_of(training)
    rebuilt = {"self_attention:6", "self_attention:7"}
    actions = [
        RECOMPUTE if slot.name in rebuilt else OFFLOAD if slot.nbytes >= MIN_BYTES else KEEP
        for slot in planner.program.slots
    ]
    conditions = dataclasses.replace(planner.conditions, keep_last_layers=0, window_bytes=2**12)
    drawn = planner.candidate(
        "drawn",
        actions,
        ["self_attention"],
        otherwise=[OFFLOAD] * len(actions),
        conditions=conditions,
    )
    assert len(drawn.step.rebuilds) == 6
    assert ran_bytes(training, planner, drawn, tmp_path / "plan.json") == drawn.peak_bytes


def drawn_plans(architecture: str, num: int) -> list[Candidate]:
    config = AutoConfig.for_model(architecture, **SHAPES[architecture])
    planner = planner_of(FakeTraining(config=config, training_state="device"))
    random = Random(3)
    return [random_plan(planner, random) for _ in range(num)]


def test_lifetimes_of_what_is_rebuilt_add_up() -> None:
    num_rebuilt = 0
    for drawn in drawn_plans("phi3", 8):
        num_rebuilt += len(drawn.step.rebuilds)
        check_lifetimes(drawn.step.program, drawn.outcome.late, 0.8)
    assert num_rebuilt


def test_a_replay_of_plans_that_rebuild_says_the_same() -> None:
    link = LinkModel(d2h_gib_per_s=0.05, h2d_gib_per_s=0.1, copy_engines=1)
    for drawn in drawn_plans("qwen3", 8):
        step = drawn.step
        options = {"link": link, "window_bytes": drawn.window_bytes, "rebuilds": step.rebuilds}
        predicted = predict(step.program, step.leaves, times_ms=step.times_ms, **options)
        replayed = replay_step(step.program, step.leaves, times_ms=step.times_ms, **options)
        assert predicted.step_ms == pytest.approx(replayed.step_ms, rel=1e-9)
        assert predicted.peak_bytes == replayed.peak_bytes
