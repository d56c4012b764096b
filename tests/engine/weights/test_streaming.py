"""Streamed weights: what is on the device when, and what happens around training."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.errors import ConfigError, ConflictError
from tests.helpers import FunctionLayer, Stack, assert_same_tensors, gradients_of, tiny_batch, train
from tests.helpers.adapters import tiny_lora

NUM_LAYERS = 5


def streamed(model: nn.Module, stay: int = 0, **settings: Any) -> Offloader:
    settings = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, **settings}
    return attach(model, PyAOConfig(stream_weights=stay, **settings))


def ring_of(offloader: Offloader) -> WeightRing:
    assert offloader.weights is not None
    assert offloader.weights.ring is not None
    return offloader.weights.ring


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(**tiny_batch(seed)).loss
    return loss


def llama(**options: Any) -> nn.Module:
    return tiny_lora("llama", num_hidden_layers=NUM_LAYERS, **options)


class BlocksSeen(TorchDispatchMode):
    """Counts at each operation the blocks that are on the device."""

    def __init__(self, ring: WeightRing) -> None:
        super().__init__()
        self.ring = ring
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.most = max(self.most, sum(each.is_full for each in self.ring.on_device))
        return function(*args, **(kwargs or {}))


def held_by_the_graph(ring: WeightRing) -> int:
    return sum(each.num_holders for each in ring.on_device)


@pytest.mark.parametrize("policy", ["all", "off"])
def test_at_every_operation_two_blocks_are_on_the_device_and_the_graph_holds_none(
    policy: str,
) -> None:
    model = llama()
    with streamed(model, policy=policy) as offloader:
        ring = ring_of(offloader)
        with BlocksSeen(ring) as blocks:
            for _ in range(2):
                loss = loss_of(model)
                assert held_by_the_graph(ring) == 0, "the graph holds bytes of a frozen weight"
                loss.backward()
        assert blocks.most == 2
        assert ring.counts.num_left == 0
    expected = llama()
    for _ in range(2):
        loss_of(expected).backward()
    assert_same_tensors(gradients_of(model), gradients_of(expected), "gradients")


def test_accumulation_and_evaluation_and_generation_use_the_same_ring() -> None:
    model, plain = llama(), llama()
    with streamed(model) as offloader:
        train(model, [[tiny_batch(0), tiny_batch(1)]])
        train(plain, [[tiny_batch(0), tiny_batch(1)]])
        for each in (model, plain):
            each.eval()
        with torch.no_grad():
            assert torch.equal(loss_of(model), loss_of(plain))
        with torch.inference_mode():
            assert torch.equal(loss_of(model), loss_of(plain))
        ids = tiny_batch(0)["input_ids"]
        generate: Any = model
        reference: Any = plain
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        ours = generate.generate(input_ids=ids, **options)
        assert torch.equal(ours, reference.generate(input_ids=ids, **options))
        # In evaluation mode with gradients, the graph holds no frozen weight either.
        loss = loss_of(model)
        ring = ring_of(offloader)
        assert held_by_the_graph(ring) == 0
        loss.backward()
        loss_of(plain).backward()
        assert ring.counts.num_left == 0
        assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


class Holding(torch.autograd.Function):
    """Keeps the weight on ``ctx``, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight.t(), None


def holding(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return Holding.apply(x, layer.weight)  # type: ignore[no-any-return, no-untyped-call]


def gradient_of_stack(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    out: torch.Tensor = model(x)
    with torch.no_grad():
        for _ in range(2):
            model(x)  # blocks are in other slots from here on
    out.sum().backward()
    assert x.grad is not None
    return x.grad


def frozen_stack() -> Stack:
    torch.manual_seed(3)
    stack = Stack(*[holding] * 5)
    stack.requires_grad_(False)
    return stack


def test_a_view_that_is_kept_on_ctx_keeps_its_bytes() -> None:
    expected = gradient_of_stack(frozen_stack())
    stack = frozen_stack()
    with streamed(stack) as offloader:
        assert torch.equal(gradient_of_stack(stack), expected)
        assert ring_of(offloader).counts.num_left > 0


def is_right_outside() -> bool:
    """Say whether weights that a layer gives away have their bytes after their layers have run."""
    kept: list[torch.Tensor] = []

    def giving(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        kept.append(layer.weight)
        return x @ layer.weight

    stack = Stack(*[giving] * 5).requires_grad_(False)
    with streamed(stack):
        gradient_of_stack(stack)
        weights = [layer.weight for layer in stack.layers] * 3
        return all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True))


def test_a_weight_that_a_layer_gives_away_has_its_bytes_afterwards() -> None:
    assert is_right_outside()


def test_mutant_that_does_not_look_who_holds_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(each: DeviceBlock) -> bool:
        bytes_view(each.storage, each.device, 0, each.block.nbytes).zero_()
        return True

    monkeypatch.setattr(DeviceBlock, "empty", empty)
    assert not is_right_outside()


# ---- around training -------------------------------------------------------------------------------


def test_parameters_are_the_same_objects_with_the_same_bits(tmp_path: Path) -> None:
    model = llama()
    before = {name: (p, p.detach().clone(), p._version) for name, p in model.named_parameters()}
    with streamed(model) as offloader:
        loss_of(model).backward()
        for name, parameter in model.named_parameters():
            known, bits, _ = before[name]
            assert parameter is known
            assert torch.equal(parameter, bits)
        state = model.state_dict()
        assert all(torch.equal(state[n], bits) for n, (_, bits, _) in before.items())
        layer = dict(model.named_modules())[_a_linear(model)]
        assert layer.weight is layer._parameters.get("weight")
        copied = copy.deepcopy(model)
        assert type(pickle.loads(pickle.dumps(layer._parameters))) is dict
        anything: Any = model
        anything.save_pretrained(tmp_path / "adapter")
        anything.base_model.model.save_pretrained(tmp_path / "base")
        saved = load_file(tmp_path / "base" / "model.safetensors")
        inner = anything.base_model.model.state_dict()
        assert saved
        assert all(torch.equal(inner[name], value) for name, value in saved.items())
        offloader.detach()
    assert torch.equal(loss_of(copied), loss_of(model))
    for name, parameter in model.named_parameters():
        known, bits, _ = before[name]
        assert parameter is known
        assert torch.equal(parameter, bits)
    assert all(type(module._parameters) is dict for module in model.modules())
    assert not any(key.startswith("_pyao") for module in model.modules() for key in vars(module))


def _a_linear(model: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if name.endswith("q_proj.base_layer"))


def test_weights_that_change_on_the_host_are_uploaded_again() -> None:
    model, plain = llama(), llama()
    with streamed(model):
        for each in (model, plain):
            loss_of(each).backward()
            with torch.no_grad():
                for name, parameter in each.named_parameters():
                    if name.endswith("base_layer.weight"):
                        parameter.data.mul_(1.5)
        assert torch.equal(loss_of(model), loss_of(plain))
        for each in (model, plain):
            module: Any = dict(each.named_modules())[_a_linear(each)]
            module.weight.data[0, 0] += 1  # as merges do: no version tells
        assert torch.equal(loss_of(model), loss_of(plain))
        state = {name: value * 2 for name, value in plain.state_dict().items()}
        for each in (model, plain):
            each.load_state_dict(state)
        assert torch.equal(loss_of(model), loss_of(plain))


def test_adapters_that_are_added_and_switched() -> None:
    model, plain = llama(), llama()
    with streamed(model):
        for each in (model, plain):
            loss_of(each).backward()
            anything: Any = each
            torch.manual_seed(1)
            anything.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=3))
            anything.set_adapter("other")
            loss_of(each).backward()
            anything.set_adapter("default")
            loss_of(each).backward()
        assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


class NotingTransport(BlockingTransport):
    """Notes the order in which copies to the device are queued."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []

    def reload(self, *args: Any, **options: Any) -> Any:
        self.labels.append(str(options["label"]))
        return super().reload(*args, **options)


def test_reloads_and_uploads_share_the_lane_in_the_order_of_backward() -> None:
    model = llama()
    transport = NotingTransport()
    settings: dict[str, Any] = {"policy": "all", "min_bytes": 0, "keep_last_layers": 0}
    config = PyAOConfig(stream_weights=0, host_memory_gib=0.1, **settings)
    with attach(model, config, transport=transport):
        train(model, [[tiny_batch(0)]])
        transport.labels.clear()
        train(model, [[tiny_batch(0)]])
    layers = [(int(re.findall(r"layers\.(\d+)", label)[0]), label) for label in transport.labels]
    order = [key for key, _ in itertools.groupby((n, "weights" in label) for n, label in layers)]
    uploads = [number for number, is_weights in order if is_weights]
    assert uploads == [2, 3, 4, 2, 1, 0], "blocks at the turns are on the device already"
    backward = order[order.index((4, True)) + 1 :]
    assert backward[0] == (4, False), "the layer's own reloads come first"
    for block in (2, 1, 0):  # queued as the layer before it in backward begins
        assert backward.index((block, True)) > 0
    assert len(backward) == len(set(backward))


def test_merging_and_unmerging_adapters() -> None:
    model, plain = llama(), llama()
    with streamed(model):
        for each in (model, plain):
            loss_of(each).backward()
            anything: Any = each
            anything.merge_adapter()
        assert torch.equal(loss_of(model), loss_of(plain))
        for each in (model, plain):
            anything = each
            anything.unmerge_adapter()
            with anything.disable_adapter():
                loss_of(each)
        assert torch.equal(loss_of(model), loss_of(plain))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_in_mid_pass_the_next_step_is_right(
    where: str, error: type[BaseException]
) -> None:
    model, plain = llama(), llama()
    module = dict(model.named_modules())[_a_linear(model).replace("layers.0", "layers.3")]

    def fail(*_: Any) -> None:
        raise error

    with streamed(model):
        if where == "forward":
            hook = module.register_forward_hook(fail)
        else:
            hook = module.register_full_backward_hook(fail)
        with pytest.raises(error):
            loss_of(model).backward()
        hook.remove()
        weight = module.weight
        assert weight is module._parameters.get("weight"), "outside, it is the parameter"
        model.zero_grad()
        loss_of(model).backward()
        loss_of(plain).backward()
        assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


def test_a_model_that_is_deleted_takes_everything_with_it() -> None:
    model = llama()
    offloader = streamed(model)
    loss_of(model).backward()
    ref = StorageWeakRef(ring_of(offloader).blocks[0].memory.untyped_storage())  # type: ignore[union-attr]
    del offloader, model
    gc.collect()
    assert ref.expired()


def test_moving_the_model_leaves_the_streamed_weights_where_they_are() -> None:
    model = llama()
    with streamed(model) as offloader:
        block = ring_of(offloader).blocks[0]
        assert block.memory is not None
        key = block.memory.untyped_storage()._cdata
        model.to("meta")
        for weight in block.weights:
            parameter = weight.ref()
            assert parameter is not None
            assert parameter.untyped_storage()._cdata == key
        inner: Any = model
        assert inner.base_model.model.lm_head.weight.is_meta
        with pytest.raises(ConflictError, match="dtype"):
            model.half()


# ---- refusals ----------------------------------------------------------------------------------------


def test_what_is_tied_or_hooked_stays() -> None:
    model = llama()
    named = dict(model.named_modules())
    first: Any = named[_a_linear(model)]
    other: Any = named[_a_linear(model).replace("layers.0", "layers.1")]
    other.weight = first.weight
    with streamed(model) as offloader:
        assert offloader.weights is not None
        assert offloader.weights.left_bytes["tied with others"] == 2 * first.weight.nbytes
        assert "tied with others" in offloader.describe()
        loss_of(model).backward()


def test_adapters_that_are_frozen_by_now_stay_since_they_may_be_switched_on() -> None:
    """DPO has a second, frozen adapter for its reference, and switches between the two."""
    model, plain = llama(), llama()
    for each in (model, plain):
        anything: Any = each
        torch.manual_seed(2)
        anything.add_adapter("ref", LoraConfig(target_modules="all-linear", r=2))
        anything.set_adapter("default")
    with streamed(model) as offloader:
        assert offloader.weights is not None
        assert offloader.weights.left_bytes["of adapters"] > 0
        for name in ("default", "ref", "default"):
            for each in (model, plain):
                anything = each
                anything.set_adapter(name)
                loss_of(each).backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


def test_what_modules_to_save_takes_the_place_of_stays() -> None:
    """PEFT thaws it where adapters are switched off."""
    options = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
    model, plain = llama(adapters=options), llama(adapters=options)
    with streamed(model):
        losses = []
        for each in (model, plain):
            loss_of(each).backward()
            anything: Any = each
            with anything.disable_adapter():
                losses.append(loss_of(each))
            loss_of(each).backward()
        assert torch.equal(*losses)
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


class Packed(torch.Tensor):
    """A weight of a class of its own, as libraries that quantise have."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=False
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        plain = torch.utils._pytree.tree_map_only(cls, lambda each: each.inner, args)
        return function(*plain, **(kwargs or {}))


def pack_(model: nn.Module, suffixes: tuple[str, ...]) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith(suffixes):
            linear: Any = module
            inner = linear.weight.detach()
            linear.weight = nn.Parameter(Packed(inner), requires_grad=False)
    return model


def test_weights_of_an_unknown_class_stay_and_are_named() -> None:
    suffixes = ("q_proj.base_layer", "down_proj.base_layer")
    model, plain = pack_(llama(), suffixes), pack_(llama(), suffixes)
    with streamed(model) as offloader:
        reason = f"of class Packed ({__name__.partition('.')[0]})"
        assert offloader.weights is not None
        assert offloader.weights.left_bytes[reason] > 0
        assert reason in offloader.describe()
        loss_of(model).backward()
        loss_of(plain).backward()
        assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")
        assert ring_of(offloader).num_uploads > 0


def test_a_base_of_an_unknown_class_alone_is_refused_by_name() -> None:
    model = pack_(llama(), ("proj.base_layer",))
    with pytest.raises(ConfigError, match=r"GiB of class Packed \("):
        streamed(model)
