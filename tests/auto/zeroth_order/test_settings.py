"""What stands beside zeroth order: chunked losses, host memory of momenta, refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, ZerothOrder, ZerothOrderSettings, attach
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from tests.auto.zeroth_order.test_step import EPSILON, RATE, check
from tests.helpers import tiny_batch, tiny_model


def test_both_passes_take_the_loss_in_chunks() -> None:
    model = tiny_model("llama", vocab_size=512)
    ids = torch.randint(512, (2, 512), generator=torch.Generator().manual_seed(0))
    twin, batch = copy.deepcopy(model), {"input_ids": ids, "labels": ids}
    gradients, peaks = [], []
    for each, head_loss in ((model, "off"), (twin, "chunked")):
        each.train()
        settings = ZerothOrderSettings(epsilon=EPSILON)
        with ZerothOrder(each, settings, head_loss=head_loss) as made:
            made.head_loss._sizes["chunk_tokens"] = 64
            ledger = MemoryLedger()

            def loss_of(model: nn.Module, ledger: MemoryLedger = ledger) -> torch.Tensor:
                with NotingMode(ledger):
                    return model(**batch).loss  # type: ignore[no-any-return]

            made.accumulate(each, loss_of)
            gradients.append(made.end_step(RATE))
            peaks.append(ledger.peak_bytes)
            if head_loss == "chunked":
                assert made.head_loss.metrics()["head_loss_num_chunked"] == 2
                assert made.head_loss.metrics()["head_loss_num_chunks"] > 1
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-3)
    assert peaks[0] - peaks[1] >= (ids.numel() - 64) * 512 * 4
    assert "forward" not in vars(twin), "the head loss went with it"


def test_momentum_counts_against_the_host() -> None:
    model = tiny_model("llama")
    with ZerothOrder(model) as made:
        weights = sum(block.nbytes for block in made.blocks)
    room = 1.5 * weights / 2**30
    ZerothOrder(model, host_memory_gib=room).close()
    with pytest.raises(ConfigError, match="momentum"):
        ZerothOrder(model, ZerothOrderSettings(momentum=0.9), host_memory_gib=room)
    settings = ZerothOrderSettings(momentum=0.9)
    with ZerothOrder(model, settings, host_memory_gib=2.2 * weights / 2**30) as made:
        store = made.store
        assert store.capacity_bytes == pytest.approx(0.2 * weights, rel=0.1)
    assert store.capacity_bytes == pytest.approx(2.2 * weights, rel=0.01)


def test_momentum_travels_with_its_block() -> None:
    model = tiny_model("llama")
    batch = tiny_batch(0)
    sizes = []
    for momentum in (0.0, 0.9):
        with ZerothOrder(model, ZerothOrderSettings(momentum=momentum)) as made:
            for _ in range(3):
                made.accumulate(model, lambda model: model(**batch).loss)
                made.end_step(RATE)
            figures = made.figures()
            sizes.append((figures["uploaded_bytes"], figures["offloaded_bytes"]))
    assert [b / a for a, b in zip(*sizes, strict=True)] == pytest.approx([2, 2], rel=0.05)


def compiled(model: nn.Module) -> None:
    model.model.layers[0].compile(backend="eager")  # type: ignore[union-attr,index,operator]


def recurrent(model: nn.Module) -> None:
    model.add_module("recurrent", nn.LSTM(4, 4))


def with_complex(model: nn.Module) -> None:
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))


def on_meta(model: nn.Module) -> None:
    model.add_module("late", nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("change", "word"),
    [(compiled, "compiled"), (recurrent, "LSTM"), (on_meta, "meta"), (with_complex, "complex64")],
)
def test_models_that_are_refused(change: Callable[[nn.Module], None], word: str) -> None:
    model = tiny_model("llama")
    change(model)
    with pytest.raises(ConflictError, match=word):
        ZerothOrder(model)
    assert all(type(module._parameters) is dict for module in model.modules())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "given",
    [
        {"epsilon": "1"},
        {"epsilon": 0.0},
        {"epsilon": float("inf")},
        {"momentum": None},
        {"momentum": 1.0},
        {"seed": None},
        {"seed": 1.5},
        {"transfer_dtype": ["int8"]},
        {"transfer_dtype": "int9"},
        {"transfer_dtype": "bfloat16"},
        {"zo2_order": True},
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(given))):
        ZerothOrderSettings(**given)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"num_resident": -1}, "num_resident"),
        ({"num_resident": "2"}, "num_resident"),
        ({"host_memory_gib": float("nan")}, "host_memory_gib"),
        ({"settings": {"epsilon": 1}}, "settings"),
        ({"model": None}, "model"),
        ({"stream_embeddings": "on"}, "stream_embeddings"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused_by_name(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ZerothOrder(**{"model": tiny_model("llama"), **given})


def test_a_step_of_another_model_and_a_close_inside_of_one_are_refused() -> None:
    model, batch = tiny_model("llama"), tiny_batch(0)
    with ZerothOrder(model) as made:
        with pytest.raises(ConfigError, match="does not have the model"):
            made.accumulate(tiny_model("llama"), lambda model: model(**batch).loss)

        def close(model: nn.Module) -> torch.Tensor:
            made.close()
            return model(**batch).loss  # type: ignore[no-any-return]

        with pytest.raises(ConflictError, match="after the step"):
            made.accumulate(model, close)
        wrapped = nn.Sequential(model)
        made.accumulate(wrapped, lambda wrapped: wrapped[0](**batch).loss)
        assert made.end_step(RATE)
        with pytest.raises(ConfigError, match="seed"):
            made.load_state_dict({})


def test_offloaders_and_a_second_zeroth_order_are_refused() -> None:
    model = tiny_model("llama")
    with attach(model, PyAOConfig()), pytest.raises(ConflictError, match="attached"):
        ZerothOrder(model)
    with ZerothOrder(model):
        for config in (PyAOConfig(policy="auto"), PyAOConfig(stream_weights=1)):
            with pytest.raises(ConflictError, match="zeroth order"):
                attach(model, config)
        with pytest.raises(ConflictError, match="another ZerothOrder"):
            ZerothOrder(model)
    with pytest.raises(ConfigError, match="head_loss"):
        ZerothOrder(model, head_loss="fused")
    check(model, 1)
