"""Whether one rank can run a failed micro-batch again without its peers and wrappers noticing.

[Note: One rank of several]
A rank may run a micro-batch again alone if its failed try has begun no collective: its peers then
wait for its next collective, and only see that it comes late. So no rank has to ask the others.
Process groups count their collectives, which shows whether one has begun. Once one has begun, the
peers have gone on, and the run ends there. The others end as torch's process groups do when a peer
is gone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import PIPELINE, Feature, engine_of_module

UNKNOWN = (-1,)
"""In place of a count where there is none."""


def num_collectives() -> tuple[int, ...]:
    """Return how many collectives each process group has begun; empty where there is one rank."""
    if process_rank().num_ranks == 1:
        return ()
    try:
        groups: Iterable[Any] = torch.distributed.distributed_c10d._world.pg_map
        return tuple(group._get_sequence_number_for_group() for group in groups)
    except Exception:  # a backend that does not count
        return UNKNOWN


def reason_not_alone(before: tuple[int, ...], traceback: TracebackType | None) -> str:
    """Say why this rank cannot run its micro-batch again alone, or return an empty string.

    Args:
        before: :func:`num_collectives` when it began.
        traceback: of its failure.
    """
    if not before:
        return ""
    if before == UNKNOWN or num_collectives() != before:
        return "it had begun to exchange data with other ranks, which are beyond that by now"
    return PIPELINE.reason(Feature.RUN_AGAIN) if is_in(traceback, PIPELINE.source_path) else ""


def reason_of_wrappers(
    model: nn.Module, traceback: TracebackType | None, *, has_written: bool
) -> str:
    """Say why what is around *model* cannot run again, or return an empty string.

    Args:
        model: what failed.
        traceback: of its failure.
        has_written: whether gradients were written.
    """
    for module in (*wrappers_of(model), *model.modules()):
        engine = engine_of_module(module)
        if engine.has_half_way_state or (
            engine.reduces_in_backward
            and _has_begun_to_reduce(module, traceback, has_written=has_written)
        ):
            return engine.reason(Feature.RUN_AGAIN)
    return ""


def _has_begun_to_reduce(
    wrapper: nn.Module, traceback: TracebackType | None, *, has_written: bool
) -> bool:
    if not _exchanges(wrapper):
        return False
    if has_written:
        return True
    # With these two it may count parameters as reduced as soon as its forward ends.
    counts_early = getattr(wrapper, "find_unused_parameters", False) or getattr(
        wrapper, "static_graph", False
    )
    return bool(counts_early) and not is_in(traceback, "/nn/parallel/distributed.py")


def _exchanges(wrapper: nn.Module) -> bool:
    """Say whether the newest forward of a ``DistributedDataParallel`` prepared an exchange.

    None does under ``no_sync()``. An error leaves that context, which takes the first flag back;
    the second one is of the newest forward that ended (``_post_forward`` in
    ``torch/nn/parallel/distributed.py``). A forward that fails has prepared nothing.
    """
    names = ("require_backward_grad_sync", "require_forward_param_sync")
    return all(getattr(wrapper, name, True) for name in names)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that *model* is a part of. Slow: it looks at all objects."""
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), nn.Module)
        and each is not model
        and "_modules" in each.__dict__
        and any(module is model for module in each.modules())
    ]


def is_in(traceback: TracebackType | None, path: str, function: str = "") -> bool:
    """Say whether *traceback* leads through a file with *path* in its own, and a function in it."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if path in code.co_filename.replace("\\", "/") and function in ("", code.co_name):
            return True
        traceback = traceback.tb_next
    return False
