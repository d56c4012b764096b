"""The predictor against the simulator, which runs the real engine.

They share the table of costs and the schedule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, IN_STEP, HostModel
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.policies.budget import hidden_bytes
from hf_pyao.plan.predict.peak_cause import peak_cause
from hf_pyao.plan.predict.predict import (
    operation_times_ms,
    predict,
)
from hf_pyao.plan.step.prediction import FREED, MemoryKey, Prediction
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from hf_pyao.tools.estimate.ways import WAYS, Way
from tests.helpers.simulation.replayed_step import replay_step
from tests.helpers.simulation.simulated_step import simulate_step

LENGTH = 64
SLOW = Hardware(
    name="slow",
    device=DeviceModel(tflop_per_s=0.05, memory_gib_per_s=2.0, launch_us=1.0),
    link=LinkModel(d2h_gib_per_s=1.0, h2d_gib_per_s=1.5, copy_engines=1),
    memory_gib=1,
    source="made up, so that copies of tiny models take as long as their compute",
)
HOSTS = (
    FAR_AHEAD,
    IN_STEP,
    HostModel(queue_limit=5),
    HostModel(op_ms=0.002, queue_limit=40),
    HostModel(op_ms=0.02),
)
FAST = Hardware(
    name="fast",
    device=DeviceModel(tflop_per_s=5.0, memory_gib_per_s=200.0, launch_us=1.0),
    link=LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3),
    memory_gib=1,
    source="made up, so that nearly no copy is hidden",
)


@dataclass(frozen=True)
class Case:
    """What is predicted."""

    architecture: str
    size: str = "tiny"
    window: int | str = 2**20
    keep_last_layers: int = 1
    checkpointing: bool = False
    head_loss: str = "off"
    training_state: str = "host"
    recompute_modules: tuple[str, ...] = ()
    checkpoint_every: int = 0
    checkpoint_nested: bool = False
    save_attention: bool = False
    policy: str = "all"
    micro_batch: int = 2
    length: int = LENGTH

    @property
    def training(self) -> FakeTraining:
        return FakeTraining(
            config=build_config(self.architecture, find_size(self.architecture, self.size)),
            checkpointing=self.checkpointing,
            training_state=self.training_state,
        )

    @property
    def settings(self) -> PyAOConfig:
        return PyAOConfig(
            policy=self.policy,
            window=self.window,
            keep_last_layers=self.keep_last_layers,
            head_loss=self.head_loss,
            recompute_modules=self.recompute_modules,
            checkpoint_every=self.checkpoint_every,
            checkpoint_nested=self.checkpoint_nested,
            save_attention=self.save_attention,
            min_bytes=4096,
            host_memory_gib=2.0**20,
            verify_recompute="off",  # fingerprints are no part of a plan
        )

    @property
    def program(self) -> StepProgram:
        keep_last_layers = self.keep_last_layers if self.recompute_modules else 0
        return _program(replace(self, window=0, policy="all", keep_last_layers=keep_last_layers))

    def first_kept(self, program: StepProgram) -> int:
        """Return the first layer whose tensors are kept."""
        first = program.num_layers - self.keep_last_layers
        if not self.keep_last_layers:
            return first
        return first - first % (self.checkpoint_every or 1)

    def predicted(self, hardware: Hardware | None, host: HostModel = FAR_AHEAD) -> Prediction:
        program = self.program
        first_kept = self.first_kept(program)
        leaves = [
            self.policy == "all" and slot.nbytes >= 4096 and slot.layer < first_kept
            for slot in program.slots
        ]
        window = None if self.window == "layer" else self.window
        assert window is None or isinstance(window, int)
        return predict(
            program,
            leaves,
            window_bytes=window,
            device=hardware and hardware.device,
            link=hardware and hardware.link,
            host=host,
        )


@functools.cache
def _program(case: Case) -> StepProgram:
    return record_step(
        case.training,
        case.micro_batch,
        case.length,
        levers=Levers.of(case.settings),
        recompute_modules=case.recompute_modules,
        keep_last_layers=case.keep_last_layers,
    )


CASES = [
    Case("opt"),
    Case("gpt2", window="layer"),
    Case("llama", window=0),
    Case("llama", policy="off"),
    Case("gpt2", keep_last_layers=0, head_loss="chunked"),
    Case("opt", keep_last_layers=3, training_state="device"),
    Case("llama", checkpointing=True),
    Case("opt", checkpointing=True, window="layer", head_loss="chunked"),
    Case("gpt2", recompute_modules=("mlp.c_proj",)),
    Case("llama", recompute_modules=("mlp.act_fn", "mlp"), window="layer"),
    Case("llama", checkpoint_every=1),
    Case("opt", checkpoint_every=1, window="layer", head_loss="chunked"),
    Case("llama", checkpoint_every=2, keep_last_layers=0),
    Case("opt", "125m", checkpoint_every=3, window="layer"),
    Case("llama", checkpoint_every=1, save_attention=True),
    Case("opt", checkpoint_every=2, save_attention=True, window="layer"),
    Case("llama", checkpoint_every=3, checkpoint_nested=True, keep_last_layers=0),
    Case("opt", checkpoint_every=2, checkpoint_nested=True, save_attention=True, window="layer"),
    Case("opt", "125m", window=2**24, micro_batch=4, length=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("hardware", [SLOW, FAST], ids=lambda hardware: hardware.name)
@pytest.mark.sampled(every=1000)
def test_time_and_peak_are_the_simulators(case: Case, hardware: Hardware) -> None:
    simulated = simulate_step(case.training, case.settings, hardware, case.micro_batch, case.length)
    predicted = case.predicted(hardware)
    assert predicted.offloaded_bytes == simulated.offloaded_bytes
    assert predicted.peak_bytes == simulated.peak_bytes
    assert predicted.step_ms == pytest.approx(simulated.step_ms, rel=1e-6)
    stall_ms = predicted.stall_forward_ms + predicted.stall_backward_ms
    assert stall_ms == pytest.approx(simulated.stall_ms, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("hardware", [SLOW, FAST], ids=lambda hardware: hardware.name)
def test_a_replay_without_tensors_says_the_same(case: Case, hardware: Hardware) -> None:
    program = case.program
    first_kept = case.first_kept(program)
    leaves = [
        case.policy == "all" and slot.nbytes >= 4096 and slot.layer < first_kept
        for slot in program.slots
    ]
    times_ms = operation_times_ms(program, hardware.device)
    replayed = replay_step(
        program,
        leaves,
        times_ms=times_ms,
        link=hardware.link,
        window_bytes=None if isinstance(case.window, str) else case.window,
    )
    predicted = case.predicted(hardware)
    assert predicted.offloaded_bytes == replayed.offloaded_bytes
    assert predicted.peak_bytes == replayed.peak_bytes
    assert predicted.step_ms == pytest.approx(replayed.step_ms, rel=1e-9)


@pytest.mark.thorough
def test_these_cases_wait_for_copies() -> None:
    """Else what is predicted of links would not be tried."""
    assert CASES[0].predicted(FAST).stall_backward_ms > 0
    assert CASES[2].predicted(SLOW).stall_forward_ms > 0
    assert CASES[0].predicted(FAST).read_in_place_bytes > 0


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", PAPER_SIZES)
@pytest.mark.parametrize("name", ["rtx4070", "h200"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name.replace(" ", "-"))
def test_each_policy_of_the_papers_models(
    architecture: str, name: str, way: Way, tmp_path: Path
) -> None:
    hardware = find_hardware(name)
    config = build_config(architecture, find_size(architecture, PAPER_SIZES[architecture]))
    estimator = Estimator(config, hardware)
    budget_bytes = None
    is_pyao = way.policy == "pyao"
    plan = estimator.rule_plan() if is_pyao else None
    if plan is not None:
        assert plan.slots, "the paper's rule flags something in each of its models"
        plan.to_json_file(tmp_path / "plan.json")
    program = record_step(
        FakeTraining(config=config, checkpointing=way.checkpointing),
        4,
        512,
        plan=plan,
        keep_last_layers=1 if is_pyao else 0,
    )
    if way.policy == "budget":
        times_ms = operation_times_ms(program, hardware.device)
        budget_bytes = hidden_bytes(program, times_ms, hardware.link)
    settings = PyAOConfig(
        policy="plan" if is_pyao else way.policy,
        plan=tmp_path / "plan.json" if is_pyao else None,
        budget=None if budget_bytes is None else f"{budget_bytes}B",
        host_memory_gib=2.0**20,
        verify_recompute="off",
    )
    training = FakeTraining(config=config, checkpointing=way.checkpointing)
    simulated = simulate_step(training, settings, hardware, 4, 512)
    predicted = predict(
        program,
        estimator.leaves(way, program),
        window_bytes=estimator.window_bytes,
        device=hardware.device,
        link=hardware.link,
    )
    assert predicted.offloaded_bytes == simulated.offloaded_bytes
    assert predicted.step_ms == pytest.approx(simulated.step_ms, rel=1e-6)
    assert predicted.peak_bytes == simulated.peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES[:7], ids=str)
def test_without_the_named_tensor_the_peak_is_the_next_one(case: Case) -> None:
    program, predicted = case.program, case.predicted(None)
    cause = peak_cause(program, predicted)
    # Told from lifetimes alone, by taking each buffer out.
    least = None
    for buffer, start, end in predicted.lifetimes:
        without = [
            live - program.buffers[buffer].nbytes * (start <= at < end)
            for at, live in enumerate(predicted.live_bytes)
        ]
        least = min(max(without), predicted.peak_bytes if least is None else least)
    assert cause.next_peak_bytes == least
    assert cause.nbytes >= predicted.peak_bytes - cause.next_peak_bytes > 0
    assert cause.tensor


def check_lifetimes(program: StepProgram, predicted: Prediction, least_share: float) -> None:
    """Check that what each buffer takes, from start to end, adds up to what is alive."""
    live = [program.resident_bytes] * program.num_operations
    for buffer, start, end in predicted.lifetimes:
        for number in range(start, min(end, program.num_operations)):
            live[number] += program.buffers[buffer].nbytes
    # What came and went between two operations is in the one that follows.
    assert all(ours <= theirs for ours, theirs in zip(live, predicted.live_bytes, strict=True))
    same = sum(ours == theirs for ours, theirs in zip(live, predicted.live_bytes, strict=True))
    assert same > least_share * len(live)
    assert predicted.peak_at == predicted.live_bytes.index(max(predicted.live_bytes))
    # What is allocated and freed, one after the other, comes to the same peak.
    there: dict[MemoryKey, int] = {}
    now_bytes = most_bytes = program.resident_bytes
    for key, nbytes in predicted.memory:
        if nbytes == FREED:
            now_bytes -= there.pop(key)
        else:
            there[key] = nbytes
            now_bytes += nbytes
        most_bytes = max(most_bytes, now_bytes)
    assert most_bytes == max(predicted.live_bytes) == predicted.peak_bytes


def test_lifetimes_add_up_to_what_is_alive() -> None:
    case = CASES[0]
    check_lifetimes(case.program, case.predicted(FAST), 0.9)


def test_a_wrong_number_of_decisions_is_refused() -> None:
    program = CASES[0].program
    with pytest.raises(
        ValueError, match=f"leaves has 1 entries; the program has {len(program.slots)}"
    ):
        predict(program, [True], window_bytes=None)


@pytest.mark.parametrize(
    "num_points", [12, pytest.param(400, marks=pytest.mark.thorough)], ids=["few", "hundreds"]
)
def test_any_plan_on_any_link_is_what_a_replay_says(num_points: int) -> None:
    random = Random(0)
    for number in range(num_points):
        case = random.choice(CASES[:7])
        program = case.program
        share = random.random()
        leaves = [random.random() < share for _ in program.slots]
        window_bytes = random.choice([None, 0, 4096, 2**15, 2**18, 2**24])
        speeds = [random.choice([0.05, 0.3, 1.0, 7.0]) for _ in range(2)]
        link = LinkModel(
            d2h_gib_per_s=speeds[0], h2d_gib_per_s=speeds[1], copy_engines=random.choice([1, 2])
        )
        device = random.choice([SLOW, FAST]).device
        times_ms = operation_times_ms(program, device)
        host = random.choice(HOSTS)
        options = {"times_ms": times_ms, "link": link, "window_bytes": window_bytes, "host": host}
        predicted = predict(program, leaves, **options)
        replayed = replay_step(program, leaves, **options)
        where = (number, case.architecture, window_bytes, link, host)
        assert predicted.offloaded_bytes == replayed.offloaded_bytes, where
        assert predicted.step_ms == pytest.approx(replayed.step_ms, rel=1e-9), where
        assert predicted.peak_bytes == replayed.peak_bytes, where
        late = predict(program, leaves, window_bytes=window_bytes)
        assert late.peak_bytes >= predicted.peak_bytes, where


@pytest.mark.thorough
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[6], CASES[14]], ids=str)
@pytest.mark.parametrize("hardware", [SLOW, FAST], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("host", HOSTS[1:], ids=str)
def test_the_simulators_with_hosts_that_are_less_far_ahead(
    case: Case, hardware: Hardware, host: HostModel
) -> None:
    simulated = simulate_step(
        case.training, case.settings, hardware, case.micro_batch, case.length, host
    )
    predicted = case.predicted(hardware, host)
    assert predicted.peak_bytes == simulated.peak_bytes
    assert predicted.step_ms == pytest.approx(simulated.step_ms, rel=1e-6)


def test_a_host_in_step_lets_go_earlier_and_reads_less_in_place() -> None:
    """The last copies of forward are done before backward asks, and only it knows."""
    ahead, in_step = (CASES[0].predicted(SLOW, host) for host in (FAR_AHEAD, IN_STEP))
    assert in_step.peak_bytes <= ahead.peak_bytes
    assert in_step.read_in_place_bytes < ahead.read_in_place_bytes


def test_a_slow_host_sets_the_time() -> None:
    case = CASES[3]
    slow = case.predicted(FAST, HostModel(op_ms=10.0))
    num_kernels = sum(operation.is_kernel for operation in case.program.operations)
    last_ms = operation_times_ms(case.program, FAST.device)[-1]
    assert slow.step_ms == pytest.approx(10.0 * num_kernels + last_ms, rel=1e-3)
    limited = HostModel(op_ms=0.5, queue_limit=3)
    assert case.predicted(SLOW, limited).step_ms >= case.predicted(SLOW).step_ms
