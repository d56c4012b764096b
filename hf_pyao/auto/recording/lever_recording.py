"""Records a running model's step with other levers, on a fake copy, where that is possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from hf_pyao.auto.install.conflicts import check_other_checkpointing
from hf_pyao.auto.recording.model_copy import CopiedStep, is_of_transformers
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.engine.rerun.modes import reason_of_modes_and_hooks
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.errors import ConflictError
from hf_pyao.levers import Levers, or_refuse
from hf_pyao.model.map.module_map import find_layers, is_made_to_run_again
from hf_pyao.model.map.sharding import KnownSharding
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.plan.options.chosen_levers import LeverRoom
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.training_engines import compiled_part


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
            step = self._make_step()
            recorded, _ = record_fake_step(step, levers=levers, layers=self._layers, is_other=True)
            return recorded.whole()

        return or_refuse(record)


def room_for(room: LeverRoom, model: nn.Module, layers: Sequence[str] = ()) -> LeverRoom:
    """Return which of the levers in *room* may be chosen for *model* as it is now.

    Args:
        room: what the configuration leaves open.
        model: what is trained.
        layers: ``PyAOConfig.layers``.
    """
    if not room.segments:
        return room
    if compiled_part(model) is not None:
        why = "compiled code saves what it was compiled to save"
        return dataclasses.replace(room, segments=False, why_no_segments=why)
    try:
        check_other_checkpointing(model, 1)
    except ConflictError:
        why = "the layers are checkpointed already (gradient checkpointing is on)"
        return dataclasses.replace(room, segments=False, why_no_segments=why)
    why = _why_not_again(model, layers)
    if why:
        return dataclasses.replace(room, segments=False, why_no_segments=why)
    if KnownSharding().reason_to_run_alone(model) is not None:
        return dataclasses.replace(room, longest_segment=1)
    return room


def num_hooks_in(model: nn.Module) -> int:
    """Count the forward hooks of all modules of *model*, ours too: a quick look for new ones."""
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def _why_not_again(model: nn.Module, named: Sequence[str]) -> str:
    """Say why layers are not to run again unless the user asks for it; empty if they may.

    A layer of any class may keep state that no one sees. Those that are made for checkpointing do
    not; and a hook of the user's should be called as often as without a plan.
    """
    of_modes = reason_of_modes_and_hooks()
    if of_modes:
        return of_modes
    for path, layer in find_layers(model, named).layers:
        if not is_made_to_run_again(layer):
            return (
                f"layer {path!r} is a {class_name(layer)}, which is not known to be made for "
                "checkpointing; give checkpoint_every to have it run again"
            )
        for module in layer.modules():
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            if not all(isinstance(each, ModelHook) or is_of_transformers(each) for each in hooks):
                return (
                    f"a hook on the {class_name(module)} in layer {path!r} would be called twice; "
                    "give checkpoint_every if it may be"
                )
    return ""
