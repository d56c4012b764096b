"""The life of a saved storage: which way it may go, and that it gives back what it held."""

from __future__ import annotations

import torch

from hf_pyao import attach
from hf_pyao.engine.runtime.saved_tensor import SavedStorage, modified_error
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.transfer.moved_bytes import Phase
from tests.helpers import EVERY_LAYER, Stack, linear_relu


def records_of(offloader: object) -> list[SavedStorage]:
    return list(offloader.engine._tape.live_records())  # type: ignore[attr-defined]


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
