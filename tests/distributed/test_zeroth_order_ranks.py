"""Two ranks that run one pass each make the same steps as one process that runs both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.zeroth_order_worker import digest_of
from tests.helpers import tiny_model
from tests.helpers.ranks import run_ranks
from tests.hf.test_zeroth_order import trainer_of


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("transfer_dtype", [None, "int8"])
def test_two_ranks_equal_one(transfer_dtype: str | None, tmp_path: Path) -> None:
    model = tiny_model("llama", dropout=0.1)
    trainer = trainer_of(
        model, tmp_path / "one", gradient_accumulation_steps=2, transfer_dtype=transfer_dtype
    )
    trainer.train()
    expected = digest_of(model)
    loss = trainer.evaluate()["eval_loss"]
    given = () if transfer_dtype is None else (transfer_dtype,)
    found = run_ranks("tests.distributed.zeroth_order_worker", tmp_path / "two", *given)
    assert [each["digest"] for each in found] == [expected] * 2
    assert [each["passes"] for each in found] == [4 * 2] * 2, "one pass of each micro-batch"
    assert found[0]["eval_loss"] == pytest.approx(loss, rel=1e-6)
