"""Which layer calls may run again, and why others may not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hf_pyao.engine.recompute.noted_caches import why_not_noted
from hf_pyao.engine.recompute.segment_calls import objects_in
from hf_pyao.engine.rerun.modes import reason_of_modes_and_hooks
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.runtime.lifecycle import COMPILED
from hf_pyao.engine.runtime.tape import Layer
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.training_engines import compiled_part

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names under which transformers' layers get a cache of keys and values, the newest first."""


class Admission:
    """Notes the state of layer calls that may run again, and refuses others.

    Args:
        say: logs a sentence, once for each cause.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self.refused = ""
        """Why a layer did not run again, where it should have; empty if none was refused."""
        self.run_once: dict[Layer, str] = {}
        """Layers whose newest call was refused, and why."""
        self._say = say
        self._states: weakref.WeakKeyDictionary[nn.Module, ModuleState] = (
            weakref.WeakKeyDictionary()
        )
        self._refused_late: set[Layer] = set()
        """Layers of which a call was refused when it ended."""
        self._refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """Layers that do not run again any more, and why."""

    def admit(
        self,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_compiling: bool,
    ) -> StateOfCall | None:
        """Return what a call of *layer* has found; None if it is refused, which is logged."""
        reason = self._refusals.get(module) or reason_of_modes_and_hooks()
        state = self._states.get(module)
        if state is None:
            state = self._states[module] = ModuleState([module], f"layer {layer.fqn!r}")
        reason = reason or _reason_to_refuse(state.modules(), args, kwargs, is_compiling)
        if not reason:
            found = StateOfCall(state)
            reason = found.reason_unknown()
            if not reason:
                self.run_once.pop(layer, None)
                return found
        self._refuse(layer, reason)
        return None

    def refuse_late(self, module: nn.Module, layer: Layer, reason: str, *, is_final: bool) -> None:
        """Record that a call of *layer*, which has ended, cannot run again.

        Args:
            module: the layer.
            layer: the same, for messages.
            reason: why.
            is_final: the next calls cannot either. Else only a second refusal is final: the first
                may be a cache that is filled at first use.
        """
        if is_final or layer in self._refused_late:
            self._refusals[module] = reason
            self._refuse(layer, reason)
        else:
            self._refused_late.add(layer)
            self._say(f"layer {layer.fqn!r} does not run again this time: {reason}", reason)

    def _refuse(self, layer: Layer, reason: str) -> None:
        self.refused = self.run_once[layer] = reason
        self._say(f"layer {layer.fqn!r} does not run again: {reason}", reason)


def hidden_states_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a layer works on: the first argument, or what has that name, or comes first."""
    own = args[0] if args else kwargs.get("hidden_states")
    if isinstance(own, Tensor):
        return own
    if args:
        return None
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def _is_computed(weight: Any) -> bool:
    """Say whether *weight* is what an operation made, and no view of a parameter (as of FSDP1)."""
    is_made = type(weight) is Tensor and weight.grad_fn is not None
    return is_made and not isinstance(weight._base, nn.Parameter)


def _reason_to_refuse(
    modules: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_compiling: bool
) -> str:
    """Say why a layer, the first of *modules*, cannot run again; empty if it can."""
    module = modules[0]
    if is_compiling or compiled_part(module) is not None:
        return f"{COMPILED} saves what it was compiled to save"
    if any(_is_computed(weight) for each in modules for weight in each._parameters.values()):
        return "its weights are computed (torch.func.functional_call), and gone after its forward"
    hidden = hidden_states_of(args, kwargs)
    if hidden is None or not has_storage(hidden):
        return "its first argument is no tensor, or a sparse or nested one"
    for name, value in (*enumerate(args), *kwargs.items()):
        why = why_not_noted(value)
        if why:
            advice = "; call the model with use_cache=False to change that"
            return (
                f"argument {name!r} looks like a cache (it has `update`) and {why}"
                f"{advice if name in _CACHES else ''}"
            )
    for given in objects_in((args, kwargs)):
        return f"it is given an object, a {type(given).__name__}, which may change"
    return ""
