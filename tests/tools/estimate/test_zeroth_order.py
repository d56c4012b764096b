"""The estimated device memory of zeroth order."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_pyao import ZerothOrder, ZerothOrderSettings, cli
from hf_pyao.errors import ConfigError
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.zeroth_order.estimate import run_from_arguments, zeroth_order_memory
from tests.helpers import tiny_batch, tiny_model

SMALL = "opt:hidden_size=64,word_embed_proj_dim=64,ffn_dim=256,num_hidden_layers=3,"
SMALL += "num_attention_heads=4,vocab_size=1000"


def test_layers_come_one_at_a_time() -> None:
    """Memory does not grow with the depth."""
    three = zeroth_order_memory(config_of(parse_model(SMALL)), 1, 64)
    nine = zeroth_order_memory(config_of(parse_model(SMALL.replace("layers=3", "layers=9"))), 1, 64)
    assert nine.peak_bytes == three.peak_bytes
    assert nine.host_bytes == 3 * three.host_bytes


def test_a_real_step_allocates_what_is_estimated() -> None:
    """One pass over real weights that visit, counted operation by operation on a CPU."""
    model = tiny_model("opt", num_hidden_layers=3, vocab_size=512, hidden_size=128, ffn_dim=512)
    model.config.use_cache = False
    batch = tiny_batch(0)
    with ZerothOrder(model) as made:
        on_host = {block.memory.untyped_storage()._cdata for block in made.blocks}
        ledger = MemoryLedger(lambda storage: storage._cdata in on_host)

        def loss_of(model: Any) -> torch.Tensor:
            with NotingMode(ledger):
                return model(**batch).loss  # type: ignore[no-any-return]

        visits = made.visits
        with torch.no_grad(), NotingMode(ledger), visits.reading(1):
            visits.begin_forward()
            loss_of(model)
    estimated = zeroth_order_memory(model.config, 2, 8, dtype="float32")
    assert ledger.peak_bytes == pytest.approx(estimated.peak_bytes, rel=0.1)


def test_settings_change_what_they_should() -> None:
    config = config_of(parse_model(SMALL))

    def memory(**given: Any) -> Any:
        return zeroth_order_memory(config, 1, 64, settings=ZerothOrderSettings(**given))

    plain, momentum = memory(), memory(momentum=0.9)
    assert 2.9 * plain.slot_bytes < momentum.slot_bytes <= 3 * plain.slot_bytes
    assert momentum.host_bytes == 3 * momentum.slot_bytes
    packed = memory(transfer_dtype="int8")
    assert 0.95 * plain.slot_bytes < packed.slot_bytes < 1.2 * plain.slot_bytes, "and its noise"
    assert packed.host_bytes == plain.host_bytes + 3 * packed.slot_bytes


@pytest.mark.parametrize(
    "wrong",
    ["moment=1", "momentum", "momentum=x", "momentum=2", "head_loss=liger", "stream_embeddings=on"],
)
def test_settings_that_are_wrong_or_gone_are_refused(wrong: str) -> None:
    args = cli.make_parser().parse_args(["estimate", "--model", SMALL, "--zeroth-order", wrong])
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        run_from_arguments(args)


def test_chunked_losses_have_no_logits() -> None:
    config = config_of(parse_model(SMALL.replace("vocab_size=1000", "vocab_size=200000")))
    plain = zeroth_order_memory(config, 2, 2000)
    chunked = zeroth_order_memory(config, 2, 2000, head_loss="chunked")
    assert chunked.pass_bytes < plain.pass_bytes / 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["estimate", "--model", SMALL, "--zeroth-order", "--sequence-length", "64"]
    assert cli.main(options) == 0
    assert "two slots" in capsys.readouterr().out
    assert cli.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] > 2 * found["slot_bytes"]


def test_what_has_no_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = cli.make_parser().parse_args(
        ["estimate", "--model", SMALL, "--lora", "8", "--zeroth-order"]
    )
    with pytest.raises(ConfigError, match="--lora"):
        run_from_arguments(args)
