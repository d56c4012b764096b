"""Recorded steps of a Llama with adapters, whose own weights are frozen."""

from __future__ import annotations

import functools

from transformers import LlamaConfig

from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step


def lora_config(num_layers: int = 8, hidden_size: int = 1024) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        vocab_size=4096,
        use_cache=False,
    )


@functools.cache
def lora_step(
    *,
    num_layers: int = 8,
    hidden_size: int = 1024,
    micro_batch: int = 2,
    length: int = 512,
    checkpointing: bool = False,
) -> StepProgram:
    """Return a whole step with all weights on the device."""
    training = FakeTraining(
        config=lora_config(num_layers, hidden_size),
        lora_rank=8,
        training_state="device",
        checkpointing=checkpointing,
    )
    return record_step(training, micro_batch, length)
