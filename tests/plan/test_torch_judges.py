"""torch's own tools beside ours: the bytes of a step's tensors, and the choice under a budget."""

from __future__ import annotations

import dataclasses
import random

import pytest
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch.distributed._tools.mem_tracker import MemTracker

from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.solve.optimal import solve
from hf_pyao.plan.solve.plan_problem import LayerGroup, PlanProblem, RebuildStep, SlotChoice
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step

SIZES = "num_hidden_layers=2,num_attention_heads=2,vocab_size=384,hidden_size=128"
MLP = "intermediate_size=192"
GROUPED = "num_key_value_heads=1"
MODELS = {
    "llama": f"{SIZES},{MLP},{GROUPED}",
    "qwen2": f"{SIZES},{MLP},{GROUPED}",
    "mistral": f"{SIZES},{MLP},{GROUPED}",
    "gemma2": f"{SIZES},{MLP},{GROUPED},head_dim=32",
    "gpt_neox": f"{SIZES},{MLP}",
    "phi": f"{SIZES},{MLP}",
    "opt": f"{SIZES},ffn_dim=256,word_embed_proj_dim=128,max_position_embeddings=128",
    "gpt2": "n_layer=2,n_head=2,vocab_size=384,n_embd=128,n_positions=128",
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(every=5)
def test_torch_counts_the_predicted_peak(architecture: str, checkpointing: bool) -> None:
    """Of what CUDA would run on fake tensors, to the byte; it knows no workspaces of kernels."""
    config = config_of(parse_model(f"{architecture}:{MODELS[architecture]}"))
    training = FakeTraining(
        config=config, checkpointing=checkpointing, training_state="device", optimizer_bytes=0
    )
    program = record_step(training, 2, 64)
    operations = tuple(each._replace(workspace_bytes=0) for each in program.operations)
    program = dataclasses.replace(program, operations=operations)
    predicted = predict(program, [False] * len(program.slots), window_bytes=None)
    tracker = MemTracker()
    with training.model() as (model, _):
        tracker.track_external(model)
        with tracker:
            training.run(model, 2, 64)
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    assert predicted.peak_bytes == counted["Total"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(every=6)
def test_torch_s_knapsack_recomputes_no_less(seed: int) -> None:
    """Where nothing can leave, what is kept within a budget is a knapsack."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 40) for _ in range(9)]
    times_ms = [draw.uniform(0.1, 5.0) for _ in sizes]
    budget_bytes = draw.randint(20, sum(sizes))
    groups = tuple(
        LayerGroup(
            layers=(layer,),
            slots=(SlotChoice(name="mlp:0", nbytes=nbytes, maker=0),),
            steps=(RebuildStep(elapsed_ms=elapsed_ms),),
        )
        for layer, (nbytes, elapsed_ms) in enumerate(zip(sizes, times_ms, strict=True))
    )
    problem = PlanProblem(groups=groups, forward_ms=0, backward_ms=0, kept_bytes=budget_bytes)
    choice = solve(problem, relative_gap=0.0)
    per_byte = 1e-4  # it looks at ten thousandths
    memory = [per_byte * nbytes for nbytes in sizes]
    saved_ms, saved, _ = dp_knapsack(memory, times_ms, per_byte * budget_bytes)
    assert choice.overhead_ms == pytest.approx(sum(times_ms) - saved_ms, abs=1e-4)
    assert [group.kept[0] for group in choice.groups] == [int(n in saved) for n in range(9)]
