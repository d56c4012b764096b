"""Plans for mixtures have the blocks, slots and uploads of a real run on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.weights import expert_groups
from hf_pyao.plan.hardware.operation_costs import cost_of
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predict.predicted_uploads import uploads_of
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import block_bytes, streamed_layers, with_streamed_blocks
from hf_pyao.plan.weights.first_residents import first_residents
from hf_pyao.plan.weights.weight_plan import weight_plan_of
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers import enable_checkpointing, tiny_batch
from tests.helpers.adapters import with_adapters
from tests.helpers.simulation.replayed_step import replay_step

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated"  # read by peft
)

NUM_LAYERS = 5
NUM_EXPERTS = 7
TARGETS = "q_proj,o_proj"

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_experts_per_tok": 3,
    "vocab_size": 128,
    "pad_token_id": 0,
    "use_cache": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS},
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "head_dim": 16, "moe_intermediate_size": 96},
    "qwen2_moe": {
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 64,
    },
}


def config_of(model_type: str) -> Any:
    return AutoConfig.for_model(model_type, **_COMMON, **MIXTURES[model_type])


@functools.cache
def recorded(
    model_type: str, *, checkpointing: bool = False, targets: str = TARGETS
) -> StepProgram:
    training = FakeTraining(
        config=config_of(model_type),
        lora_rank=2,
        lora_targets=targets,
        training_state="device",
        checkpointing=checkpointing,
    )
    try:
        return record_step(training, 8, 32)
    except DynamicOutputShapeException:
        pytest.skip(f"this release's {model_type} reads values in its forward")


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks be as large as what a layer has beside its experts, or as one expert."""
    monkeypatch.setattr(expert_groups, "GROUP_BYTES", 1)


def uploads_of_a_run(
    model_type: str, num_resident: int, *, checkpointing: bool, num_steps: int = 3
) -> tuple[list[list[int]], dict[str, int]]:
    """Return the bytes of each upload of each step in a real run, and sizes of ring and masters."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.bfloat16)
    model = with_adapters(model.train(), target_modules=TARGETS.split(","))
    if checkpointing:
        model.enable_input_require_grads()
        enable_checkpointing(model.base_model.model, use_reentrant=False)
    settings = PyAOConfig(policy="off", stream_weights=num_resident, host_memory_gib=0.1)
    with attach(model, settings) as offloader:
        ring = offloader.weights.ring
        steps: list[list[int]] = []
        upload = ring.upload

        def noted(block: int, slot: int) -> None:
            steps[-1].append(ring.blocks[block].nbytes)
            upload(block, slot)

        ring.upload = noted
        for _ in range(num_steps):
            steps.append([])
            model(**tiny_batch(0, size=16, length=32)).loss.backward()
        return steps, {"slot": ring.slot_bytes, "host": ring.counts.pool_bytes}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_resident", [0, 2])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_uploads_are_those_of_a_run(
    model_type: str, num_resident: int, checkpointing: bool, small_groups: None
) -> None:
    program = with_streamed_blocks(
        recorded(model_type, checkpointing=checkpointing),
        streamed_layers(NUM_LAYERS, NUM_LAYERS - num_resident),
    )
    weights = weight_plan_of(program)
    steps, sizes = uploads_of_a_run(model_type, num_resident, checkpointing=checkpointing)
    assert program.streamed.slot_bytes == sizes["slot"]
    assert weights.host_bytes == sizes["host"]
    assert len(program.streamed.blocks) > 3 * len(weights.streamed_layers)
    for is_first, found in ((True, steps[0]), (False, steps[2])):
        assert [nbytes for _, nbytes, _ in uploads_of(program, is_first_step=is_first)] == found


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern")  # of PEFT's own defaults
def test_experts_that_have_adapters_stay_on_the_device() -> None:
    with_experts = recorded("mixtral")
    without = recorded("mixtral", targets="all-linear")  # peft 0.21 puts adapters on experts too
    experts = sum(each.nbytes for each in with_experts.residents if each.experts)
    assert experts > 0
    assert not any(each.experts for each in without.residents)
    assert sum(block_bytes(with_experts)) - sum(block_bytes(without)) >= experts


@pytest.mark.parametrize("num_streamed", [1, NUM_LAYERS])
def test_another_clock_says_the_same(num_streamed: int, small_groups: None) -> None:
    program = with_streamed_blocks(recorded("mixtral"), streamed_layers(NUM_LAYERS, num_streamed))
    times = [0.002] * program.num_operations
    leaves = [slot.nbytes > 2**13 and slot.layer < 4 for slot in program.slots]
    for speed in (0.1, 2.0):
        link = LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed)
        found = predict(program, leaves, window_bytes=2**18, times_ms=times, link=link)
        judge = replay_step(program, leaves, window_bytes=2**18, times_ms=times, link=link)
        assert found.step_ms == pytest.approx(judge.step_ms, rel=1e-6)
        assert found.peak_bytes == judge.peak_bytes
    lane_ms = sum(link.copy_ms("reload", nbytes) for _, nbytes, _ in uploads_of(program))
    assert found.step_ms >= lane_ms


def test_one_streamed_layer_may_free_memory(small_groups: None) -> None:
    program = with_streamed_blocks(recorded("mixtral"), streamed_layers(NUM_LAYERS, 1))
    assert program.streamed.saved_bytes > 0
    sizes = [100] * 8
    assert first_residents(sizes, 100, 0, 1100) == (5, True), "a ring of two whole layers"
    assert first_residents(sizes, 10, 0, 1100) == (7, True)


def test_reads_are_kept_in_documents(small_groups: None) -> None:
    program = recorded("qwen3_moe")
    document = RecordedStep(program, program.layer_names, 0).to_dict()
    read = RecordedStep.from_dict(document).program
    everything = range(NUM_LAYERS)
    assert uploads_of(with_streamed_blocks(read, everything)) == uploads_of(
        with_streamed_blocks(program, everything)
    )


def test_each_row_of_a_grouped_product_meets_one_matrix() -> None:
    rows, weight = torch.zeros(24, 16), torch.zeros(3, 16, 32)
    func = torch.ops.aten._grouped_mm.default
    cost = cost_of(func, (rows, weight), {}, rows, [rows, weight], [torch.zeros(24, 32)])
    assert cost is not None
    assert cost.flops == 2 * 24 * 16 * 32
    cost = cost_of(func, (rows.T, torch.zeros(24, 32)), {}, rows, [rows], [weight])
    assert cost is not None
    assert cost.flops == 2 * 24 * 16 * 32
