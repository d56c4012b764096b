"""What changes the step itself, as one table: each row is recorded only where it may be needed.

The cost model of a row is its recording. A row says which settings of the levers it stands for, and
where they are free. Rows that come first take the least time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_pyao.engine.recompute.kept_attention import KERNELS
from hf_pyao.levers import Levers
from hf_pyao.plan.options.chosen_levers import LeverRoom
from hf_pyao.plan.options.group_plan import TARGET_BYTES as GROUP_BYTES
from hf_pyao.plan.options.tile_plan import MIN_TILE_TOKENS
from hf_pyao.plan.step.step_program import StepProgram


@dataclass(frozen=True)
class LeverRow:
    """A way to have another step."""

    name: str
    is_free: Callable[[LeverRoom], bool]
    """Whether it may be chosen."""
    install: Callable[[Levers, StepProgram, LeverRoom], Iterator[Levers]]
    """Yields settings, from those that are best so far and their step."""


def without_segments(levers: Levers) -> Levers:
    """Return *levers* where no layer runs again as a whole."""
    return dataclasses.replace(
        levers, checkpoint_every=0, checkpoint_nested=False, save_attention=False
    )


def _no_segments(levers: Levers, program: StepProgram, room: LeverRoom) -> Iterator[Levers]:
    yield without_segments(levers)


def _groups(levers: Levers, program: StepProgram, room: LeverRoom) -> Iterator[Levers]:
    kernels = (each for each in program.operations if "flash_attention" in each.name)
    workspace_bytes = max((each.workspace_bytes for each in kernels), default=0)  # at most
    if levers.attention_groups == "off" and workspace_bytes > GROUP_BYTES:
        yield dataclasses.replace(levers, attention_groups="auto")


def _single_layers(levers: Levers, program: StepProgram, room: LeverRoom) -> Iterator[Levers]:
    single = dataclasses.replace(levers, checkpoint_every=1, checkpoint_nested=False)
    has_kernels = any(operation.name in KERNELS for operation in program.operations)
    if not room.attention:
        yield single
        return
    for save in (True, False) if has_kernels else (False,):
        yield dataclasses.replace(single, save_attention=save)


def _longer(levers: Levers, program: StepProgram, room: LeverRoom) -> Iterator[Levers]:
    """Yield segments of 2, 4, ... layers: less leaves, and less is on the host."""
    most = max(1, program.num_layers // 2)
    if room.longest_segment is not None:
        most = min(most, room.longest_segment)
    length = 2
    while length <= most:
        for nested in (False, True) if room.nested else (levers.checkpoint_nested,):
            yield dataclasses.replace(levers, checkpoint_every=length, checkpoint_nested=nested)
        length *= 2


def _more_tiles(levers: Levers, program: StepProgram, room: LeverRoom) -> Iterator[Levers]:
    """Yield twice as many tiles, and so on, as long as a tile keeps matrix products efficient."""
    if program.num_tiles < 2 or levers.mlp_tiles != "auto":
        return
    most = program.num_tiled_tokens // MIN_TILE_TOKENS
    for number in (2**power for power in range(1, 31)):
        if program.num_tiles < number <= most:
            yield dataclasses.replace(levers, mlp_tiles=number)


ROWS = (
    LeverRow("attention in groups", lambda room: room.groups, _groups),
    LeverRow("each layer runs again", lambda room: room.segments, _single_layers),
    LeverRow("segments of several layers", lambda room: room.segments, _longer),
    LeverRow("more tiles", lambda room: room.tiles, _more_tiles),
    LeverRow("attention in groups", lambda room: room.groups, _groups),
)
"""In the order in which they are looked at. Groups come again for the segments that were found."""

PLAIN_ROW = LeverRow("no layer runs again", lambda room: room.segments, _no_segments)
"""For a configuration whose layers run again unless a plan says otherwise."""
