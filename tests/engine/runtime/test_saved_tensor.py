"""The life of a saved storage: which way it may go, and that it gives back what it held."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.runtime.saved_tensor import SavedStorage, modified_error
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.transfer.moved_bytes import MovedBytes, Phase
from tests.helpers import EVERY_LAYER, Stack, linear_relu

LEGAL = {
    (Phase.OFFLOADING, Phase.AWAY),
    (Phase.OFFLOADING, Phase.RELEASED),
    (Phase.AWAY, Phase.RELOADING),
    (Phase.AWAY, Phase.RELEASED),
    (Phase.RELOADING, Phase.HERE),
    (Phase.RELOADING, Phase.AWAY),
    (Phase.RELOADING, Phase.RELEASED),
    (Phase.HERE, Phase.AWAY),
    (Phase.HERE, Phase.RELEASED),
}


def records_of(offloader: object) -> list[SavedStorage]:
    return list(offloader.engine._tape.live_records())  # type: ignore[attr-defined]


def test_only_legal_transitions_pass() -> None:
    model = Stack(linear_relu)
    with attach(model, EVERY_LAYER) as offloader:
        loss = model(torch.randn(4, 4)).sum()
        moved = records_of(offloader)[0].moved
        for before, after in itertools.product(Phase, Phase):
            moved.phase = before
            if (before, after) in LEGAL:
                moved.to(after)
                assert moved.phase is after
            else:
                with pytest.raises(AssertionError, match=f"{before.name}.*{after.name}"):
                    moved.to(after)
                assert moved.phase is before
        moved.phase = Phase.AWAY
        del moved, loss
        assert offloader.host_pool.settle() == 0


def test_a_step_takes_every_storage_through_its_life() -> None:
    for window in ("layer", 0, 10**6):
        seen: dict[int, list[Phase]] = {}

        def watch(moved: MovedBytes, name: str, value: object) -> None:
            if name == "phase" and value is not Phase.RELEASED:
                seen.setdefault(id(moved), [moved.phase]).append(Phase(value))
            object.__setattr__(moved, name, value)

        model = Stack(linear_relu, linear_relu)
        with (
            pytest.MonkeyPatch.context() as patch,
            attach(model, replace(EVERY_LAYER, window=window)),
        ):
            patch.setattr(MovedBytes, "__setattr__", watch)
            model(torch.randn(4, 4)).sum().backward()
        whole = [Phase.OFFLOADING, Phase.AWAY, Phase.RELOADING, Phase.HERE]
        assert list(seen.values()) == [whole] * 3, window


def test_the_graph_owns_the_buffers() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, EVERY_LAYER) as offloader:
        loss = model(torch.randn(4, 4)).sum()
        records = [weakref.ref(record) for record in records_of(offloader)]
        in_use = offloader.host_pool.settle()
        gc.disable()  # references alone must do
        try:
            assert in_use > 0
            assert all(record() is not None for record in records)
            del loss
            assert all(record() is None for record in records)
            assert offloader.host_pool.settle() == 0
        finally:
            gc.enable()


def test_each_storage_goes_as_soon_as_its_node_has_run() -> None:
    in_use: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            in_use.append(offloader.host_pool.settle())
            return gradient

    model = Stack(*[lambda layer, x: linear_relu(layer, Look.apply(x))] * 3)
    with attach(model, EVERY_LAYER) as offloader:
        model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert in_use == sorted(in_use, reverse=True)
    assert in_use[-1] == 0
    assert len(set(in_use)) == 3


def test_saved_tensors_may_be_looked_at_outside_of_backward() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, EVERY_LAYER) as offloader:
        output = model(torch.randn(4, 4))
        for _ in range(2):
            assert torch.equal(output.grad_fn._saved_result, output)
            moved = [record.moved for record in records_of(offloader)]
            assert {each.phase for each in moved} == {Phase.AWAY}
            assert all(each.buffer is None and each.decoded is None for each in moved)
        del moved
        output.sum().backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
        del output
        assert offloader.host_pool.settle() == 0


def test_names() -> None:
    assert Slot("model.layers.3", 3, "self_attn.q_proj", 2, 64, None).name == "self_attn.q_proj:2"
    anchor = Slot("model.layers.3", 3, "mlp", 1, 64, None, kind="anchor")
    assert anchor.name == "mlp:anchor1"
    message = str(modified_error(Slot("model.layers.3", 3, "mlp", 0, 64, None)))
    assert "slot 'mlp:0' of layer 'model.layers.3'" in message
    assert "out-of-place" in message, "the remedy"
    model = Stack(linear_relu)
    with attach(model, EVERY_LAYER) as offloader:
        loss = model(torch.randn(4, 4)).sum()
        assert str(records_of(offloader)[0].slot) == "layers.0 :0"
        loss.backward()
