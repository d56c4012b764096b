"""One of two ranks whose Trainer chooses its micro-batch; writes what came of it as JSON.

Called as ``python -m tests.distributed.micro_batch_worker FOLDER MOST``: rank 1 runs out of memory
with more samples than MOST as a step is tried.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from hf_pyao.errors import PyAOError
from tests.helpers.ranks import write_result
from tests.hf.micro_batch.test_auto_micro_batch import CONFIG, running_out, trainer_of


def train(folder: Path, most_samples: int) -> dict[str, Any]:
    trainer = trainer_of(folder / "out", CONFIG)
    try:
        with running_out(trainer.model, most_samples):
            trainer.train()
    except PyAOError as error:
        return {"error": str(error)}
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    args = trainer.args
    return {
        "sizes": [args.per_device_train_batch_size, args.gradient_accumulation_steps],
        "digest": digest.hexdigest(),
        "world_size": args.world_size,
        "num_steps": trainer.state.global_step,
    }


def main() -> None:
    """Train, and write the facts."""
    folder, most = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = train(folder, most if rank == 1 else 99)
    facts["ended"] = time.time()
    write_result(folder, facts)


if __name__ == "__main__":
    main()
