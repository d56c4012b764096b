"""The step of a model that runs with other levers, recorded on a fake copy; and which may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConflictError
from hf_pyao.integrations.conflicts import check_other_checkpointing
from hf_pyao.integrations.model_copy import CopiedStep
from hf_pyao.integrations.quiet import quiet
from hf_pyao.integrations.sharding import KnownSharding
from hf_pyao.integrations.step_recording import record_fake_step
from hf_pyao.levers import Levers, or_refuse
from hf_pyao.planning.lever_choice import LeverRoom
from hf_pyao.planning.plan_request import room_of
from hf_pyao.planning.step_program import StepProgram


class LeverRecorder:
    """Records a step with other levers.

    Args:
        make_step: makes the step of a fake copy of the model.
        layers: ``PyAOConfig.layers``.
    """

    def __init__(self, make_step: Callable[[], CopiedStep], layers: Sequence[str]) -> None:
        self._make_step = make_step
        self._layers = layers

    def __call__(self, levers: Levers) -> StepProgram:
        """Return the step.

        Raises:
            LeversRefusedError: it cannot be had with these, whatever the reason.
        """

        def record() -> StepProgram:
            with quiet():
                recorded, _ = record_fake_step(
                    self._make_step(), levers=levers, layers=self._layers, must_run_again=True
                )
            return recorded.whole()

        return or_refuse(record)


def room_for(config: PyAOConfig, model: nn.Module) -> LeverRoom:
    """Return which levers policy ``auto`` may choose for *model* as it is now."""
    room = room_of(config)
    if not room.segments:
        return room
    try:
        check_other_checkpointing(model, 1)
    except ConflictError:
        why = "the layers are checkpointed already (gradient checkpointing is on)"
        return dataclasses.replace(room, segments=False, why_no_segments=why)
    if KnownSharding().reason_to_run_alone(model) is not None:
        return dataclasses.replace(room, longest_segment=1)
    return room
