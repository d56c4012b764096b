"""Estimates of adapters over a quantised base have the bytes of a model that is quantised."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

from hf_pyao.errors import ConfigError
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.weights.streamable import streamable_layers
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import block_bytes
from hf_pyao.plan.weights.base_names import BASES
from hf_pyao.tools.estimate.common_arguments import training_fields
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.adapters import with_adapters
from tests.helpers.lora_steps import lora_config
from tests.helpers.quantised import quantise_

pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated"  # read by peft
)

CONFIG = lora_config(num_layers=4, hidden_size=192)
KINDS = {"nf4": "nf4", "nf4-double": "nested nf4", "int8": "int8"}
RANK = 4


@functools.cache
def recorded(base: str, adapter_dtype: str = "float32", **more: Any) -> StepProgram:
    training = FakeTraining(
        config=CONFIG,
        lora_rank=RANK,
        training_state="device",
        optimizer_bytes=0,
        base=base,
        adapter_dtype=adapter_dtype,
        **more,
    )
    return record_step(training, 2, 64)


def quantised_model(base: str) -> Any:
    """Return a real model on the CPU, quantised by the library."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    quantise_(model, KINDS[base], torch.bfloat16)
    model.is_loaded_in_8bit = base == "int8"
    model.is_loaded_in_4bit = base != "int8"
    return with_adapters(model.train(), r=RANK)


def bytes_of(model: Any) -> int:
    """Return the bytes of all storages that weights, and what lies beside them, are in."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()

    for tensor in (*model.parameters(), *model.buffers()):
        add(tensor)
        state = getattr(tensor, "quant_state", None)
        for each in (state, getattr(state, "state2", None)):
            for value in vars(each).values() if each is not None else ():
                add(value)
        add(getattr(tensor, "SCB", None))
    return sum(found.values())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("base", KINDS)
def test_weights_take_what_they_take_quantised(base: str) -> None:
    program, model = recorded(base), quantised_model(base)
    found = find_layers(model)
    layers = streamable_layers(model, found.layers)
    real = bytes_of(model)
    # A table of 16 values for each layer of the library's is shared in the estimate, or not.
    assert abs(program.resident_bytes - real) <= 4096, f"{program.resident_bytes} for {real}"
    aligned = [
        sum(math.ceil(tensor.nbytes / 512) * 512 for _, tensor in layer.tensors) for layer in layers
    ]
    assert list(block_bytes(program)) == aligned


@pytest.mark.parametrize("base", ["nf4-double"])
def test_adapters_are_in_float32_as_peft_makes_them(base: str) -> None:
    model = quantised_model(base)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    in_half = recorded(base, "bfloat16").resident_bytes
    assert recorded(base).resident_bytes - in_half == adapters / 2
    card = find_hardware("rtx4090")
    states = [training_fields(card, lora_rank=4, adapter_dtype=d) for d in ("float32", "bfloat16")]
    assert [each["optimizer_bytes"] for each in states] == [8, 4]


def saved_bytes(program: StepProgram) -> int:
    return sum(slot.nbytes for slot in program.slots)


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.sampled(every=1)
def test_prepared_as_peft_documents_it_the_rest_is_float32(base: str) -> None:
    model = prepare_model_for_kbit_training(quantised_model(base), use_gradient_checkpointing=False)
    program = recorded(base, is_kbit_prepared=True)
    assert abs(program.resident_bytes - bytes_of(model)) <= 4096
    assert program.resident_bytes - recorded(base).resident_bytes > CONFIG.vocab_size * 192 * 2 * 2
    inputs = [
        saved_bytes(recorded(base, is_kbit_prepared=each, checkpointing=True))
        for each in (True, False)
    ]
    assert inputs[0] == 2 * inputs[1]
    names = {operation.name for operation in program.operations}
    assert "_scaled_dot_product_flash_attention" in names  # autocast casts what attention gets


def test_dropout_of_adapters_saves_a_byte_for_each_element() -> None:
    dropped = saved_bytes(recorded("nf4", lora_dropout=0.1)) - saved_bytes(recorded("nf4"))
    tokens, hidden, wide = 2 * 64, CONFIG.hidden_size, CONFIG.intermediate_size
    assert dropped == CONFIG.num_hidden_layers * tokens * (6 * hidden + wide)


def test_float16_has_fused_attention_on_a_card_before_ampere() -> None:
    kernels = find_hardware("t4").kernels
    found = [
        {each.name for each in recorded("nf4", "float32", dtype=dtype, kernels=kernels).operations}
        for dtype in ("float16", "bfloat16")
    ]
    assert "_scaled_dot_product_efficient_attention" in found[0]
    assert "_safe_softmax" in found[1]


def test_options_of_adapters_are_refused_without_them() -> None:
    card = find_hardware("t4")
    for options in ({"kbit_prepared": True}, {"lora_dropout": 0.1}):
        with pytest.raises(ConfigError, match="--lora"):
            training_fields(card, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--lora-dropout"):
        training_fields(card, lora_rank=4, lora_dropout=1.0)


def test_products_dequantise_and_take_longer() -> None:
    plain, packed = recorded("bf16"), recorded("nf4-double")
    hidden, wide = CONFIG.hidden_size, CONFIG.intermediate_size
    of_heads = CONFIG.num_key_value_heads * CONFIG.head_dim
    num_weights = 3 * hidden * wide + 2 * hidden * hidden + 2 * hidden * of_heads
    traffic = [
        operation.traffic_bytes
        for segment in packed.segments
        if segment.layer == 1 and segment.phase == "forward"
        for operation in packed.operations[segment.start : segment.end]
        if operation.name == "dequantize_4bit"
    ]
    assert len(traffic) == 7
    assert sum(traffic) == 4.5 * num_weights  # half a byte is read, two are written and read
    assert sum(op.flops for op in packed.operations) == pytest.approx(
        sum(op.flops for op in plain.operations), rel=1e-3
    )
    assert packed.resident_bytes < plain.resident_bytes
    largest = max(operation.workspace_bytes for operation in packed.operations)
    assert largest >= 2 * hidden * wide, "a whole weight is dequantised inside"


@pytest.mark.parametrize("base", KINDS)
def test_bytes_of_a_parameter(base: str) -> None:
    weight = torch.nn.Linear(512, 1024, bias=False)
    model = torch.nn.Sequential()
    model.layers = torch.nn.Sequential(weight)
    wrapped = torch.nn.Sequential()
    wrapped.model = model
    quantise_(wrapped, KINDS[base])
    (parameter,) = wrapped.parameters()
    state: Any = getattr(parameter, "quant_state", None)
    scales = 0 if state is None else state.absmax.nbytes
    if state is not None and state.nested:
        scales += state.state2.absmax.nbytes
    assert (parameter.nbytes + scales) / (512 * 1024) == pytest.approx(BASES[base], rel=1e-3)


def test_a_base_that_is_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lora"):
        training_fields(find_hardware("rtx4090"), base="nf4")
