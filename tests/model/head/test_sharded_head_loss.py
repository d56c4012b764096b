"""Chunked loss and tiled MLPs under FSDP2: never all logits, and no gathered weights held.

Two ranks of ZeRO-3 are in ``tests/distributed/test_zero_plans.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_pyao import PyAOConfig, attach
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.ranks import first_of_four_ranks
from tests.helpers.vocabulary_rows import VocabularyRows

NUM_VOCAB, LENGTH, NUM_LAYERS = 103, 384, 3
CHUNK = 256
"""Tokens of the smallest chunk; the batch has three times as many."""


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with first_of_four_ranks():
        yield


def sharded() -> Any:
    model: Any = tiny_model("llama", num_hidden_layers=NUM_LAYERS, vocab_size=NUM_VOCAB)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def gathered_bytes(module: nn.Module) -> int:
    """Return what is whole now of a unit's own parameters."""
    assert isinstance(module, FSDPModule)
    group = module._get_fsdp_state()._fsdp_param_group
    wholes = [each for p in group.fsdp_params for each in p.all_gather_outputs]
    return sum(each.untyped_storage().nbytes() for each in wholes)


def most_rows_and_units(config: PyAOConfig) -> tuple[int, int, list[int]]:
    """Train a micro-batch; return the most rows of logits, the most layers that are gathered at
    once, and the bytes that layers have gathered between forward and backward."""
    model = sharded()
    layers = list(model.model.layers)
    most_units = 0

    def count(*_: Any) -> None:
        nonlocal most_units
        most_units = max(most_units, sum(gathered_bytes(each) > 0 for each in layers))

    for layer in layers:
        layer.mlp.register_forward_hook(count)
        layer.mlp.register_full_backward_hook(count)
    with (
        mock.patch("hf_pyao.model.losses.cross_entropy.default_budget_bytes", return_value=1),
        attach(model, config),
        VocabularyRows(NUM_VOCAB) as rows,
    ):
        loss = model(**tiny_batch(length=LENGTH), use_cache=False).loss
        held = [gathered_bytes(each) for each in layers]
        loss.backward()
    assert [gathered_bytes(each) for each in layers] == [0] * NUM_LAYERS
    return rows.most, most_units, held


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"checkpoint_every": 1}, marks=pytest.mark.thorough)],
    ids=["offloaded", "run again"],
)
def test_fsdp2_holds_neither_logits_nor_gathered_layers(more: dict[str, Any]) -> None:
    settings = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, "keep_last_layers": 0}
    plain, *_ = most_rows_and_units(PyAOConfig(**settings))
    assert plain >= 2 * (LENGTH - 1), "without the chunked loss all logits are there"
    config = PyAOConfig(**settings, head_loss="chunked", mlp_tiles=3, **more)
    rows, units, held = most_rows_and_units(config)
    assert 0 < rows <= CHUNK
    assert 0 < units <= 2, "a layer, and the one that is gathered ahead"
    assert held == [0] * NUM_LAYERS
