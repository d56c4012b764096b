"""How a recipe's process logs, fails and ends, alone or as one of several."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from hf_pyao.errors import PyAOError


def run_recipe(recipe: Callable[[], None]) -> None:
    """Run *recipe*, and leave the process in order.

    A setting that cannot be (any ``PyAOError``) ends the process with one line and exit status 2.
    Only the first of several processes speaks.
    """
    is_first = int(os.environ.get("RANK", "0")) == 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_pyao").setLevel(logging.INFO if is_first else logging.ERROR)
    try:
        with logging_redirect_tqdm():  # a log line must not land in the middle of a progress bar
            recipe()
    except PyAOError as error:
        if is_first:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    leave_process_group()


def leave_process_group() -> None:
    """Leave the group of processes, if there is one.

    gloo's threads may still hold tensors of a DistributedDataParallel model when Python ends, and
    then abort the process: the model goes first, and then the group.
    """
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
