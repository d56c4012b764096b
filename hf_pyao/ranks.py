"""Which of several processes that train together this one is, and how many there are.

[Note: Ranks]
The process group answers where there is one. Before it is made, and after it is destroyed, the
launcher's variable ``RANK`` does (torchrun, ``accelerate launch`` and DeepSpeed's launcher set it),
so that a process gives the same answer at any time. Only a group lets ranks exchange anything:
:attr:`ProcessRank.num_ranks` is its size, and 1 where there is none.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessRank:
    """The place of a process among those that train together."""

    rank: int
    """0 for the first, which writes files and plans for all."""
    num_ranks: int
    """Processes in the process group; 1 without a group."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, or the only one."""
        return self.rank == 0

    @property
    def is_told(self) -> bool:
        """Whether another process is the first one, and this one can hear of it."""
        return self.num_ranks > 1 and not self.is_first


def process_rank() -> ProcessRank:
    """Return the rank of this process now; see [Note: Ranks]."""
    # Not imported: without it there is no group, and reports need no torch.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return ProcessRank(distributed.get_rank(), distributed.get_world_size())
    announced = os.environ.get("RANK", "")
    return ProcessRank(int(announced) if announced.isdecimal() else 0, 1)
