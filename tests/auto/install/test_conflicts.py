"""What cannot go together is refused, with the remedy."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, TrainingArguments

from hf_pyao import attach
from hf_pyao.auto.install.conflicts import (
    check_checkpointing_arguments,
    check_model,
    check_training_arguments,
)
from hf_pyao.errors import ConfigError, ConflictError
from tests.helpers import tiny_model

# TRL sets the older of the two names of checkpointing, which transformers 5.23 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is depre:FutureWarning")

# transformers renamed gradient checkpointing to activation checkpointing and warns on the old name.
RENAMED = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
CHECKPOINTING = "activation_checkpointing" if RENAMED else "gradient_checkpointing"
ENABLE_CHECKPOINTING = getattr(LlamaForCausalLM, f"{CHECKPOINTING}_enable")
CAN_OFFLOAD = "offload" in inspect.signature(ENABLE_CHECKPOINTING).parameters


def cpu_arguments(**values: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, **values)


def test_checkpointing_and_segments_are_not_both_asked_for() -> None:
    args = cpu_arguments(**{CHECKPOINTING: True})
    check_checkpointing_arguments(args, 0)
    check_checkpointing_arguments(cpu_arguments(), 4)
    with pytest.raises(ConflictError, match=r"training arguments.*checkpoint_every is 4.*=False"):
        check_checkpointing_arguments(args, 4)


def test_an_activation_that_writes_what_was_saved_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = nn.RReLU()
    with pytest.raises(ConflictError, match=r"model.layers.1.mlp.act_fn.*nn.RReLU"):
        check_model(model)
    model.model.layers[1].mlp.act_fn.eval()
    check_model(model)


def test_compiled_autograd_is_refused() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(ConflictError, match=r"compiled_autograd is on.*Switch it off"):
            attach(tiny_model("llama"))
    attach(tiny_model("llama")).detach()


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ConflictError, match="DataParallel"):
        attach(nn.DataParallel(tiny_model("llama")))


def test_unified_memory_is_refused() -> None:
    # There is no MPS here, and neither function does more with a device than read its type.
    mps = torch.device("mps")
    with pytest.raises(ConflictError, match="MPS"):
        check_training_arguments(SimpleNamespace(n_gpu=1, device=mps))  # type: ignore[arg-type]

    class OnMPS(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device=mps)])

    with pytest.raises(ConflictError, match="MPS"):
        check_model(OnMPS())


def test_saved_tensor_hooks_around_the_caller_are_refused() -> None:
    model = tiny_model("llama")
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(ConflictError, match=r"saved-tensor hooks are already set.*outside"),
    ):
        attach(model)
    attach(model).detach()


@pytest.mark.skipif(not CAN_OFFLOAD, reason="this transformers offloads no checkpoints")
def test_a_model_that_offloads_its_checkpoints_is_refused() -> None:
    model = tiny_model("llama")
    enable = getattr(model, f"{CHECKPOINTING}_enable")
    enable(offload=True)
    with pytest.raises(ConflictError, match=r"offload=True.*without `offload`"):
        attach(model)
    enable(offload=False)
    attach(model).detach()


def test_torchs_offload_wrapper_is_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    model = tiny_model("llama")
    model.model.layers[1] = offload_wrapper(model.model.layers[1])
    with pytest.raises(ConflictError, match=r"model\.layers\.1"):
        check_model(model)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model is None; expected a torch.nn.Module"):
        attach(None)  # type: ignore[arg-type]
