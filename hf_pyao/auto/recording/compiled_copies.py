"""Compiles a fake copy of a model as the model is compiled, so that it saves the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.auto.recording.sharded_copy import CopyError
from hf_pyao.model.compiled.compiled_calls import (
    CompiledCall,
    Place,
    compile_alike,
    compiled_calls,
    fake_backend,
    new_context,
)
from hf_pyao.model.map.module_map import is_made_to_run_again
from hf_pyao.training_engines import compiled_inner


class CompiledCopies:
    """What of a model is compiled, for its copy.

    Args:
        model: what is copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls = [*compiled_calls(model)]

    def __bool__(self) -> bool:
        """Say whether anything is compiled."""
        return bool(self._calls)

    def note_inner(self, memo: dict[int, Any]) -> None:
        """Have ``copy.deepcopy(model, memo)`` copy what is inside of compiling wrappers.

        Raises:
            CopyError: a backend is not known, or torch cannot run compiled code on fake tensors.
        """
        if not self:
            return
        if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            raise CopyError("this release of torch does not compile while a step is recorded.")
        for call in self._calls:
            if not is_made_to_run_again(call.module):
                what = "a part of a layer" if call.path else "the model"
                raise CopyError(
                    f"{what} is compiled, not layer by layer: what is saved depends on where its "
                    "graphs break."
                )
            _check(call)
        for call in reversed(self._calls):  # the innermost first
            if call.place is Place.WRAPPER:
                memo[id(call.module)] = copy.deepcopy(compiled_inner(call.module), memo)

    def compile(self, model: nn.Module, memo: dict[int, Any]) -> None:
        """Compile the copy *model*, which was made with *memo*."""
        contexts: list[tuple[Any, Mapping[str, Any], Any]] = []

        def context_of(call: CompiledCall) -> Any:
            backend: Any = fake_backend(call.backend)
            known = (each[2] for each in contexts if each[:2] == (backend, call.options))
            found = next(known, None)
            if found is None:
                found = new_context(backend, call.options)
                contexts.append((backend, call.options, found))
            return found

        for call in self._calls:
            own = memo[id(call.module)]
            whole = compile_alike(own, call.place, context_of(call))
            if whole is not own:
                _replace(model, own, whole)


def _check(call: CompiledCall) -> None:
    if fake_backend(call.backend) is None:
        given = getattr(call.backend, "compiler_fn", call.backend)
        name = "one that was not found"
        if given is not None:
            name = getattr(given, "__name__", type(given).__name__)
        raise CopyError(
            f"{call.path!r} is compiled by a backend of which is not known what it saves: {name}."
        )


def _replace(model: nn.Module, own: nn.Module, wrapper: nn.Module) -> None:
    """Put *wrapper* in the place of *own*, wherever *model* has it."""
    for module in [*model.modules()]:
        if module is not wrapper:
            for name, child in module._modules.items():
                if child is own:
                    module._modules[name] = wrapper
