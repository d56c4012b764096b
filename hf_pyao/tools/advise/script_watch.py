"""Runs a training script until its first steps are seen, and ends it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer

from hf_pyao.auto.recording.seen_forward import SeenForward, seen_forward
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import is_recomputing
from hf_pyao.errors import NoLayersFoundError, PyAOError
from hf_pyao.hf.micro_batch.trial_step import is_out_of_memory
from hf_pyao.hf.trainer import PyAOTrainerMixin
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import unwrap_parallel
from hf_pyao.text import echo
from hf_pyao.tools.run_script import check_script, run_script


class EnoughSeen(SystemExit):
    """Ends a script; raised where the next forward of its model would begin."""


@dataclass(kw_only=True)
class SeenTraining:
    """What was seen of a training script."""

    model: nn.Module
    """The first model with layers that was called in training, without wrappers."""
    seen: SeenForward
    """Its call with the most elements."""
    num_forwards: int = 0
    """Calls in training that have begun."""
    num_optimizer_steps: int = 0
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Those that have parameters of the model."""
    trainer: Trainer | None = None
    """The script's, if its class is a subclass without :class:`~hf_pyao.PyAOTrainerMixin`."""
    was_ended: bool = False
    """The script was ended where the next forward would have begun."""
    ran_out_of_memory: bool = False
    """The script ended with an out-of-memory error."""

    @property
    def accumulates(self) -> bool:
        """True if an optimizer step takes several micro-batches."""
        num_unfinished = 0 if self.was_ended else 1
        return self.num_forwards > self.num_optimizer_steps + num_unfinished

    def look_around(self) -> None:
        """Look for optimizers and a Trainer, as long as the script has them."""
        own = {id(each) for each in self.model.parameters()}
        for each in gc.get_objects():
            if issubclass(type(each), Trainer) and each.model is self.model:
                is_served = type(each) is Trainer or isinstance(each, PyAOTrainerMixin)
                self.trainer = None if is_served else each
            if not issubclass(type(each), torch.optim.Optimizer) or each in self.optimizers:
                continue
            held = (id(p) for group in each.param_groups for p in group["params"])
            is_wrapper = type(each).__name__ == "AcceleratedOptimizer"  # has the same states
            if not is_wrapper and any(number in own for number in held):
                self.optimizers.append(each)


class ScriptWatch:
    """While active, sees calls of modules, and ends the script after some of them.

    Args:
        num_micro_batches: calls of the model in training that are let through.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.found: SeenTraining | None = None
        self._num_micro_batches = num_micro_batches
        self._most_elements = -1
        self._passed_over: set[int] = set()
        self._patch: Any = None
        self._step_hook: Any = None

    def __enter__(self) -> ScriptWatch:
        """Begin to look at each module that is called."""
        call = nn.Module.__call__

        def seen_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._look(module, args, kwargs)
            return call(module, *args, **kwargs)

        self._patch = mock.patch.object(nn.Module, "__call__", seen_call)
        self._patch.start()
        self._step_hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking."""
        self._patch.stop()
        self._step_hook.remove()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.found is not None:
            self.found.num_optimizer_steps += 1

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self.found is None:
            if id(module) in self._passed_over or is_recomputing():
                return
            model = unwrap_parallel(module)
            try:
                find_layers(model)
            except NoLayersFoundError:
                self._passed_over.add(id(module))
                return
            self.found = SeenTraining(model=model, seen=seen_forward(args, kwargs))
        if unwrap_parallel(module) is self.found.model:
            self._note(self.found, module, args, kwargs)

    def _note(
        self,
        found: SeenTraining,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if module is not found.model:
            return  # a wrapper, which calls the model next
        if not found.optimizers:
            found.look_around()
        if found.num_forwards == self._num_micro_batches:
            found.was_ended = True
            raise EnoughSeen(0)
        found.num_forwards += 1
        num_elements = max((each.numel() for each in tensors_in((args, kwargs))), default=0)
        if num_elements > self._most_elements:
            self._most_elements = num_elements
            found.seen = seen_forward(args, kwargs)


def watched(
    script: str, arguments: Sequence[str], num_micro_batches: int, *, is_module: bool
) -> SeenTraining:
    """Run a script until its first steps are seen; return them.

    Args:
        script: a Python file, or the name of a module.
        arguments: its own arguments.
        num_micro_batches: how many forwards of the model in training are let through.
        is_module: *script* names a module.

    Raises:
        ConfigError: there is no such script.
        PyAOError: it ended, or trains no model with layers. What the script itself raises is
            raised again, except an out-of-memory error after the model was called.
    """
    check_script(script, is_module=is_module)
    watch = ScriptWatch(num_micro_batches)
    with watch:
        try:
            run_script(script, arguments, is_module=is_module)
        except EnoughSeen:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except Exception as error:
            if watch.found is None or not is_out_of_memory(error):
                raise
            watch.found.ran_out_of_memory = True
    if watch.found is None:
        raise PyAOError(
            f"{echo(script)} ended, and no model with layers was called in training: there is no "
            "step to advise on. Check that the arguments let it train, and that the model is in "
            "training mode (model.train()). Of a model that is not of transformers, the layers "
            "have to be in one nn.ModuleList.",
            key="nothing-advised",
        )
    return watch.found
