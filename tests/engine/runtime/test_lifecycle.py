"""Hooks go on and off, copies of a model are plain, and a layer's backward is noticed in time."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import attach
from hf_pyao.engine.runtime.model_hooks import CheckpointFunction
from hf_pyao.engine.stores import HostPool
from hf_pyao.engine.torch_hooks.layer_inputs import shared_inputs, tensors_in
from hf_pyao.errors import ConflictError
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    FunctionLayer,
    RecordingTransport,
    Stack,
    assert_same_tensors,
    enable_checkpointing,
    gradients_of,
    linear_relu,
    tiny_batch,
    tiny_model,
)

BATCH = tiny_batch(0)


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**BATCH, use_cache=False).loss.backward()
    return gradients_of(model)


def hooks_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return every hook and hook flag of every module, by module and kind."""
    kinds = [name for name in vars(nn.Module()) if "hook" in name]
    return {
        f"{path}.{kind}": list(vars(module)[kind])
        for path, module in model.named_modules()
        for kind in kinds
        if vars(module)[kind]
    }


# ---- attaching and detaching
# ------------------------------------------------------------------------


def test_detaching_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    model.model.layers[1].register_forward_hook(lambda *_: None)
    before, attributes = hooks_of(model), {p: set(vars(m)) for p, m in model.named_modules()}
    offloader = attach(model, EVERYTHING)
    assert len(hooks_of(model)) > len(before)
    step(model)
    offloader.detach()
    assert hooks_of(model) == before
    assert {p: set(vars(m)) for p, m in model.named_modules()} == attributes
    assert not offloader.is_attached
    offloader.detach()  # twice is fine
    packs = offloader.engine.figures.last.num_packs
    step(model)
    assert offloader.engine.figures.last.num_packs == packs


def test_attaching_again() -> None:
    model = tiny_model("opt")
    with attach(model, EVERYTHING) as offloader:
        hooks = hooks_of(model)
        assert attach(model, replace(EVERYTHING)) is offloader
        assert attach(model.model, EVERYTHING) is offloader, "through a part that holds the layers"
        assert hooks_of(model) == hooks
        with pytest.raises(ConflictError, match=r"another configuration.*detach\(\)"):
            attach(model, EVERY_LAYER)
        assert hooks_of(model) == hooks
    with attach(model, EVERY_LAYER) as again:
        assert again is not offloader
        step(model)
        assert again.metrics()["offloaded_bytes"] > 0
    assert hooks_of(model) == {}


def test_the_engine_never_marks_the_users_tensors() -> None:
    # torch.save warns about hooks on a tensor, and warnings are errors here.
    model = tiny_model("llama")
    with attach(model, EVERYTHING):
        outputs = model(**BATCH, use_cache=False, output_hidden_states=True)
        for state in outputs.hidden_states:
            assert not state._backward_hooks
            torch.save(state, io.BytesIO())
        outputs.loss.backward()


# ---- copies
# -----------------------------------------------------------------------------------------


def as_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def as_pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def as_saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


def checkpointed(model: Any) -> nn.Module:
    enable_checkpointing(model, use_reentrant=False)
    return as_deepcopy(model)  # pickle refuses a hook that transformers adds to the embedding


@pytest.mark.parametrize("duplicate", [as_deepcopy, as_pickled, as_saved, checkpointed])
def test_a_copy_is_a_plain_model(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny_model("llama")
    plain = duplicate(model)
    expected = step(model)
    with attach(model, EVERYTHING) as offloader:
        step(model)
        calls = offloader.engine.num_layer_calls
        copied = duplicate(model)
        assert_same_tensors(step(copied), expected, "copy")
        # Inert hooks take themselves off when first called; pickled ones are inert, and stay.
        if duplicate not in (as_pickled, as_saved):
            assert hooks_of(copied).keys() == hooks_of(plain).keys()
        assert offloader.engine.num_layer_calls == calls, "the copy ran in the original's engine"
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert_same_tensors(step(model), expected, "original")
        with attach(copied, EVERY_LAYER) as other:
            assert other is not offloader
            step(copied)
            assert other.metrics()["offloaded_bytes"] > 0
        assert hooks_of(copied).keys() == hooks_of(plain).keys()


LOADS_WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hf_pyao", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch

folder = sys.argv[1]
batch = torch.load(f"{folder}/batch.pt")
for name in sys.argv[2:]:
    model = torch.load(f"{folder}/{name}.pt", weights_only=False)
    model(**batch, use_cache=False).loss.backward()
    torch.save({n: p.grad for n, p in model.named_parameters()}, f"{folder}/{name} gradients.pt")
assert not any(name.startswith("hf_pyao") for name in sys.modules)
"""


@pytest.mark.thorough
def test_an_attached_model_loads_where_hf_pyao_is_missing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = step(model)
    model.zero_grad()
    settings: dict[str, dict[str, Any]] = {"plain": {}, "head loss": {"head_loss": "chunked"}}
    for name, changes in settings.items():
        with attach(model, replace(EVERYTHING, **changes)):
            model(**BATCH, use_cache=False)
            torch.save(model, tmp_path / f"{name}.pt")
    torch.save(BATCH, tmp_path / "batch.pt")
    subprocess.run([sys.executable, "-c", LOADS_WITHOUT, tmp_path, *settings], check=True)
    for name in settings:
        found = torch.load(tmp_path / f"{name} gradients.pt")
        assert_same_tensors(found, expected, f"{name}, where hf_pyao is missing")


def test_a_checkpointing_function_is_pickled_as_what_it_wraps() -> None:
    model: Any = tiny_model("llama")
    enable_checkpointing(model, use_reentrant=False)
    with attach(model, EVERYTHING) as offloader:
        wrapper = CheckpointFunction(offloader._lifecycle, torch.utils.checkpoint.checkpoint)  # type: ignore[arg-type]
        pickled = pickle.dumps(wrapper)
        assert b"hf_pyao" not in pickled
        assert pickle.loads(pickled) is torch.utils.checkpoint.checkpoint


# ---- two models, two threads
# ------------------------------------------------------------------------


def test_two_models_share_a_host_pool() -> None:
    student, teacher = tiny_model("llama"), tiny_model("opt")
    expected = step(copy.deepcopy(student)), step(copy.deepcopy(teacher))
    pool = HostPool(64 * 2**20, pin=False)
    with (
        attach(student, EVERYTHING, host_pool=pool) as first,
        attach(teacher, EVERYTHING, host_pool=pool) as second,
    ):
        assert first.host_pool is second.host_pool is pool
        student.zero_grad()
        teacher.zero_grad()
        loss = student(**BATCH, use_cache=False).loss
        other = teacher(**BATCH, use_cache=False).loss
        both = pool.settle()
        loss.backward()
        assert 0 < pool.settle() < both
        other.backward()
        assert pool.settle() == 0
        assert_same_tensors(gradients_of(student), expected[0], "student")
        assert_same_tensors(gradients_of(teacher), expected[1], "teacher")
        (student(**BATCH).loss + teacher(**BATCH).loss).backward()
        assert pool.settle() == 0
        assert pool.num_slab_allocations == 1


def test_a_model_inside_a_layer_of_another() -> None:
    inner = Stack(linear_relu, linear_relu)

    def calls_inner(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer.inner(x @ layer.weight) @ layer.weight)

    outer = Stack(calls_inner, calls_inner)
    for layer in outer.layers:
        object.__setattr__(layer, "inner", inner)
    x = torch.randn(4, 4)

    def gradients() -> dict[str, torch.Tensor]:
        outer.zero_grad()
        inner.zero_grad()
        outer(x).sum().backward()
        return gradients_of(outer) | {f"inner {n}": g for n, g in gradients_of(inner).items()}

    expected = gradients()
    with attach(outer, EVERY_LAYER) as of_outer, attach(inner, EVERY_LAYER) as of_inner:
        assert_same_tensors(gradients(), expected, "nested")
        for offloader in (of_outer, of_inner):
            assert offloader.metrics()["offloaded_bytes"] > 0
            assert offloader.host_pool.settle() == 0


def test_forward_in_one_thread_and_backward_in_another() -> None:
    model = tiny_model("llama")
    expected = step(copy.deepcopy(model))
    losses: list[torch.Tensor] = []
    with attach(model, EVERYTHING) as offloader:
        thread = threading.Thread(
            target=lambda: losses.append(model(**BATCH, use_cache=False).loss)
        )
        thread.start()
        thread.join()
        losses.pop().backward()
        assert_same_tensors(gradients_of(model), expected, "")
        assert offloader.metrics()["reloaded_bytes"] > 0
        assert offloader.host_pool.settle() == 0


# ---- where a layer's backward starts
# -----------------------------------------------------------------


class Inner(nn.Module):
    """Layers whose inputs and outputs have the shape that the test asks for."""

    def __init__(self, layers: nn.ModuleList, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.call = layers, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def in_place_on_output(layer: Any, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    output += 1
    return output  # type: ignore[no-any-return]


SHAPES: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "tensor": (lambda layer, x: torch.relu(x @ layer.weight), lambda layer, x: layer(x)),
    "tuple, first used": (
        lambda layer, x: (torch.relu(x @ layer.weight), torch.sigmoid(x)),
        lambda layer, x: layer(x)[0],
    ),
    "tuple, second used": (
        lambda layer, x: (torch.sigmoid(x), torch.relu(x @ layer.weight)),
        lambda layer, x: layer(x)[1],
    ),
    "dict": (
        lambda layer, x: {"out": torch.relu(x @ layer.weight), "n": 1},
        lambda layer, x: layer(x)["out"],
    ),
    "nested": (
        lambda layer, x: ([{"out": (torch.relu(x @ layer.weight),)}], None),
        lambda layer, x: layer(x)[0][0]["out"][0],
    ),
    "keyword input": (
        lambda layer, x: torch.relu(x @ layer.weight),
        lambda layer, x: layer(x=x),
    ),
    "in place on the output": (
        lambda layer, x: (x @ layer.weight).sin(),
        in_place_on_output,
    ),
    "view as output": (
        lambda layer, x: torch.relu(x @ layer.weight).t(),
        lambda layer, x: layer(x).t(),
    ),
    "its own input too": (
        lambda layer, x: (x, torch.relu(x @ layer.weight)),
        lambda layer, x: sum(layer(x)),  # type: ignore[arg-type, return-value]
    ),
}


@pytest.mark.parametrize("input_requires_grad", [True, False], ids=["", "input without gradient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_of_a_layer_starts_with_its_first_gradient(
    shape: str, input_requires_grad: bool
) -> None:
    function, call = SHAPES[shape]
    layers = Stack(function, function, function).layers
    model = Inner(layers, call)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 4, requires_grad=input_requires_grad)
    plain(x).sum().backward()
    expected, x.grad = x.grad, None

    order: list[str] = []
    with attach(model, EVERY_LAYER) as offloader:
        engine = offloader.engine
        unpack, reload = engine.unpack, engine.mover.reload

        def tell_unpack(handle: Any) -> torch.Tensor:
            order.append(f"unpack {handle.call.fqn}")
            return unpack(handle)

        def tell_reload(moved: Any) -> None:
            order.append(f"reload {moved.label.layer}")
            reload(moved)

        offloader._lifecycle.engine.unpack = tell_unpack  # type: ignore[union-attr, method-assign]
        engine.mover.reload = tell_reload  # type: ignore[method-assign]
        model(x).sum().backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), shape)
    if expected is not None:
        assert torch.equal(x.grad, expected)
    for index in (2, 1, 0):
        events = [event for event in order if event.endswith(f"layers.{index}")]
        assert events[0].startswith("reload"), (
            f"nothing was brought back before it was needed: {order}"
        )


def test_reloads_go_backwards_through_the_calls_one_layer_ahead() -> None:
    model = Stack(linear_relu, linear_relu, linear_relu, linear_relu)
    transport = RecordingTransport()
    labels: list[str] = []
    reload = transport.reload

    def tell(*args: Any, label: object = "", **kwargs: Any) -> Any:
        labels.append(str(label).split(" ")[0])
        return reload(*args, label=label, **kwargs)

    transport.reload = tell  # type: ignore[method-assign, assignment]
    seen: dict[int, list[str]] = {}
    for index, layer in enumerate(model.layers):
        layer.register_full_backward_hook(
            lambda *_, index=index: seen.update({index: list(dict.fromkeys(labels))})
        )
    with attach(model, EVERY_LAYER, transport=transport):
        model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    # By the end of a layer's backward, the layer below has been brought back, and no more.
    assert seen[3] == ["layers.3", "layers.2"]
    assert seen[2] == ["layers.3", "layers.2", "layers.1"]
    assert seen[1] == ["layers.3", "layers.2", "layers.1", "layers.0"]
    assert len(labels) == len(transport.sources)


# ---- nothing happens
# ---------------------------------------------------------------------------------


def freeze_all_but_head(model: Any) -> None:
    model.model.requires_grad_(False)


def to_eval(model: Any) -> None:
    model.eval()


@pytest.mark.parametrize(
    ("prepare", "seen"),
    [(freeze_all_but_head, "autograd saved nothing"), (to_eval, "is in eval mode")],
)
def test_steps_in_which_nothing_is_packed_are_warned_about_once(
    prepare: Callable[[Any], None], seen: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    prepare(model)
    with attach(model, EVERYTHING) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        for _ in range(3):
            step(model)
            offloader.warn_if_idle()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert seen in warnings[0]
    assert "model.train()" in warnings[0]


def test_a_loop_of_ones_own_is_warned_too(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    freeze_all_but_head(model)
    with attach(model, EVERYTHING), caplog.at_level(logging.WARNING, "hf_pyao"):
        step(model)
        assert not caplog.records
        step(model)
        step(model)
    assert len(caplog.records) == 1


def test_where_saved_tensor_hooks_are_forbidden_nothing_happens() -> None:
    model, x = Stack(linear_relu, linear_relu), torch.randn(4, 4)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    expected = torch.func.grad(loss_of)(named)
    with attach(model, EVERY_LAYER) as offloader:
        assert_same_tensors(torch.func.grad(loss_of)(named), expected, "torch.func.grad")
        with torch.autograd.graph.disable_saved_tensors_hooks("none of them here"):
            model(x).sum().backward()
        assert_same_tensors(gradients_of(model), expected, "forbidden")
        assert offloader.engine.num_packs == 0
        model(x).sum().backward()
        assert offloader.engine.num_packs > 0


def test_hooks_that_a_layer_left_on_stay_on_and_ours_go() -> None:
    # As a checkpoint does whose forward failed, until its traceback is gone (torch 2.9).
    def theirs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def leaves_hooks_on(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        torch._C._autograd._push_saved_tensors_default_hooks(theirs, theirs)
        raise ValueError("boom")

    model = Stack(linear_relu, leaves_hooks_on)
    with attach(model, EVERY_LAYER) as offloader:
        with pytest.raises(ValueError, match="boom"):
            model(torch.randn(4, 4))
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert top is not None
        assert top[0] is theirs
        torch._C._autograd._pop_saved_tensors_default_hooks()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model.layers[1].function = linear_relu
        model(torch.randn(4, 4)).sum().backward()
        assert offloader.metrics()["offloaded_bytes"] > 0


def test_an_interrupt_inside_the_hooks_of_others_leaves_none_of_them_on() -> None:
    def theirs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def interrupted(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = Stack(linear_relu, interrupted)
    with attach(model, EVERY_LAYER):
        with pytest.raises(KeyboardInterrupt):
            with torch.autograd.graph.saved_tensors_hooks(theirs, theirs):
                model(torch.randn(4, 4))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_layers_that_call_one_another_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    def calls_the_next(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return linear_relu(layer, model.layers[1](x))

    model = Stack(calls_the_next, linear_relu)
    with attach(model, EVERY_LAYER), caplog.at_level(logging.WARNING, "hf_pyao"):
        for _ in range(2):
            model.layers[0](torch.randn(4, 4)).sum().backward()
    messages = [r.getMessage() for r in caplog.records if "had not ended" in r.getMessage()]
    assert len(messages) == 1
    assert "'layers.1' was entered while layer 'layers.0'" in messages[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_tensors_stay_as_they_are() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([x[:1] @ layer.weight, x[1:] @ layer.weight])
        return torch.nested.to_padded_tensor(nested.sin(), 0.0).flatten(0, 1)[:4]

    def with_sparse_input(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(4).to_sparse(), function(layer, x))

    model = Stack(with_sparse_input, with_sparse_input)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 4)
    plain(x).sum().backward()
    with attach(model, EVERY_LAYER) as offloader:
        model(x).sum().backward()
        assert offloader.host_pool.settle() == 0
    assert_same_tensors(gradients_of(model), gradients_of(plain), "sparse and nested")


# ---- helpers
# ----------------------------------------------------------------------------------------


def test_what_layers_share_is_told_from_their_hidden_states() -> None:
    hidden, mask, cos = torch.ones(2, 2), torch.ones(2), torch.ones(3)
    view = hidden[0]
    assert shared_inputs((hidden,), {}) == []
    found = shared_inputs((hidden, mask), {"position": (cos, None), "again": view})
    assert {id(tensor) for tensor in found} == {id(mask), id(cos)}
    for name in ("hidden_states", "x"):
        found = shared_inputs((), {name: hidden, "attention_mask": mask, "cos": cos})
        assert {id(tensor) for tensor in found} == {id(mask), id(cos)}
    assert shared_inputs((), {"mask": mask, "hidden_states": hidden}) == [mask]
    assert shared_inputs((), {"mask": mask, "hidden_states": (hidden, cos)}) == [mask]
    assert list(tensors_in({"a": [hidden, (mask, 3)], "b": None})) == [hidden, mask]
