"""Bytes that are predicted from fake tensors are those that real steps on a CPU count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.plan.predict.predict import predict
from hf_pyao.tools.estimate.fake_step import BUCKET_BYTES, FakeTraining, build_model
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers import ARCHITECTURES, ENCODER_DECODERS, EVERY_LAYER
from tests.helpers.ledger import AllocationLedger
from tests.helpers.simulation.fake_peak import UNLIMITED_HOST_GIB, StepPeak, peak_of

BATCH, LENGTH = 2, 16
SPARSE = ("mixtral", "qwen3_moe")


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {*ENCODER_DECODERS}))
@pytest.mark.parametrize("keep_last_layers", [0, 1])
@pytest.mark.sampled(every=1000)
def test_they_are_the_same(architecture: str, keep_last_layers: int) -> None:
    if architecture == "mixtral" and Version(transformers.__version__) < Version("5"):
        pytest.skip("this release's mixtral looks at values in its forward")
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    training = FakeTraining(config=config, training_state="device", operations_of="cpu")
    program = record_step(training, BATCH, LENGTH)
    first_kept = program.num_layers - keep_last_layers
    predicted = predict(
        program, [slot.layer < first_kept for slot in program.slots], window_bytes=None
    )
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.randint(1, config.vocab_size, (BATCH, LENGTH))
    settings = replace(EVERY_LAYER, keep_last_layers=keep_last_layers)
    with attach(model, settings) as offloader:
        model(input_ids=ids, labels=ids).loss.backward()
        counted = offloader.metrics()
    assert predicted.offloaded_bytes == counted["offloaded_bytes"] > 0
    assert predicted.host_peak_bytes <= counted["host_peak_bytes"]
    if architecture not in SPARSE:
        assert len(program.slots) == counted["num_slots"]


# ---- peaks of steps on fake tensors --------------------------------------------------------------

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 3000,
}


@pytest.mark.thorough
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
def test_the_peak_is_that_of_the_allocator(head_loss: str) -> None:
    """Of the same step on real tensors, by the events of the allocator."""
    config = AutoConfig.for_model("llama", **SMALL)
    training = FakeTraining(config=config, training_state="device", operations_of="cpu")
    settings = PyAOConfig(policy="off", head_loss=head_loss)
    fake = peak_of(training, settings, 3, 160)
    config.use_cache = False
    ids = torch.zeros(3, 160, dtype=torch.int64)
    with AllocationLedger() as ledger:
        model = build_model(config, checkpointing=False)
        with attach(model, settings):
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
        del outputs
    assert fake.peak_bytes - fake.state_bytes == pytest.approx(ledger.peak_bytes, rel=0.02)


@pytest.mark.thorough
def test_what_is_offloaded_leaves_the_peak_and_chunked_logits_are_never_in_it() -> None:
    training = FakeTraining(config=AutoConfig.for_model("llama", **SMALL))

    def steps(policy: str, head_loss: str) -> list[StepPeak]:
        settings = PyAOConfig(
            policy=policy, head_loss=head_loss, window=2**18, host_memory_gib=UNLIMITED_HOST_GIB
        )
        return [peak_of(training, settings, size, 128) for size in (16, 32)]

    def growth(found: list[StepPeak]) -> float:
        """Bytes of a token."""
        return (found[1].peak_bytes - found[0].peak_bytes) / (16 * 128)

    plain, chunked, both = steps("off", "off"), steps("off", "chunked"), steps("all", "chunked")
    # Of the logits two copies in float32 at least, and two gradients.
    assert growth(plain) - growth(chunked) > 8 * SMALL["vocab_size"]
    forward = [found[1].phase_peak_bytes["layers, forward"] for found in (chunked, both)]
    assert forward[0] - forward[1] > both[1].offloaded_bytes - 2**18 > 0


@pytest.mark.thorough
def test_training_states_differ_by_gradients_moments_and_bucket() -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    host, device = (
        peak_of(FakeTraining(config=config, training_state=state), PyAOConfig(policy="off"), 1, 64)
        for state in ("host", "device")
    )
    assert (host.state_bytes, device.state_bytes) == (0, 2 * device.weights_bytes)
    assert device.peak_bytes >= 4 * device.weights_bytes
    assert host.phase_peak_bytes["backward"] > BUCKET_BYTES + host.weights_bytes
