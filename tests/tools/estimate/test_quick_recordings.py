"""A recorded step is the same whether its common operations are answered at once or by torch."""

from __future__ import annotations

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.model.fake_cuda import cuda_operations
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import recorded_step

MODELS = (
    "llama:hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,"
    "num_key_value_heads=2,vocab_size=320",
    "opt:hidden_size=32,word_embed_proj_dim=32,ffn_dim=48,num_hidden_layers=3,"
    "num_attention_heads=4,vocab_size=320,max_position_embeddings=64",
    "gpt2:n_embd=32,n_layer=3,n_head=4,vocab_size=320,n_positions=64",
)

WAYS: tuple[tuple[Levers, dict[str, object]], ...] = (
    (NO_LEVERS, {"dtype": "float32"}),
    (Levers(head_loss="chunked"), {}),
    (NO_LEVERS, {"checkpointing": True}),
    (Levers.of(PyAOConfig(policy="all", long_context=True)), {}),
    (NO_LEVERS, {"lora_rank": 4, "adapter_dtype": "float32"}),
)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.partition(":")[0])
def test_a_step_is_recorded_the_same(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for levers, more in WAYS:
        training = FakeTraining(config=config_of(parse_model(model)), **more)  # type: ignore[arg-type]
        answered = []
        quick = cuda_operations.quick_result

        def counted(*call: object) -> object:
            found = quick(*call)  # type: ignore[arg-type]
            answered.append(found is not None)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(cuda_operations, "quick_result", counted)
            found = recorded_step(training, 2, 24, levers=levers)
        assert sum(answered) > len(answered) / 3
        with monkeypatch.context() as patch:
            patch.setattr(cuda_operations, "quick_result", lambda *_: None)
            expected = recorded_step(training, 2, 24, levers=levers)
        assert found == expected
