"""One of two ranks that train under engines that need a process group.

Called as ``python -m tests.compatibility.worker RANK FOLDER``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.compatibility.cases import ON_TWO_RANKS, SETTINGS, run

WORLD_SIZE = 2


def main(rank: int, folder: Path) -> None:
    """Write what came of every case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    found = []
    for engine, wrap in ON_TWO_RANKS.items():
        for name in SETTINGS:
            found.append(run(engine, wrap, name, rank).to_dict())
            dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
