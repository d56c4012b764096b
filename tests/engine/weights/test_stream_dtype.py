"""``stream_dtype="compute"``: weights are uploaded in the dtype of autocast.

Reference: the same layers with resident weights under the same autocast.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install.streaming_checks import check_can_stream
from hf_pyao.engine.weights.converted import ConvertedWeights
from hf_pyao.errors import ConfigError, ConflictError
from tests.engine.weights.test_casts import (
    BF16,
    SIZE,
    WAYS,
    changed_in_place,
    gradient,
    outside_of_autocast,
    stack,
)
from tests.engine.weights.test_streaming import llama, loss_of, ring_of, streamed
from tests.helpers import FunctionLayer, autocasting, gradients_of, tiny_batch
from tests.helpers.adapters import tiny_lora

COMPUTE = {"stream_dtype": "compute"}


def is_same_step(model: nn.Module, plain: nn.Module, autocast: Any = BF16, seed: int = 0) -> bool:
    """Say whether loss and gradients of one step of both are equal."""
    losses = []
    for each in (model, plain):
        each.zero_grad()
        with autocasting(autocast):
            loss = loss_of(each, seed)
        loss.backward()
        losses.append(loss.detach())
    found, expected = gradients_of(model), gradients_of(plain)
    is_same = all(torch.equal(found[name], value) for name, value in expected.items())
    return is_same and torch.equal(*losses)


class WideReads(TorchDispatchMode):
    """Counts casts of float32 tensors as large as frozen weights of the layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes = {
            tuple(p.shape) for n, p in model.named_parameters() if "base_layer.weight" in n
        }
        self.num = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype == BF16:
            if args[0].dtype == torch.float32 and tuple(args[0].shape) in self.shapes:
                self.num += result.untyped_storage().nbytes() == result.nbytes
        return result


def test_uploads_and_slots_have_half_the_bytes_and_nothing_is_cast() -> None:
    plain = llama()
    with WideReads(plain) as reads:
        for seed in range(2):
            with autocasting(BF16):
                loss = loss_of(plain, seed)
            loss.backward()
    num_casts = {"resident": reads.num}
    figures = {}
    for dtype in ("stored", "compute"):
        model = llama()
        with streamed(model, stream_dtype=dtype) as offloader, WideReads(model) as reads:
            for seed in range(2):
                with autocasting(BF16):
                    loss = loss_of(model, seed)
                loss.backward()
            ring = ring_of(offloader)
            figures[dtype] = ring.figures().uploaded_bytes, ring.slot_bytes, ring.num_uploads
            num_casts[dtype] = reads.num
            assert ring.counts.num_stored_reads == 0
            assert ring.num_late_uploads == 0
            assert ("GiB more there" in offloader.describe()) is (dtype == "compute")
    assert num_casts["resident"] - num_casts["compute"] == 2 * 5 * 7  # steps, layers, modules
    assert num_casts["stored"] >= num_casts["resident"]
    stored, compute = figures["stored"], figures["compute"]
    assert compute[0] == stored[0] / 2
    assert compute[1] == stored[1] / 2
    assert compute[2] == stored[2]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_read_a_weight(way: Any) -> None:
    if way is changed_in_place:
        return  # below
    model, expected = stack(*[way] * 4), stack(*[way] * 4)
    with streamed(model, **COMPUTE) as offloader:
        for seed in range(3):
            assert torch.equal(gradient(model, seed), gradient(expected, seed))
        assert ring_of(offloader).counts.num_left == 0


def test_a_cast_that_is_changed_in_place_is_refused_by_name() -> None:
    model = stack(*[changed_in_place] * 4)
    with streamed(model, **COMPUTE):
        with pytest.raises(ConflictError, match=r"layers\.0\.weight.*in place"):
            gradient(model)


def test_reads_in_the_stored_dtype_are_right_and_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, expected = stack(*[outside_of_autocast] * 3), stack(*[outside_of_autocast] * 3)
    with streamed(model, **COMPUTE) as offloader, caplog.at_level(logging.WARNING):
        assert torch.equal(gradient(model), gradient(expected))
        counts = ring_of(offloader).figures()
        assert counts.num_stored_reads >= 3
        assert counts.stored_read_bytes == counts.num_stored_reads * SIZE * SIZE * 4
    assert sum("stream_dtype='stored'" in message for message in caplog.messages) == 1


def test_steps_and_evaluation_without_autocast_are_right() -> None:
    model, plain = llama(), llama()
    with streamed(model, **COMPUTE):
        for autocast in (None, BF16, None, BF16):
            assert is_same_step(model, plain, autocast)
            with torch.inference_mode():
                assert torch.equal(loss_of(model), loss_of(plain))


def test_another_dtype_of_autocast_later_is_right() -> None:
    model, plain = llama(), llama()
    with streamed(model, **COMPUTE):
        for autocast in (BF16, torch.float16, BF16):
            assert is_same_step(model, plain, autocast)


def follows_changes() -> bool:
    """Say whether steps are right after weights changed on the host in several ways."""
    model, plain = llama(), llama()
    with streamed(model, **COMPUTE):
        is_right = is_same_step(model, plain)
        for each in (model, plain):
            each.load_state_dict({name: value * 2 for name, value in each.state_dict().items()})
        is_right &= is_same_step(model, plain)
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                if "q_proj.base_layer.weight" in name:
                    parameter.data = parameter.data.clone() * 3  # a stray
        is_right &= is_same_step(model, plain)
    return is_right


def test_changes_on_the_host_are_converted_again() -> None:
    assert follows_changes()


def test_mutant_that_converts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvertedWeights, "may_have_changed", lambda _: None)
    assert not follows_changes()


def test_mutant_that_converts_into_the_place_of_another_weight_of_the_same_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ConvertedWeights.to_upload

    def exchanged(converted: ConvertedWeights, stored: torch.Tensor) -> torch.Tensor:
        first = converted._masters[0]
        other = next(m for m in converted._masters[1:] if m.size == first.size)
        names = converted.offsets
        names[first.name], names[other.name] = names[other.name], names[first.name]
        try:
            return own(converted, stored)
        finally:
            names[first.name], names[other.name] = names[other.name], names[first.name]

    monkeypatch.setattr(ConvertedWeights, "to_upload", exchanged)
    model, plain = llama(), llama()
    with streamed(model, **COMPUTE):
        assert not is_same_step(model, plain)


def test_layers_that_change_places_keep_their_copies() -> None:
    model, plain = llama(), llama()
    with streamed(model, **COMPUTE) as offloader:
        assert offloader.weights is not None
        for num_resident in (0, 2, 1, 4, 0):
            offloader.weights.ask_for(num_resident)
            assert is_same_step(model, plain)
        assert is_same_step(model, plain)


def test_checkpoints_and_parameters_are_in_the_stored_dtype() -> None:
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with streamed(model, **COMPUTE):
        with autocasting(BF16):
            loss_of(model).backward()
        during = dict(model.state_dict())
    for state in (during, model.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in before.items())


def test_the_data_of_a_weight_inside_of_a_layer_is_refused() -> None:
    def reading(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.data

    model = stack(*[reading] * 3)
    with streamed(model, **COMPUTE), autocasting(BF16):
        with pytest.raises(ConflictError, match="stream_dtype='stored'"):
            model(torch.ones(2, SIZE))


def test_copies_count_against_the_host_budget() -> None:
    model = llama()
    with streamed(model, **COMPUTE) as offloader:
        assert offloader.weights is not None
        stored, copies = offloader.weights.nbytes, offloader.weights.converted_nbytes
        assert copies == stored / 2
        assert offloader.weights.figures()["host_bytes"] == stored + copies
    tight = (stored + copies / 2) / 2**30
    config = PyAOConfig(stream_weights=0, host_memory_gib=tight, **COMPUTE)
    for refuse in (attach, check_can_stream):
        with pytest.raises(ConfigError, match="host_memory_gib"):
            refuse(llama(), config)
    with streamed(llama(), host_memory_gib=tight):
        pass


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (lambda: tiny_lora("llama", dtype=BF16), {"stream_weights": 0}, "bfloat16"),
        (lambda: tiny_lora("llama", adapters={"use_dora": True}), {"stream_weights": 0}, "DoRA"),
        (llama, {"stream_weights": "off"}, "no effect"),
    ],
    ids=["nothing to convert", "DoRA", "nothing is streamed"],
)
def test_what_cannot_be_right_is_refused(model: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_can_stream(model(), PyAOConfig(**settings, **COMPUTE))
    with pytest.raises(ConfigError, match=said):
        attach(model(), PyAOConfig(**settings, **COMPUTE))


def test_a_mixture_of_dtypes_in_one_layer() -> None:
    """Weights that are in half precision already are uploaded as they are."""

    def mixed() -> nn.Module:
        model = llama()
        for name, parameter in model.named_parameters():
            if "o_proj.base_layer" in name or "up_proj.base_layer" in name:
                parameter.data = parameter.data.to(BF16)
        return model

    model, plain = mixed(), mixed()
    with streamed(model, **COMPUTE):
        for seed in range(2):
            assert is_same_step(model, plain, seed=seed)
    with torch.no_grad(), autocasting(BF16):
        assert torch.equal(model(**tiny_batch(0)).loss, plain(**tiny_batch(0)).loss)
