"""torch's own tools beside ours: the bytes of a step's tensors."""

from __future__ import annotations

import dataclasses

import pytest
from torch.distributed._tools.mem_tracker import MemTracker

from hf_pyao.plan.predict.predict import predict
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
