"""What is moved and what is held, counted by means that know nothing of the engine.

Three independent witnesses: identity hooks on the same model (what autograd saves, by storage), a
dispatch mode with weak references to every storage made inside a layer (what is alive), and a
transport that keeps the sources of all copies (what was moved).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import Offloader, attach
from hf_pyao.engine.runtime.policy import Policy
from hf_pyao.model.map.buffer_keys import BufferKeys
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    MAIN,
    RecordingTransport,
    autocasting,
    tiny_batch,
    tiny_model,
)

BATCH = tiny_batch(0, padding=2)


def with_random_weights(model: nn.Module) -> nn.Module:
    """Make every parameter known by its value: norms and biases start as ones and zeros."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    return model


def with_lora(model: Any) -> nn.Module:
    import peft

    targets = {"gpt2": ["c_attn", "c_fc"]}.get(model.config.model_type, ["q_proj", "v_proj"])
    config = peft.LoraConfig(
        target_modules=targets,
        r=2,
        lora_dropout=0.1,
        fan_in_fan_out=model.config.model_type == "gpt2",
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def frozen_but_norms(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "ln_" in name)
    return model


VARIANTS = {
    "plain": lambda model: model,
    "frozen": frozen_but_norms,
    "lora": with_lora,
}
DTYPES = {
    "fp32": (torch.float32, None),
    "autocast": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
}

each_kind = [
    # peft asks for checkpointing under the name it had before transformers 5.23.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.parametrize("precision", DTYPES),
    pytest.mark.parametrize("variant", VARIANTS),
    pytest.mark.parametrize("model_type", MAIN),
]


def for_each_kind(test: Any) -> Any:
    for mark in each_kind:
        test = mark(test)
    return test


def layers_of(model: nn.Module) -> list[nn.Module]:
    stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    return list(stack)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def values_of_parameters(model: nn.Module) -> set[bytes]:
    """Return the bytes of every parameter, of its transpose, and of their casts."""
    found = set()
    for parameter in model.parameters():
        for dtype in (torch.float32, torch.bfloat16):
            value = parameter.detach().to(dtype)
            found.add(bytes_of(value))
            if value.dim() == 2:
                found.add(bytes_of(value.t()))
    return found


# ---- witness one: identity hooks ----------------------------------------------------------------


@contextlib.contextmanager
def saved_inside(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the list in which every tensor that autograd saves inside a layer ends up."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    handles = []
    for layer in layers_of(model):
        context = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        handles.append(layer.register_forward_pre_hook(lambda *_, c=context: c.__enter__()))
        handles.append(layer.register_forward_hook(lambda *_, c=context: c.__exit__()))
    yield saved
    for handle in handles:
        handle.remove()


def unique_bytes(saved: list[torch.Tensor], without: set[bytes], buffers: set[int]) -> int:
    """Return the bytes of the distinct storages in *saved* that hold no value of *without*."""
    storages = {}
    for tensor in saved:
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
        if bytes_of(whole) not in without and storage._cdata not in buffers:
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@for_each_kind
def test_what_would_be_held_is_what_autograd_saves_without_parameters(
    model_type: str, variant: str, precision: str
) -> None:
    dtype, autocast = DTYPES[precision]
    model = with_random_weights(VARIANTS[variant](tiny_model(model_type, dropout=0.1, dtype=dtype)))
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    with saved_inside(plain) as saved, autocasting(autocast):
        plain(**BATCH, use_cache=False).loss.backward()
    buffers = {buffer.untyped_storage()._cdata for buffer in plain.buffers()}
    expected = unique_bytes(saved, values_of_parameters(plain), buffers)

    torch.manual_seed(0)
    with attach(model, EVERY_LAYER) as offloader:
        with autocasting(autocast):
            model(**BATCH, use_cache=False).loss.backward()
        metrics = offloader.metrics()
    assert metrics["would_hold_bytes"] == expected
    accounted = ("offloaded_bytes", "held_bytes", "duplicate_bytes")
    assert sum(metrics[key] for key in accounted) == expected
    assert set(offloader.engine.figures.last.kept_bytes) <= {"shared by layers"}


# ---- witness two: a transport that keeps what it copied
# -------------------------------------------


@for_each_kind
def test_no_parameter_and_nothing_twice_is_moved(
    model_type: str, variant: str, precision: str
) -> None:
    dtype, autocast = DTYPES[precision]
    model = with_random_weights(VARIANTS[variant](tiny_model(model_type, dropout=0.1, dtype=dtype)))
    parameters = values_of_parameters(model)
    transport = RecordingTransport()
    with attach(model, EVERY_LAYER, transport=transport):
        for _ in range(2):
            transport.sources.clear()
            with autocasting(autocast):
                model(**BATCH, use_cache=False).loss.backward()
            assert transport.sources
            moved = [label for label, source in transport.sources if bytes_of(source) in parameters]
            assert not moved, f"parameters were moved: {moved}"
            ranges = [
                (source.untyped_storage()._cdata, source.storage_offset(), source.numel())
                for _, source in transport.sources
            ]
            assert len(ranges) == len(set(ranges)), "a storage was moved twice"


def test_several_views_of_one_storage_are_one_copy() -> None:
    hidden_bytes = 2 * 8 * 32 * 4
    # GPT-2's q, k and v are views of one storage; Llama's projections of q, k and v read one input.
    for model_type, path, sizes in (
        ("gpt2", "attn", [3 * hidden_bytes, hidden_bytes]),
        ("llama", "self_attn.q_proj", [hidden_bytes]),
        ("llama", "self_attn.k_proj", []),
        ("llama", "self_attn.v_proj", []),
    ):
        model = tiny_model(model_type)
        with attach(model, EVERY_LAYER) as offloader:
            decisions = Recorder(offloader.engine.policy)
            offloader.engine.use(decisions)
            model(**BATCH, use_cache=False).loss.backward()
        slots = [c for c in decisions.seen if c.layer_index == 1 and c.path == path]
        large = [c.nbytes for c in slots if c.nbytes >= hidden_bytes]
        assert large == sizes, f"{model_type} {path}: {slots}"


class Recorder(Policy):
    """A policy that notes what another one was asked."""

    name = "recorder"

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.seen: list[Any] = []

    def decide(self, slot: Any, situation: Any) -> Any:
        if situation.stays is None:
            self.seen.append(slot)
        return self.policy.decide(slot, situation)


# ---- witness three: which storages are alive
# -------------------------------------------------------


class LiveStorages(TorchDispatchMode):
    """Weak references to the storages that operations make while a layer runs, by layer.

    *model*'s own storages, those of *offloader*'s host pool and of *others* were there before.
    """

    only_watches = True

    def __init__(
        self, model: nn.Module, offloader: Offloader | None = None, others: Any = ()
    ) -> None:
        super().__init__()
        self.layer = ""
        self.made: dict[str, list[tuple[StorageWeakRef, int]]] = {}
        before = [*model.parameters(), *model.buffers(), *others]
        if offloader is not None:
            before.extend(slab.memory for slab in offloader.host_pool._slabs)
        self._seen = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if self.layer:
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # The weak reference keeps the address from being used again.
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            made = self.made.setdefault(self.layer, [])
            made.append((StorageWeakRef(storage), storage.nbytes()))

    @contextlib.contextmanager
    def around(self, layers: list[nn.Module]) -> Iterator[None]:
        handles = []
        for index, layer in enumerate(layers):

            def start(module: nn.Module, args: Any, name: str = str(index)) -> None:
                self.layer = name

            def end(module: nn.Module, args: Any, output: Any) -> None:
                self.layer = ""

            handles.append(layer.register_forward_pre_hook(start, prepend=True))
            handles.append(layer.register_forward_hook(end))
        with self:
            yield
        for handle in handles:
            handle.remove()

    def alive_bytes(self) -> dict[str, int]:
        return {
            layer: sum(nbytes for ref, nbytes in made if not ref.expired())
            for layer, made in self.made.items()
        }


@pytest.mark.parametrize("window", ["layer", 0, 2**20])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("model_type", MAIN)
def test_after_forward_nothing_made_in_a_layer_stays_without_a_stated_reason(
    model_type: str, dropout: float, window: str | int
) -> None:
    model = tiny_model(model_type, dropout=dropout)
    layers = layers_of(model)
    hidden_bytes = 2 * 8 * 32 * 4

    with attach(model, replace(EVERY_LAYER, window=window)) as offloader:
        model(**BATCH, use_cache=False).loss.backward()  # the pool's slab is there from now on
        ledger = LiveStorages(model, offloader)
        with ledger.around(layers):
            loss = model(**BATCH, use_cache=False).loss
        alive = ledger.alive_bytes()
        loss.backward()
        assert offloader.host_pool.settle() == 0
        # Masks and rotary tables come from outside; the ledger meets them where they are viewed.
        shared = offloader.metrics().get("kept_bytes/shared by layers", 0)
        assert alive.pop("0") in (0, shared)
        # The last layer's output goes to the final norm, which saves it outside of the layers.
        assert alive == {"1": 0, "2": hidden_bytes}

    ledger = LiveStorages(model)
    with ledger.around(layers):
        loss = model(**BATCH, use_cache=False).loss
    assert min(ledger.alive_bytes().values()) > 8 * hidden_bytes, "the ledger sees nothing"


@pytest.mark.parametrize("window", ["layer", 4096, 2**20])
def test_nothing_that_backward_brought_back_outlives_it(window: str | int) -> None:
    model = tiny_model("llama")
    with attach(model, replace(EVERY_LAYER, window=window)) as offloader:
        model(**BATCH, use_cache=False).loss.backward()
        ledger = LiveStorages(model, offloader, [p.grad for p in model.parameters()])
        with ledger:
            ledger.layer = "forward"
            first = model(**BATCH, use_cache=False).loss
            ledger.layer = "one backward"
            first.backward(retain_graph=True)
            ledger.layer = "forward"
            second = model(**BATCH, use_cache=False).loss
            loss = first + second
            ledger.layer = "backward over two micro-batches"
            loss.backward(retain_graph=True)
            ledger.layer = "part of a backward"
            torch.autograd.grad(loss, layers_of(model)[-1].mlp.up_proj.weight, retain_graph=True)
        alive = ledger.alive_bytes()
        assert alive.pop("forward") > 0
        assert alive == dict.fromkeys(alive, 0)
        assert len(alive) == 3
        del loss, first, second
        assert offloader.host_pool.settle() == 0


# ---- figures
# --------------------------------------------------------------------------------------


def test_figures_of_one_micro_batch_are_of_that_one() -> None:
    model = tiny_model("opt")
    with attach(model, EVERYTHING) as offloader:
        assert offloader.metrics() == {}
        assert offloader.totals() == {}
        seen = []
        for _ in range(3):
            model(**BATCH, use_cache=False).loss.backward()
            seen.append(offloader.metrics())
        assert (
            seen[0]["offloaded_bytes"] == seen[1]["offloaded_bytes"] == seen[2]["offloaded_bytes"]
        )
        totals = offloader.totals()
    assert totals["num_micro_batches"] == 3
    assert totals["offloaded_bytes"] == 3 * seen[0]["offloaded_bytes"]
    assert totals["num_slots"] == seen[0]["num_slots"], "a size held at once is no sum"
    for figures in seen:
        assert figures["link_bytes"] == figures["offloaded_bytes"] + figures["reloaded_bytes"]
        assert figures["would_hold_bytes"] == figures["offloaded_bytes"] + figures["held_bytes"]
        assert figures["host_peak_bytes"] >= figures["offloaded_bytes"]
        assert figures["pool_bytes"] >= figures["host_peak_bytes"]
        assert 0 <= figures["overlap_efficiency"] <= 1


def test_masks_and_rotary_tables_stay() -> None:
    model = tiny_model("llama", attention="eager")
    transport = RecordingTransport()
    with attach(model, EVERY_LAYER, transport=transport) as offloader:
        model(**BATCH, use_cache=False).loss.backward()
        shared = offloader.metrics()["kept_bytes/shared by layers"]
    head_dim, length = 8, 8
    tables = 2 * length * head_dim * 4
    assert shared >= tables
    sizes = [source.numel() for _, source in transport.sources]
    assert sizes.count(length * head_dim * 4) == 0, "a rotary table was moved"


class Follows(nn.Module):
    """A layer that exchanges its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        result: torch.Tensor = self.second(self.first(hidden).relu()) + self.mean
        return result


def test_the_place_of_a_buffer_that_is_exchanged_is_not_taken_for_a_buffer() -> None:
    model = nn.Sequential(*(Follows() for _ in range(3)))
    keys = BufferKeys(model)()
    let_go = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    figures = set()
    with attach(model, replace(EVERY_LAYER, layers=("*",))) as offloader:
        for _ in range(4):
            made = model(torch.randn(16, 32))
            made.sum().backward()
            figures.add(offloader.metrics()["offloaded_bytes"])
    assert len(figures) == 1
    new = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    assert all(key in keys for key in let_go)
    assert not any(key in keys for key in new)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5", "bert-like"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.sampled(every=2)
def test_layers_that_run_again_count_what_autograd_would_hold(
    model_type: str, dropout: float
) -> None:
    """As many bytes as without segments; what is not moved or kept is recomputed."""
    from tests.helpers import tiny_batch, tiny_model

    model_type = {"bert-like": "bart"}.get(model_type, model_type)
    found = []
    for more in ({}, {"checkpoint_every": 1}, {"checkpoint_every": 2, "checkpoint_nested": True}):
        model = tiny_model(model_type, dropout=dropout)
        with attach(model, EVERY_LAYER.with_settings(**more)) as offloader:
            for _ in range(2):
                torch.manual_seed(0)
                model(**tiny_batch(0), use_cache=False).loss.backward()
            found.append(offloader.metrics())
    plain, *segments = found
    for each in segments:
        assert each["would_hold_bytes"] == plain["would_hold_bytes"]
        parts = each["held_bytes"] + each["offloaded_bytes"] + each["recomputed_bytes"]
        assert parts == each["would_hold_bytes"]
        assert each["recomputed_bytes"] > 0
