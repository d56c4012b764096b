"""Offloaded training equals plain training, bit for bit: architectures, attention, dtypes, modes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from hf_pyao import attach
from tests.helpers import (
    ACCUMULATING,
    EVERY_LAYER,
    EVERYTHING,
    MAIN,
    PRECISIONS,
    assert_same_trajectory,
    enable_checkpointing,
    tiny_model,
    train,
)

CHECKPOINTING = {"plain": None, "reentrant": True, "non-reentrant": False}
CONFIGS = {
    "plain": (EVERYTHING, replace(EVERY_LAYER, window=4096)),
    "reentrant": (EVERY_LAYER,),
    "non-reentrant": (replace(EVERY_LAYER, window=1),),
}
"""What each mode is attached with; the windows are spread over the matrix."""


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MAIN)
def test_training_is_bitwise_the_same(
    model_type: str, attention: str, dropout: float, precision: str
) -> None:
    dtype, autocast = PRECISIONS[precision]
    origin = tiny_model(model_type, attention=attention, dropout=dropout, dtype=dtype)
    for mode, use_reentrant in CHECKPOINTING.items():
        plain = copy.deepcopy(origin)
        if use_reentrant is not None:
            enable_checkpointing(plain, use_reentrant=use_reentrant)
        models = [copy.deepcopy(plain) for _ in CONFIGS[mode]]
        expected = train(plain, ACCUMULATING, autocast=autocast)
        for model, config in zip(models, CONFIGS[mode], strict=True):
            what = f"{mode}, window {config.window}"
            with attach(model, config) as offloader:
                found = train(model, ACCUMULATING, autocast=autocast)
                assert_same_trajectory(found, expected, what)
                totals = offloader.totals()
                assert totals["offloaded_bytes"] > 0, what
                assert totals["reloaded_bytes"] == totals["offloaded_bytes"], what
                assert totals["num_micro_batches"] == 5, what
                assert offloader.host_pool.settle() == 0, what
