"""Embeddings and head on the host: what is uploaded, what is held, and how parameters end."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.engine.weights.on_demand import WeightsOnDemand
from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from tests.engine.weights.test_streaming_interrupts import weights_left
from tests.helpers import gradients_of, tiny_batch, tiny_model, train
from tests.helpers.adapters import tiny_lora
from tests.helpers.interrupts import Interrupter

ENDS = {
    "policy": "off",
    "host_memory_gib": 0.1,
    "stream_weights": 8,  # more than there are: all layers stay
    "stream_embeddings": "on",
}


class CountingTransport(BlockingTransport):
    """Counts bytes by what is copied, and remembers where to."""

    def __init__(self) -> None:
        super().__init__()
        self.row_bytes = self.whole_bytes = self.num_offloads = 0
        self.targets: list[StorageWeakRef] = []

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> Any:
        if str(options["label"]).startswith("rows"):
            self.row_bytes += src.nbytes
        else:
            self.whole_bytes += src.nbytes
        self.targets.append(StorageWeakRef(dst.untyped_storage()))
        return super().reload(src, dst, **options)

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> Any:
        self.num_offloads += 1
        return super().offload(src, dst, **options)

    def take(self) -> tuple[int, int]:
        found = self.row_bytes, self.whole_bytes
        self.row_bytes = self.whole_bytes = 0
        return found


def source_of(offloader: Any) -> WeightsOnDemand:
    source = offloader.weights._ends.source
    assert isinstance(source, WeightsOnDemand)
    return source


def base_of(model: Any) -> Any:
    return model.base_model.model


@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_bytes_of_a_step_are_rows_and_heads_and_none_comes_back(
    model_type: str, head_loss: str
) -> None:
    model = tiny_lora(model_type)
    head = base_of(model).get_output_embeddings().weight
    row_bytes = head.shape[1] * head.element_size()
    transport = CountingTransport()
    config = PyAOConfig(**ENDS, head_loss=head_loss)
    with attach(model, config, transport=transport):
        for batches in ([tiny_batch(0)], [tiny_batch(1), tiny_batch(2)]):
            train(model, [batches])
            rows = sum(len(set(batch["input_ids"].flatten().tolist())) for batch in batches)
            if model_type == "gpt2":  # learned positions
                rows += sum(batch["input_ids"].shape[1] for batch in batches)
            uploads = len(batches) * (1 if head_loss == "chunked" else 2)
            assert transport.take() == (rows * row_bytes, uploads * head.nbytes)
        with torch.no_grad():
            model.eval()(**tiny_batch(0))
        assert transport.take()[1] == head.nbytes
    assert transport.num_offloads == 0


@pytest.mark.parametrize("head_loss", ["off", "chunked"])
def test_nothing_is_on_the_device_between_forward_and_backward(head_loss: str) -> None:
    """Under autocast: the head's cast is made again, too."""
    model = tiny_lora("llama")
    transport = CountingTransport()
    with attach(model, PyAOConfig(**ENDS, head_loss=head_loss), transport=transport):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**tiny_batch(0))
        assert transport.targets
        assert all(target.expired() for target in transport.targets)
        vocab, width = base_of(model).lm_head.weight.shape
        held = [t for t in saved_by(outputs.loss) if t.shape in ((vocab, width), (width, vocab))]
        assert not held
        outputs.loss.backward()
        assert all(target.expired() for target in transport.targets)


def saved_by(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that the nodes of the graph hold without a hook, outside of layers."""
    found, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                data = getattr(raw, "data", None)
                if isinstance(data, torch.Tensor):
                    found.append(data)
        nodes.extend(next_node for next_node, _ in node.next_functions)
    return found


def test_a_loss_in_chunks_through_adapters_uploads_the_head_twice() -> None:
    """For the one token that tells the dtype of the logits, and for the loss with its gradients."""
    model = tiny_lora("llama", adapters={"target_modules": ["lm_head", "q_proj"]})
    transport = CountingTransport()
    config = PyAOConfig(**ENDS, head_loss="chunked")
    with attach(model, config, transport=transport) as offloader:
        handle: Any = offloader.head_loss
        handle._sizes["chunk_tokens"] = 3
        train(model, [[tiny_batch(0)]])
        assert handle.metrics()["head_loss_num_chunks"] > 3
        head = base_of(model).lm_head.base_layer.weight
        assert transport.take()[1] == 2 * head.nbytes


def test_parameters_are_as_before_in_files_and_after_detaching() -> None:
    model = tiny_lora("gpt2")
    before = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    values = {name: p.detach().clone() for name, p in before.items()}
    state = copy.deepcopy(model.state_dict())
    with attach(model, PyAOConfig(**ENDS)) as offloader:
        base = base_of(model)
        assert base.lm_head.weight is base.transformer.wte.weight
        assert isinstance(base.lm_head.weight, nn.Parameter)
        model(**tiny_batch(0)).loss.backward()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name])
        again = pickle.loads(pickle.dumps(base))
        assert type(again.transformer.wte._parameters) is dict
        twin = copy.deepcopy(model)
        assert torch.equal(twin(**tiny_batch(0)).loss, model(**tiny_batch(0)).loss)
        assert type(twin.base_model.model.lm_head._parameters) is dict
        ours = {
            id(p) for p, _ in ((p, 0) for p in before.values()) if source_of(offloader).weight_of(p)
        }
        assert len(ours) == 2, "words and positions; the head is tied"
        ignored = vars(model)["_ddp_params_and_buffers_to_ignore"]
        assert any("lm_head" in name for name in ignored)
        assert any("wte" in name for name in ignored)
    assert not weights_left(model, before)
    for name, parameter in before.items():
        assert torch.equal(parameter, values[name])


@pytest.mark.parametrize("forward", ["before forward", "between", "after"])
def test_detached_at_any_point_the_graph_is_still_good(forward: str) -> None:
    model = tiny_lora("llama")
    expected = model(**tiny_batch(0)).loss
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    offloader = attach(model, PyAOConfig(**ENDS))
    if forward == "before forward":
        offloader.detach()
    loss = model(**tiny_batch(0)).loss
    if forward == "between":
        offloader.detach()
    loss.backward()
    offloader.detach()
    for name, gradient in gradients.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name


def test_resized_embeddings_are_on_the_device() -> None:
    model: Any = tiny_lora("llama")
    plain = copy.deepcopy(model)
    with attach(model, PyAOConfig(**ENDS)):
        for each in (plain, model):
            torch.manual_seed(3)
            each.base_model.model.resize_token_embeddings(100, mean_resizing=False)
        batch = tiny_batch(0)
        batch["input_ids"][0, 0] = 99
        assert torch.equal(model(**batch).loss, plain(**batch).loss)
    assert not weights_left(model, {})


def test_what_is_changed_between_forwards_is_seen() -> None:
    model = tiny_lora("llama")
    plain = copy.deepcopy(model)
    with attach(model, PyAOConfig(**ENDS)):
        model(**tiny_batch(0))
        for each in (model, plain):
            weights = base_of(each).model.embed_tokens.weight, base_of(each).lm_head.weight
            with torch.no_grad():
                weights[0].mul_(2.0)
                weights[0].data[5] = 1.0
                weights[1].data.add_(1.0)
            weights[1].data = weights[1].data.clone() * 0.5
        assert torch.equal(model(**tiny_batch(0)).loss, plain(**tiny_batch(0)).loss)


def test_a_change_between_forward_and_backward_is_refused() -> None:
    model = tiny_lora("llama")
    with attach(model, PyAOConfig(**ENDS)):
        loss = model(**tiny_batch(0)).loss
        with torch.no_grad():
            base_of(model).lm_head.weight.mul_(2.0)
        with pytest.raises(SavedTensorModifiedError, match="lm_head"):
            loss.backward()


def test_weights_that_are_thawed_are_refused() -> None:
    model = tiny_lora("llama")
    with attach(model, PyAOConfig(**ENDS)):
        base_of(model).lm_head.weight.requires_grad_()
        with pytest.raises(ConflictError, match="lm_head"):
            model(**tiny_batch(0))
        base_of(model).lm_head.weight.requires_grad_(False)
        model(**tiny_batch(0)).loss.backward()


def test_nothing_looks_at_the_functions_of_layers() -> None:
    model = tiny_lora("opt")
    decoder = base_of(model).model.decoder
    stack = torch.overrides._get_current_function_mode_stack
    seen: dict[str, int] = {}
    decoder.layers[1].fc1.register_forward_pre_hook(lambda *_: seen.update(inside=len(stack())))
    decoder.final_layer_norm.register_forward_hook(lambda *_: seen.update(behind=len(stack())))
    with attach(model, PyAOConfig(**ENDS)):
        model(**tiny_batch(0)).loss.backward()
    assert seen == {"inside": 0, "behind": 1}
    assert not stack()


class Reading(nn.Embedding):
    """Does something with its weight in forward."""

    def __init__(self, plain: nn.Embedding, how: str) -> None:
        super().__init__(plain.num_embeddings, plain.embedding_dim, _weight=plain.weight)
        self.how = how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.how == "multiplies":
            one_hot = F.one_hot(ids, self.weight.shape[0]).to(self.weight.dtype)
            return one_hot @ self.weight
        if self.how == "indexes":
            return self.weight[ids].to(self.weight.device)
        if self.how == "scales in place":
            self.weight.mul_(1.0)
        if self.how == "scales data in place":
            self.weight.data.mul_(1.0)
        if self.how == "assigns":
            self.weight.data = self.weight.data * 2
        return super().forward(ids)


@pytest.mark.parametrize("how", ["multiplies", "indexes"])
def test_other_operations_get_the_whole_weight(how: str) -> None:
    model: Any = tiny_model("llama").requires_grad_(False)
    model.model.embed_tokens = Reading(model.model.embed_tokens, how).requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    plain = copy.deepcopy(model)
    with attach(model, PyAOConfig(**ENDS)):
        loss, expected = model(**tiny_batch(0)).loss, plain(**tiny_batch(0)).loss
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    assert torch.equal(model.model.norm.weight.grad, plain.model.norm.weight.grad)


@pytest.mark.parametrize("how", ["scales in place", "scales data in place", "assigns"])
def test_writes_that_would_be_lost_are_refused(how: str) -> None:
    model: Any = tiny_model("llama").requires_grad_(False)
    model.model.embed_tokens = Reading(model.model.embed_tokens, how).requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    before = model.model.embed_tokens.weight.detach().clone()
    with attach(model, PyAOConfig(**ENDS)), torch.no_grad():
        with pytest.raises(ConflictError, match="embed_tokens"):
            model(**tiny_batch(0))
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_an_unknown_token_is_the_error_of_a_look_up() -> None:
    model = tiny_lora("llama")
    expected = copy.deepcopy(model)(**tiny_batch(0)).loss
    with attach(model, PyAOConfig(**ENDS)) as offloader:
        wrong = tiny_batch(0)
        wrong["input_ids"][0, 0] = 10_000
        with pytest.raises(IndexError):
            model(**wrong)
        assert torch.equal(model(**tiny_batch(0)).loss, expected)
        assert len(source_of(offloader)._staging._pieces) <= 1


@pytest.mark.parametrize("ids", [torch.tensor(3), torch.zeros(0, dtype=torch.long), torch.ones(2, 1, 2, dtype=torch.int32)])  # fmt: skip
def test_ids_of_any_shape(ids: torch.Tensor) -> None:
    model = tiny_lora("llama")
    embedding = base_of(model).model.embed_tokens
    expected = embedding(ids)
    with attach(model, PyAOConfig(**ENDS)):
        found = embedding(ids)
        assert torch.equal(found, expected)
        assert found.shape == expected.shape
        assert torch.equal(base_of(model).lm_head(expected), F.linear(expected, base_of(model).lm_head.weight))  # fmt: skip


def test_where_the_host_has_no_room_for_rows_they_come_all_the_same() -> None:
    model = tiny_lora("llama")
    plain = copy.deepcopy(model)
    with attach(model, PyAOConfig(**ENDS)) as offloader:
        store: Any = offloader.engine.link.tiers.stores[0]
        store.capacity_bytes = 0
        store.reserve = lambda *_, **__: None
        for seed in range(3):
            batch = tiny_batch(seed)
            assert torch.equal(model(**batch).loss, plain(**batch).loss)
        assert len(source_of(offloader)._staging._pieces) <= 1


@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("num_lines", [12, pytest.param(300, marks=pytest.mark.thorough)])
def test_an_interrupt_at_any_line_leaves_all_usable(num_lines: int, head_loss: str) -> None:
    model = tiny_lora("llama")
    expected = gradients_of_step(copy.deepcopy(model), head_loss)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = PyAOConfig(**ENDS, head_loss=head_loss)
    with attach(model, config):
        gradients_of_step(model)
        with Interrupter() as counted:
            gradients_of_step(model)
        rng, num_raised = random.Random(num_lines), 0
        for line in rng.sample(range(counted.count), num_lines):
            with Interrupter(at=line) as interrupter:
                with contextlib.suppress(KeyboardInterrupt):
                    gradients_of_step(model)
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            assert not torch.overrides._get_current_function_mode_stack()
            num_raised += interrupter.has_raised
            found = gradients_of_step(model)
            assert all(torch.equal(found[name], each) for name, each in expected.items()), line
    assert num_raised > num_lines / 2, "steps differ by a few lines"
    assert not weights_left(model, {})
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def gradients_of_step(model: nn.Module, head_loss: str = "") -> dict[str, torch.Tensor]:
    """Return the gradients of a step; *head_loss*: of a model that is not attached."""
    model.zero_grad()
    if head_loss:
        with attach(model, PyAOConfig(policy="off", head_loss=head_loss)):
            return gradients_of_step(model)
    model(**tiny_batch(0)).loss.backward()
    return gradients_of(model)


def test_an_embedding_with_max_norm_stays_and_is_named() -> None:
    model: Any = tiny_lora("llama")
    base_of(model).model.embed_tokens.max_norm = 1.0
    with attach(model, PyAOConfig(**ENDS)) as offloader:
        assert "with max_norm" in offloader.weights.describe()


def test_by_default_they_leave_only_where_the_device_has_no_room() -> None:
    for device_gib, leaves in ((1.0, False), (4e-5, True)):
        model = tiny_lora("llama")
        settings = {**ENDS, "stream_embeddings": "auto", "device_memory_gib": device_gib}
        with attach(model, PyAOConfig(**settings)) as offloader:
            assert offloader.weights.ends_leave == leaves
            model(**tiny_batch(0)).loss.backward()
        settings["stream_embeddings"] = "off"
        with attach(model, PyAOConfig(**settings)) as offloader:
            assert not offloader.weights.ends_leave
