"""Models that several recordings share: each recording is the one of a model built for it."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from hf_pyao import PyAOConfig
from hf_pyao.auto.recording import shrunk_model
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import recorded_step
from hf_pyao.tools.simulation.kept_models import KeptModels
from tests.helpers import tiny_model

SEVEN_LAYERS = (
    "llama:hidden_size=32,intermediate_size=48,num_hidden_layers=7,num_attention_heads=4,"
    "num_key_value_heads=2,vocab_size=320"
)

LEVERS = (
    NO_LEVERS,
    Levers(head_loss="chunked"),
    Levers(checkpoint_every=1),
    Levers(checkpoint_every=2, save_attention=True),
    Levers.of(PyAOConfig(policy="all", long_context=True)),
    NO_LEVERS,
)


def training(**more: object) -> FakeTraining:
    return FakeTraining(config=config_of(parse_model(SEVEN_LAYERS)), **more)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{}, {"lora_rank": 4}, {"training_state": "device"}])
@pytest.mark.sampled(every=3)
def test_a_kept_model_is_recorded_as_a_new_one(more: dict[str, object]) -> None:
    new = training(**more)
    kept = dataclasses.replace(new, kept=KeptModels())
    for levers in LEVERS:
        for batch, length in ((1, 16), (2, 24)):
            expected = recorded_step(new, batch, length, levers=levers)
            assert recorded_step(kept, batch, length, levers=levers) == expected


def test_equal_layers_are_found_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    look = shrunk_model._equal_layers

    def counted(model: nn.Module) -> object:
        looked.append(model)
        return look(model)

    monkeypatch.setattr(shrunk_model, "_equal_layers", counted)
    known = shrunk_model.EqualLayers()
    model, other = (tiny_model("llama", num_hidden_layers=7) for _ in range(2))
    whole = list(model.model.layers)
    for _ in range(3):
        removed = known.remove(model)
        assert removed is not None
        assert list(model.model.layers) == [*whole[:2], *whole[-2:]]
        assert len(removed.layer_names) == 7
        gone = [p for layer in whole[2:-2] for p in layer.parameters()]
        assert removed.nbytes == sum(p.numel() * p.element_size() for p in gone)
        removed.put_back()
        assert list(model.model.layers) == whole
    other.model.layers[3].self_attn.scaling = 2.0
    assert known.remove(other) is known.remove(other) is None
    assert len(other.model.layers) == 7
    assert looked == [model, other]


def test_a_model_is_dropped_if_its_step_fails() -> None:
    kept = training(kept=KeptModels())
    expected = recorded_step(kept, 1, 16)
    with pytest.raises(RuntimeError, match="half way"), kept.model() as (model, _):
        first = model
        raise RuntimeError("half way")
    with kept.model() as (second, _):
        assert second is not first
    assert recorded_step(kept, 1, 16) == expected
