"""Recomputing training equals plain training, bit for bit, alone and beside offloading."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    PRECISIONS,
    Batch,
    Trajectory,
    assert_same_trajectory,
    enable_checkpointing,
    gradients_of,
    tiny_batch,
    tiny_model,
    train,
)
from tests.helpers.recompute_sets import ALONE, CASES, SETS

VARIANTS = tuple(itertools.product(("sdpa", "eager"), (0.0, 0.1), PRECISIONS))
BASES = (ALONE, EVERYTHING, replace(EVERY_LAYER, window=4096))
STEPS: tuple[tuple[Batch, ...], ...] = ((tiny_batch(0),), (tiny_batch(1, padding=2),))

of_cases = pytest.mark.parametrize(
    ("model_type", "names"), CASES, ids=[f"{model}-{','.join(names)}" for model, names in CASES]
)


NOT_WITHOUT_ITS_PRODUCT = {("opt", ("mlp_act",)), ("opt", ("mlp_act", "mlp_down"))}
"""Nothing but relu's output is saved, whose only source is the product before it."""


def base_of(index: int) -> PyAOConfig:
    """Return what the variant of that index is recomputed beside."""
    return BASES[(index + index // len(BASES)) % len(BASES)]


@functools.cache
def reference(model_type: str, attention: str, dropout: float, precision: str) -> Trajectory:
    """Train without hf_pyao."""
    dtype, autocast = PRECISIONS[precision]
    model = tiny_model(model_type, attention=attention, dropout=dropout, dtype=dtype)
    return train(model, STEPS, autocast=autocast)


@pytest.mark.sampled(every=23)
@of_cases
def test_training_is_bitwise_the_same(model_type: str, names: tuple[str, ...]) -> None:
    recomputed = 0.0
    for index, (attention, dropout, precision) in enumerate(VARIANTS):
        dtype, autocast = PRECISIONS[precision]
        config = replace(base_of(index), recompute_modules=names)
        what = f"{attention}, dropout {dropout}, {precision}, {config.policy}"
        model = tiny_model(model_type, attention=attention, dropout=dropout, dtype=dtype)
        with attach(model, config) as offloader:
            found = train(model, STEPS, autocast=autocast)
            assert_same_trajectory(
                found, reference(model_type, attention, dropout, precision), what
            )
            totals = offloader.totals()
            recomputed += totals["recomputed_bytes"]
            assert totals["num_micro_batches"] == 2, what
            assert totals["reloaded_bytes"] <= totals["offloaded_bytes"], what
            assert offloader.host_pool.settle() == 0, what
    assert (recomputed > 0) == ((model_type, names) not in NOT_WITHOUT_ITS_PRODUCT)


def two_forwards(model: nn.Module) -> dict[str, torch.Tensor]:
    """Run two forwards, then one backward through both, then a second one over the same graph."""
    torch.manual_seed(3)
    losses = [model(**tiny_batch(seed)).loss for seed in (0, 1)]
    (losses[0] + 2 * losses[1]).backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    return {**gradients_of(model), "rng": torch.get_rng_state()}


@pytest.mark.sampled(every=5)
@of_cases
@pytest.mark.parametrize("base", [ALONE, EVERY_LAYER], ids=["alone", "offloading"])
def test_two_forwards_and_a_retained_graph(
    model_type: str, names: tuple[str, ...], base: PyAOConfig
) -> None:
    model = tiny_model(model_type, dropout=0.1)
    expected = two_forwards(copy.deepcopy(model))
    with attach(model, replace(base, recompute_modules=names)) as offloader:
        found = two_forwards(model)
        assert offloader.host_pool.settle() == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.thorough
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama"])
def test_under_checkpointing_there_is_nothing_to_recompute(
    model_type: str, use_reentrant: bool
) -> None:
    def checkpointed() -> nn.Module:
        model = tiny_model(model_type, dropout=0.1)
        enable_checkpointing(model, use_reentrant=use_reentrant)
        return model

    expected = train(checkpointed(), STEPS, autocast=torch.bfloat16)
    for names in SETS[model_type]:
        model = checkpointed()
        with attach(model, replace(EVERY_LAYER, recompute_modules=names)) as offloader:
            found = train(model, STEPS, autocast=torch.bfloat16)
            assert_same_trajectory(found, expected, str(names))
            assert offloader.totals()["recomputed_bytes"] == 0
            assert offloader.totals()["offloaded_bytes"] > 0


def test_layers_in_which_nothing_is_recomputed_are_not_traced() -> None:
    """They run as they would without hf_pyao's tracer: no dispatch mode is on in them."""
    model = tiny_model("bart")
    config = replace(EVERY_LAYER, recompute_modules=("encoder_attn_layer_norm",))
    num_modes: dict[str, int] = {}
    with attach(model, config) as offloader:
        for name, module in model.named_modules():
            if name.endswith("self_attn_layer_norm"):
                module.register_forward_hook(
                    lambda *_, name=name: num_modes.update(
                        {name: torch.utils._python_dispatch._len_torch_dispatch_stack()}
                    )
                )
        model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["recomputed_bytes"] > 0
    assert len(num_modes) == len(offloader.layer_names)
    for name, count in num_modes.items():
        assert count == ("decoder" in name), name
