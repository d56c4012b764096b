"""Steps that fail, stop half-way or are thrown away leave nothing behind, and training goes on."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import Offloader, PyAOConfig, attach
from hf_pyao.engine.runtime.saved_tensor import KeptTensor, SavedStorage
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)

CONFIGS = {
    "layer": EVERYTHING,
    "bytes": replace(EVERY_LAYER, window=4096),
    "far ahead": replace(EVERY_LAYER, window=2**20),
}
BATCH = tiny_batch(0, padding=2)


class Bomb:
    """Goes off inside a layer, once it is armed: in forward, or in the layer's backward."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.where = ""

    def check(self, where: str) -> None:
        if where == self.where:
            self.where = ""
            raise self.kind("boom")


class BombNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bomb: Bomb, where: str) -> torch.Tensor:
        ctx.bomb, ctx.where = bomb, where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.bomb.check(f"backward {ctx.where}")
        return gradient, None, None


def plant(model: nn.Module, bomb: Bomb) -> nn.Module:
    """Put *bomb* behind the attention of every layer of a Llama."""
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]

        def wire(module: nn.Module, args: Any, output: Any, name: str = str(index)) -> Any:
            bomb.check(f"forward {name}")
            first = BombNode.apply(output[0], bomb, name)
            return (first, *output[1:])

        layer.self_attn.register_forward_hook(wire)
    return model


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(**BATCH, use_cache=False).loss.backward()
    return gradients_of(model)


def live(kind: type) -> list[Any]:
    return [found for found in gc.get_objects() if type(found) is kind]


def check_nothing_left(offloader: Offloader) -> None:
    """Check without collecting garbage: references alone must have let everything go."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert live(SavedStorage) == []
    assert live(KeptTensor) == []
    assert offloader.host_pool.settle() == 0
    assert offloader.link.waiting_bytes == 0
    assert offloader.engine.mover.ahead_bytes == 0


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request: pytest.FixtureRequest) -> PyAOConfig:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _no_garbage(small_heap: None) -> None:
    gc.collect()


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["forward 1", "backward 2", "backward 0"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
@pytest.mark.sampled(every=1000)
def test_an_exception_in_a_layer(where: str, kind: type[BaseException], config: PyAOConfig) -> None:
    bomb = Bomb(kind)
    model = plant(tiny_model("llama", dropout=0.1), bomb)
    expected = step(model)
    with attach(model, config) as offloader:
        assert_same_tensors(step(model), expected, "before")
        for _ in range(2):
            bomb.where = where
            # Kept to the end of the block: the caught error refers to the frames, they to tensors.
            with pytest.raises(kind, match="boom"):
                step(model)
        assert_same_tensors(step(model), expected, "after")
        check_nothing_left(offloader)


@pytest.mark.parametrize("is_first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_an_exception_in_someone_elses_hook(kind: type[BaseException], is_first: bool) -> None:
    model = tiny_model("llama")
    expected = step(model)
    with attach(model, EVERYTHING) as offloader:
        for index in (0, 1, 2):
            layer = model.model.layers[index]
            for register in (layer.register_forward_pre_hook, layer.register_forward_hook):

                def fail(*_: Any) -> None:
                    raise kind("boom")

                handle = register(fail, prepend=is_first)
                with pytest.raises(kind, match="boom"):
                    step(model)
                handle.remove()
                assert_same_tensors(step(model), expected, f"after a hook of layer {index}")
        check_nothing_left(offloader)


def test_hooks_that_an_interrupt_left_on_do_no_harm() -> None:
    # KeyboardInterrupt passes module hooks by. Until the next forward, ours may stay switched on.
    bomb = Bomb(KeyboardInterrupt)
    model, other = plant(tiny_model("llama"), bomb), tiny_model("opt")
    expected, of_other = step(copy.deepcopy(model)), step(copy.deepcopy(other))
    with attach(model, EVERYTHING) as offloader:
        bomb.where = "forward 1"
        with pytest.raises(KeyboardInterrupt):
            step(model)
        assert_same_tensors(step(other), of_other, "another model, not attached")
        model.eval()
        packs = offloader.engine.num_packs
        model(**BATCH)
        assert offloader.engine.num_packs == packs, "the next forward starts clean"
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model.train()
        assert_same_tensors(step(model), expected, "the interrupted one")
        gc.collect()
        check_nothing_left(offloader)


def test_forwards_without_backward(config: PyAOConfig) -> None:
    model = tiny_model("llama", dropout=0.1)
    expected = step(copy.deepcopy(model))
    with attach(model, config) as offloader:
        step(model)
        for _ in range(3):
            model(**BATCH, use_cache=False)
            check_nothing_left(offloader)
        kept = model(**BATCH, use_cache=False).loss
        assert live(SavedStorage)
        assert_same_tensors(step(model), expected, "with another graph alive")
        kept = None  # noqa: F841
        check_nothing_left(offloader)


def test_a_backward_of_part_of_the_graph(config: PyAOConfig) -> None:
    model = tiny_model("llama")
    expected = step(copy.deepcopy(model))
    with attach(model, config) as offloader:
        for _ in range(2):
            outputs = model(**BATCH, use_cache=False, output_hidden_states=True)
            outputs.hidden_states[1].sum().backward()
            assert live(SavedStorage), "the upper layers' are still there"
            del outputs
            check_nothing_left(offloader)
        assert_same_tensors(step(model), expected, "after")


def test_a_failed_backward_holds_no_reloaded_memory_while_its_graph_lives() -> None:
    bomb = Bomb(ValueError)
    model = plant(tiny_model("llama"), bomb)
    expected = step(copy.deepcopy(model))
    with attach(model, replace(EVERY_LAYER, window=2**20)) as offloader:
        loss = model(**BATCH, use_cache=False).loss
        bomb.where = "backward 2"
        with pytest.raises(ValueError, match="boom"):
            loss.backward(retain_graph=True)
        moved = live(SavedStorage)
        reloaded = [m for m in moved if m.buffer is not None or m.decoded is not None]
        assert reloaded, "prefetched before it failed"
        model(**BATCH, use_cache=False)
        assert all(m.buffer is None and m.decoded is None for m in reloaded)
        assert offloader.engine.mover.ahead_bytes == 0
        model.zero_grad()
        loss.backward()  # the graph is still whole
        assert_same_tensors(gradients_of(model), expected, "the second try")
        del loss, moved, reloaded
        check_nothing_left(offloader)


def test_the_host_runs_out_of_memory_for_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = step(copy.deepcopy(model))
    with attach(model, EVERYTHING) as offloader:
        reload = offloader.transport.reload
        calls = []

        def fails_once(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("no memory")
            return reload(*args, **kwargs)

        monkeypatch.setattr(offloader.transport, "reload", fails_once)
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        assert_same_tensors(step(model), expected, "after")
        calls.clear()
        check_nothing_left(offloader)


# ---- who goes first
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("goes", ["model", "offloader", "both", "detached"])
def test_backward_after_the_model_or_the_offloader_is_gone(goes: str, config: PyAOConfig) -> None:
    model = tiny_model("llama")
    embedding = model.model.embed_tokens.weight
    step(model)
    expected = embedding.grad.clone()
    embedding.grad = None
    offloader: Offloader | None = attach(model, config)
    loss = model(**BATCH, use_cache=False).loss
    pool = offloader.host_pool
    if goes == "detached":
        offloader.detach()
    if goes in ("model", "both"):
        model = None  # type: ignore[assignment]
    if goes in ("offloader", "both"):
        offloader = None
    gc.collect()
    loss.backward()
    assert torch.equal(embedding.grad, expected)
    del loss
    assert live(SavedStorage) == []
    assert pool.settle() == 0
