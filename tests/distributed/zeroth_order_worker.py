"""One of two ranks of a zeroth-order training: ``-m tests.distributed.zeroth_order_worker``.

Arguments: the folder for what was seen, and ``transfer_dtype`` or nothing.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from torch import nn

from tests.helpers import tiny_model
from tests.helpers.ranks import ends_at_once, join_group, write_result
from tests.hf.test_zeroth_order import trainer_of


def digest_of(model: nn.Module) -> str:
    """Return what tells two models apart by one bit."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, transfer_dtype: str | None = None) -> None:
    """Train and evaluate on two ranks; write the weights' digest and the number of passes."""
    join_group(folder)
    model = tiny_model("llama", dropout=0.1)
    calls = [0]
    model.lm_head.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + model.training))
    trainer = trainer_of(
        model,
        folder / "run",
        ddp_backend="gloo",
        gradient_accumulation_steps=2,
        transfer_dtype=transfer_dtype,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    write_result(folder, {"digest": digest_of(model), "passes": calls[0], "eval_loss": loss})


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), *sys.argv[2:])
