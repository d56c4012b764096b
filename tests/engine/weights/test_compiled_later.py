"""torch.compile of what is attached already, with streamed weights: refused at the next forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.errors import ConflictError
from tests.engine.weights.test_streaming import llama, loss_of, streamed
from tests.helpers import gradients_of

BACKEND: Any = "eager"


def layers_of(model: nn.Module) -> Any:
    anything: Any = model
    return anything.base_model.model.model.layers


def compile_layers(model: nn.Module) -> nn.Module:
    for layer in layers_of(model):
        layer.compile(backend=BACKEND)
    return model


def compile_a_part(model: nn.Module) -> nn.Module:
    layers_of(model)[1].mlp.down_proj.compile(backend=BACKEND)
    return model


def wrap_a_part(model: nn.Module) -> nn.Module:
    layers_of(model)[1].mlp = torch.compile(layers_of(model)[1].mlp, backend=BACKEND)
    return model


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def wrap(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=BACKEND)  # type: ignore[assignment]
    return compiled


WAYS = {
    "layers": compile_layers,
    "a part": compile_a_part,
    "a wrapped part": wrap_a_part,
    "in place": compile_in_place,
    "wrapped": wrap,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("way", [*WAYS])
def test_a_model_compiled_after_attach_is_refused_at_its_next_forward(
    way: str, trains: bool
) -> None:
    model, plain = llama(), llama()
    offloader = streamed(model)
    loss_of(model).backward()
    loss_of(plain).backward()
    model.train(trains)
    compiled = WAYS[way](model)
    with torch.set_grad_enabled(trains), pytest.raises(ConflictError, match="was compiled after"):
        loss_of(compiled)
    offloader.detach()
    torch._dynamo.reset()
    found = gradients_of(model)
    names = {name.replace("._orig_mod", ""): value for name, value in found.items()}
    assert all(torch.equal(names[n], g) for n, g in gradients_of(plain).items())
    assert all(type(module._parameters) is dict for module in model.modules())
