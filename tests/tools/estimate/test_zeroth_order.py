"""The estimated device memory of zeroth order."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_pyao import ZerothOrder, cli
from hf_pyao.errors import ConfigError
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.zeroth_order.estimate import noise_bytes, zeroth_order_memory
from tests.helpers import tiny_batch, tiny_model

SMALL = "opt:hidden_size=64,word_embed_proj_dim=64,ffn_dim=256,num_hidden_layers=3,"
SMALL += "num_attention_heads=4,vocab_size=1000"


def test_the_parts_are_those_of_the_model() -> None:
    found = zeroth_order_memory(config_of(parse_model(SMALL)), 2, 128)
    # Four square matrices and their biases, two of 4 x, norms; each padded to 512 bytes.
    matrices = 2 * (4 * 64 * 64 + 2 * 4 * 64 * 64)
    assert matrices <= found.slot_bytes <= matrices + 16 * 512
    assert found.host_bytes == 3 * found.slot_bytes
    assert found.resident_bytes >= 2 * 64 * (1000 + 2048)
    logits = 2 * 128 * 1000
    assert found.pass_bytes >= logits * (2 + 4 + 4), "half, float32, and its log-softmax"
    assert found.waiting_bytes < found.pass_bytes
    parts = found.resident_bytes + found.pass_bytes + found.waiting_bytes
    assert found.peak_bytes == 2 * found.slot_bytes + parts


def test_layers_come_one_at_a_time() -> None:
    """Memory does not grow with the depth."""
    three = zeroth_order_memory(config_of(parse_model(SMALL)), 1, 64)
    nine = zeroth_order_memory(config_of(parse_model(SMALL.replace("layers=3", "layers=9"))), 1, 64)
    assert nine.peak_bytes == three.peak_bytes
    assert nine.host_bytes == 3 * three.host_bytes


def test_a_real_step_allocates_what_is_estimated() -> None:
    """One pass over real weights that visit, counted operation by operation on a CPU."""
    model = tiny_model("opt", num_hidden_layers=3, vocab_size=512, hidden_size=64, ffn_dim=256)
    model.config.use_cache = False
    batch = tiny_batch(0)
    with ZerothOrder(model) as made:
        on_host = {block.memory.untyped_storage()._cdata for block in made.blocks}
        ledger = MemoryLedger(lambda storage: storage._cdata in on_host)

        def loss_of(model: Any) -> torch.Tensor:
            with NotingMode(ledger):
                return model(**batch).loss  # type: ignore[no-any-return]

        visits = made._weights.visits
        with torch.no_grad(), NotingMode(ledger), visits.reading(1):
            visits.begin_step()
            loss_of(model)
    estimated = zeroth_order_memory(model.config, 2, 8, dtype="float32")
    ours = estimated.peak_bytes - estimated.waiting_bytes
    assert ledger.peak_bytes == pytest.approx(ours, rel=0.1)


def test_noise_is_drawn_in_chunks() -> None:
    assert 8 * 2**20 < noise_bytes() < 80 * 2**20


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["estimate", "--model", SMALL, "--zeroth-order", "--sequence-length", "64"]
    assert cli.main(options) == 0
    assert "two slots" in capsys.readouterr().out
    assert cli.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] > 2 * found["slot_bytes"]


def test_what_has_no_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_pyao.tools.zeroth_order.estimate import run_from_arguments

    args = cli.make_parser().parse_args(
        ["estimate", "--model", SMALL, "--zeroth-order", "--lora", "8"]
    )
    with pytest.raises(ConfigError, match="--lora"):
        run_from_arguments(args)
