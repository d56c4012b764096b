"""A step that is recorded with one fake buffer for all of a size is the one with a pool's buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_pyao.auto.recording import step_recording
from hf_pyao.engine.stores import HostPool
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.step.recording_mode import RecordingStore
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import recorded_step

MODELS = (
    "gpt2:n_embd=32,n_head=2,n_layer=3,vocab_size=256",
    "opt:hidden_size=32,ffn_dim=64,num_attention_heads=2,num_hidden_layers=3,vocab_size=256,"
    "word_embed_proj_dim=32",
)
CASES: dict[str, tuple[Levers, tuple[str, ...]]] = {
    "plain": (NO_LEVERS, ()),
    "recomputed": (NO_LEVERS, ("mlp_act",)),
    "levers": (Levers(head_loss="chunked", checkpoint_every=1, save_attention=True), ()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_the_recorded_step_is_that_of_a_pool(
    model: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    levers, modules = CASES[case]
    training = FakeTraining(config=config_of(parse_model(model)))

    def recorded(store: Callable[[], object]) -> object:
        monkeypatch.setattr(step_recording, "RecordingStore", store)
        step = recorded_step(training, 2, 64, levers=levers, recompute_modules=modules)
        assert step.program.slots
        return step

    assert recorded(RecordingStore) == recorded(lambda: HostPool(2**40, pin=False))
