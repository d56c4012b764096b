"""Weights of tensor classes (torchao's, and one of this file) are streamed by their plain parts.

Reference: the same model, built again from the same seed, with its weights on the device.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.model.weights.packed import FlattenedWeight
from tests.helpers import ACCUMULATING, assert_same_trajectory, enable_checkpointing, train
from tests.helpers.adapters import tiny_lora

STEPS = (*ACCUMULATING, *ACCUMULATING[:2])


class Scaled(torch.Tensor):
    """int8 values and a scale for each row, which products dequantise."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_of_rows, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_of_rows", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values_of_rows"], inner["scale"])

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.linear:
            x, weight, *bias = args
            plain = weight.values_of_rows.to(weight.scale.dtype) * weight.scale[:, None]
            return nn.functional.linear(x, plain.to(x.dtype), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].values_of_rows), function(args[0].scale))
        raise NotImplementedError(function)


def scaled_(model: nn.Module, suffixes: tuple[str, ...] = ("base_layer",)) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith(suffixes) and isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1) / 127
            values = (weight / scale[:, None]).round().to(torch.int8)
            module.weight = nn.Parameter(Scaled(values, scale), requires_grad=False)
    return model


def torchao_(kind: str) -> Callable[[nn.Module], nn.Module]:
    def quantised(model: nn.Module) -> nn.Module:
        from torchao import quantization
        from torchao.quantization.granularity import PerGroup

        configs = {
            "int8": lambda: quantization.Int8WeightOnlyConfig(),
            "int4": lambda: quantization.IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=PerGroup(16)
            ),
            "float8": lambda: quantization.Float8WeightOnlyConfig(),
        }
        quantization.quantize_(model, configs[kind](), lambda _, name: name.endswith("base_layer"))
        return model

    return quantised


needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
KINDS = [
    pytest.param(scaled_, id="a class of this file"),
    *(
        pytest.param(torchao_(kind), id=f"torchao {kind}", marks=needs_torchao)
        for kind in ("int8", "int4", "float8")
    ),
]


def model_of(quantise: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return quantise(tiny_lora("llama", dtype=dtype, dropout=0.1, num_hidden_layers=4))  # type: ignore[no-any-return]


def check(model: nn.Module, plain: nn.Module, autocast: Any = None, **settings: Any) -> None:
    expected = train(plain, STEPS, autocast=autocast)
    settings = {"stream_weights": 0, "policy": "all", "min_bytes": 0, **settings}
    with attach(model, PyAOConfig(host_memory_gib=0.1, **settings)) as offloader:
        assert offloader.weights is not None
        assert not any("class" in reason for reason in offloader.weights.left_bytes)
        found = train(model, STEPS, autocast=autocast)
        ring = offloader.weights.ring
        assert ring is not None
        assert ring.num_uploads > 0
        assert ring.counts.num_left == 0
    for trajectory in (found, expected):  # compared by their parts, which have ``equal``
        trajectory.parameters = in_parts(trajectory.parameters)
    assert_same_trajectory(found, expected, "tensor class")


def in_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            found.update(
                {
                    f"{name}.{part}": each
                    for part, each in FlattenedWeight(nn.Module(), tensor).tensors
                }
            )
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("quantise", KINDS)
def test_same_bits(quantise: Any) -> None:
    check(model_of(quantise), model_of(quantise))


@pytest.mark.parametrize(
    "settings",
    [{"checkpoint_every": 2}, {"policy": "off"}, {"recompute_modules": ("pointwise",)}],
    ids=["segments", "nothing offloaded", "recomputed"],
)
@pytest.mark.parametrize("quantise", KINDS)
def test_same_bits_under(quantise: Any, settings: Any) -> None:
    check(model_of(quantise), model_of(quantise), **settings)


@pytest.mark.parametrize("quantise", KINDS)
def test_same_bits_under_autocast_and_checkpointing(quantise: Any) -> None:
    models = [model_of(quantise, torch.float32) for _ in range(2)]
    for model in models:
        inner: Any = model
        inner.enable_input_require_grads()
        enable_checkpointing(inner.base_model.model, use_reentrant=False)
    check(*models, torch.bfloat16)


@pytest.mark.parametrize("quantise", KINDS)
def test_the_parameter_is_the_same_object_and_a_change_of_a_part_is_followed(quantise: Any) -> None:
    model, plain = model_of(quantise), model_of(quantise)
    parameters = dict(model.named_parameters())
    name = next(n for n in parameters if n.endswith("1.mlp.up_proj.base_layer.weight"))
    batch = STEPS[0][0]
    with attach(model, PyAOConfig(stream_weights=0, policy="off")):
        for _ in range(2):
            losses = []
            for each in (model, plain):
                torch.manual_seed(0)
                loss = each(**batch).loss
                loss.backward()
                losses.append(loss.detach())
            assert torch.equal(*losses)
            for each in (model, plain):
                weight = each.get_parameter(name)
                part = getattr(weight, weight.__tensor_flatten__()[0][1])
                part.mul_(2)
        assert all(parameters[n] is p for n, p in model.named_parameters())
    weights = [FlattenedWeight(nn.Module(), each.get_parameter(name)) for each in (model, plain)]
    for (_, found), (_, expected) in zip(weights[0].tensors, weights[1].tensors, strict=True):
        assert torch.equal(found, expected)


def test_a_shared_parameter_stays_and_a_thawed_one_is_refused() -> None:
    model: Any = model_of(scaled_)
    layers = model.base_model.model.model.layers
    shared = layers[1].mlp.up_proj.base_layer
    layers[2].mlp.up_proj.base_layer.weight = shared.weight
    with attach(model, PyAOConfig(stream_weights=0, policy="off")) as offloader:
        assert offloader.weights is not None
        assert offloader.weights.left_bytes["tied with others"] > 0
        model(**STEPS[0][0]).loss.backward()
        layers[0].mlp.up_proj.base_layer.weight.requires_grad_()
        with pytest.raises(ConflictError, match=r"up_proj\.base_layer\.weight' requires gradients"):
            model(**STEPS[0][0])


def test_mutant_that_makes_a_weight_of_another_part(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FlattenedWeight.of

    def exchanged(weight: FlattenedWeight, tensors: Any) -> torch.Tensor:
        values, scale = tensors
        return own(weight, (values, scale.flip(0)))

    monkeypatch.setattr(FlattenedWeight, "of", exchanged)
    with pytest.raises(AssertionError, match="loss"):
        check(model_of(scaled_), model_of(scaled_))


def test_what_has_no_parts_is_refused_with_the_name_of_its_class() -> None:
    class Opaque(Scaled):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

    model = model_of(scaled_)
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, Scaled):
            weight: Any = module.weight
            opaque = Opaque(weight.values_of_rows, weight.scale)
            module.weight = nn.Parameter(opaque, requires_grad=False)
    with pytest.raises(ConfigError, match=r"GiB of class Opaque \("):
        attach(model, PyAOConfig(stream_weights=0, policy="off"))


def test_a_state_dict_has_the_parameters() -> None:
    model = model_of(scaled_)
    before = {n: p for n, p in model.state_dict().items() if isinstance(p, Scaled)}
    with attach(model, PyAOConfig(stream_weights=0, policy="off")):
        model(**STEPS[0][0]).loss.backward()
        during = model.state_dict()
        torch.save({n: during[n].scale for n in before}, io.BytesIO())
    for name, weight in before.items():
        found: Any = during[name]
        assert torch.equal(found.values_of_rows, weight.values_of_rows)
        assert torch.equal(found.scale, weight.scale)
