"""Casts of streamed weights: made anew for backward, of the weight and the part of it they are of.

Reference: the same layers with resident weights. What the graph holds is counted by storages.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.weights.known_casts import KnownCasts
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.errors import ConflictError
from tests.engine.weights.test_streaming import loss_of, ring_of, streamed
from tests.helpers import FunctionLayer, Stack, autocasting, gradients_of
from tests.helpers.adapters import tiny_lora
from tests.parity.test_streamed_experts import mixture

SIZE = 8
BF16 = torch.bfloat16


def experts_one_by_one() -> nn.Module:
    return mixture("mixtral", "eager")


def dora_on_conv1d() -> nn.Module:
    return tiny_lora("gpt2", adapters={"use_dora": True})


def dora_on_linear() -> nn.Module:
    return tiny_lora("llama", adapters={"use_dora": True})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": experts_one_by_one,
    "DoRA on Conv1D": dora_on_conv1d,
    "DoRA on Linear": dora_on_linear,
}


class CastsSeen(TorchDispatchMode):
    """Counts the living storages that ``_to_copy`` has made of tensors as large as frozen weights.

    Sizes alone are compared: of whole weights, and of slices along their first dimension. What is
    made of the head, which is resident, does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        frozen = [p for p in model.parameters() if not p.requires_grad and p.dim() >= 2]
        self.numels = {p.numel() for p in frozen if p.dim() == 2}
        self.numels |= {p[0].numel() for p in frozen if p.dim() == 3}
        anything: Any = model
        head = anything.base_model.model.get_output_embeddings().weight
        self.head = head.untyped_storage()._cdata
        self.seen: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and not args[0].requires_grad:
            is_of_head = args[0].untyped_storage()._cdata == self.head
            if result.dtype == BF16 and result.numel() in self.numels and not is_of_head:
                self.seen.append(StorageWeakRef(result.untyped_storage()))
        return result

    def living(self) -> int:
        return sum(not ref.expired() for ref in self.seen)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_holds_no_cast_of_a_frozen_weight(name: str) -> None:
    model = MODELS[name]()
    with streamed(model), CastsSeen(model) as casts, autocasting(BF16):
        for _ in range(2):
            loss = loss_of(model)
            assert casts.seen
            assert casts.living() == 0
            loss.backward()
            casts.seen.clear()


# ---- layers that read their weight in many ways --------------------------------------------------


def explicit(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.to(BF16) @ layer.weight.to(BF16)).float()


def transposed(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(x), layer.weight.T)


def in_rows(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    first, second = layer.weight.chunk(2)
    return torch.cat([F.linear(torch.tanh(x), each) for each in (second, first)], -1)


def by_expert(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    experts = layer.weight.view(2, SIZE // 2, SIZE)
    return torch.cat([F.linear(torch.tanh(x), experts[i]) for i in (1, 0)], -1)


def by_einsum(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi,oi->bo", torch.tanh(x), layer.weight)


def convolved(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(torch.tanh(x)[:, :, None], layer.weight[:, :, None])[:, :, 0]


def in_the_stored_dtype(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    """Products of elements are not cast, and save the weight."""
    return F.linear(x, layer.weight).float() * layer.weight[0] + layer.weight.norm(dim=1)


def outside_of_autocast(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(x.float()) @ weight


def made_once_and_read_twice(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.to(BF16)
    return torch.tanh(torch.tanh(x @ weight) @ weight.t())


def to_double(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.double() @ layer.weight.double()).float()


def changed_in_place(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.to(BF16) @ layer.weight.to(BF16).mul_(2)).float()


WAYS: tuple[Callable[[FunctionLayer, torch.Tensor], torch.Tensor], ...] = (
    explicit,
    transposed,
    in_rows,
    by_expert,
    by_einsum,
    convolved,
    in_the_stored_dtype,
    outside_of_autocast,
    made_once_and_read_twice,
    to_double,
    changed_in_place,
)


def stack(*ways: Callable[[FunctionLayer, torch.Tensor], torch.Tensor]) -> Stack:
    torch.manual_seed(0)
    made = Stack(*ways, size=SIZE)
    made.requires_grad_(False)
    return made


def gradient(model: nn.Module, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, SIZE, generator=generator, requires_grad=True)
    with autocasting(BF16):
        loss = model(x).float().pow(2).sum()
    with torch.no_grad(), autocasting(BF16):
        model(x)  # blocks are in other slots from here on
    loss.backward()
    assert x.grad is not None
    return torch.cat([loss.detach()[None], x.grad.flatten()])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_read_a_weight(way: Any) -> None:
    model, expected = stack(*[way] * 4), stack(*[way] * 4)
    with streamed(model) as offloader:
        for seed in range(3):
            assert torch.equal(gradient(model, seed), gradient(expected, seed))
        assert ring_of(offloader).counts.num_left == 0


def test_all_ways_in_one_model_and_in_inference_mode() -> None:
    model, expected = stack(*WAYS), stack(*WAYS)
    with streamed(model, policy="off"):
        assert torch.equal(gradient(model), gradient(expected))
        with torch.inference_mode(), autocasting(BF16):
            x = torch.ones(2, SIZE)
            assert torch.equal(model(x), expected(x))


def test_a_cast_that_is_changed_in_place_is_counted_and_its_layer_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = stack(*[changed_in_place] * 3)
    with streamed(model) as offloader, caplog.at_level(logging.WARNING):
        gradient(model)
        assert ring_of(offloader).counts.changed_cast_bytes == 3 * SIZE * SIZE * 2
    assert sum("layers.1" in message for message in caplog.messages) == 1


def test_what_autocast_would_write_into_is_refused() -> None:
    def written(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        layer.weight.mul_(2)
        return x @ layer.weight

    model = stack(*[written] * 3)
    with streamed(model), autocasting(BF16), pytest.raises(ConflictError, match="in place"):
        model(torch.ones(2, SIZE))


# ---- mutants -------------------------------------------------------------------------------------


def casts_are_right(build: Callable[[], nn.Module]) -> bool:
    """Say whether two steps under autocast are right; the frozen weights change in between."""
    model, plain = build(), build()
    with streamed(model):
        for each in (model, plain):
            torch.manual_seed(0)
            with autocasting(BF16):
                loss_of(each).backward()
            each.load_state_dict({name: value * 2 for name, value in each.state_dict().items()})
            each.zero_grad()
            with autocasting(BF16):
                loss_of(each).backward()
    found, expected = gradients_of(model), gradients_of(plain)
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_casts_are_made_anew_in_each_pass(name: str) -> None:
    assert casts_are_right(MODELS[name])


@pytest.mark.parametrize("where", ["cast", "_cast_again"])
@pytest.mark.parametrize("name", MODELS)
def test_mutant_that_keeps_casts(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(WeightRing, where)
    kept: dict[Any, torch.Tensor] = {}

    def lasting(ring: WeightRing, *args: Any) -> torch.Tensor:
        source = args[0]
        key = args[:2] if where == "cast" else (source.weight, source.part, str(args[1]))
        if key not in kept:
            kept[key] = own(ring, *args)
        return kept[key]

    monkeypatch.setattr(WeightRing, where, lasting)
    assert not casts_are_right(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_mutant_that_takes_another_weight_of_the_same_shape(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = WeightRing._cast_again

    def other(ring: WeightRing, source: Any, *args: Any) -> torch.Tensor:
        weight, part = source.weight, source.part
        if weight.master.size[1:] == weight.size[1:] and len(weight.size) == 3:
            step = weight.size[1] * weight.size[2]  # another expert of the same group
            num_before = part.offset // step
            others = [n for n in range(weight.size[0]) if n != num_before]
            if others:
                offset = others[0] * step + part.offset % step
                source = dataclasses.replace(source, part=dataclasses.replace(part, offset=offset))
        else:
            weights = [each for block in ring.blocks for each in block.weights]
            same = [each for each in weights if each.size == weight.size and each is not weight]
            source = dataclasses.replace(source, weight=same[0])
        return own(ring, source, *args)

    monkeypatch.setattr(WeightRing, "_cast_again", other)
    assert not casts_are_right(MODELS[name])


def test_mutant_that_takes_a_changed_cast_for_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_version", 0, raising=False)
    model, expected = stack(*[changed_in_place] * 3), stack(*[changed_in_place] * 3)
    wanted = gradient(expected)
    with streamed(model):
        assert not torch.equal(gradient(model), wanted)


def test_a_storage_that_takes_the_place_of_a_cast_is_not_taken_for_it() -> None:
    """Casts are known while they live: their place in memory may be used again."""
    known = KnownCasts()
    sources = [object() for _ in range(300)]
    kept = []
    for number, source in enumerate(sources):
        cast = torch.empty(16)
        known.note(cast, source)  # type: ignore[arg-type]
        assert known.find(cast.view(4, 4)) is source
        if number % 10 == 0:
            kept.append((cast, source))
        del cast
        assert known.find(torch.empty(16)) is None
    assert all(known.find(cast) is source for cast, source in kept)
    assert len(known._sources) < 200


def test_a_copy_of_the_model_under_autocast_is_plain() -> None:
    copies: list[torch.Tensor] = []

    def copying(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        copies.append(copy.deepcopy(layer.weight))
        return x @ layer.weight

    model = stack(*[copying] * 3)
    with attach(model, PyAOConfig(policy="off", stream_weights=0)), autocasting(BF16):
        model(torch.ones(2, SIZE))
    assert all(type(each) is torch.Tensor for each in copies)
    assert all(
        torch.equal(each, layer.weight) for each, layer in zip(copies, model.layers, strict=True)
    )
