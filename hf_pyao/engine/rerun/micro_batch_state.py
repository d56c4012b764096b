"""Notes what a micro-batch may change, and undoes it where that is possible.

A micro-batch that did not fit is undone before it runs again; a step that is only tried is undone
at its end.

[Note: What can be undone]
- A gradient that did not exist when the micro-batch began is removed.
- A gradient that was not changed stays. If another tensor has replaced it, it is put back.
- A sum that backward has added to cannot be undone. It is already right, if the next try adds
  nothing to it: see ``added_gradients``.
- Attributes of modules and buffers are put back (``module_state``). Where a container, an object,
  an array or hooks have changed, or an attribute holds a generator, nothing can be undone.
- Buffers and tensors in attributes, up to 1 MiB each, are copied before each micro-batch, and put
  back. A larger one that was written cannot be put back.
- The default random generators are put back.
- A micro-batch changes no parameters. If it did (by an optimizer that steps in backward), nothing
  can be undone. Versions show it. Hooks on parameters, and those of modules that run in backward,
  may take gradients away, or step by them; if there are any, no backward can be undone.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_pyao.engine.rerun.generators import RandomState, accelerators_in
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.transfer.layout import has_storage

_GRADIENT = operator.attrgetter("grad")


class MicroBatchState:
    """What a micro-batch begins with: gradients, state of modules, random numbers.

    One is made before every micro-batch, so making it must be quick.

    Args:
        model: what is known of the model's modules.

    Attributes:
        devices: those that the model is on, the CPU apart.
        parameters: the model's, as leaves of graphs.
        added: parameters to whose gradients backward has added, and those; known by
            :meth:`reason_not_undone`.
        has_written: True if any gradient was written; known likewise.
    """

    def __init__(self, model: ModuleState) -> None:
        self._model = model
        self._state = StateOfCall(model, clones_all=True)
        parameters = self._state.parameters
        self.devices = accelerators_in(each.device for each in parameters)
        self._random = RandomState(self.devices)
        self.parameters = [each for each in parameters if each.is_leaf]
        # Weakly: a gradient that is deleted meanwhile frees its memory.
        self._gradients = [
            None if each.grad is None else (weakref.ref(each.grad), each.grad._version)
            for each in self.parameters
        ]
        self.added: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.has_written = False

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Hold the gradients meanwhile, and let the parameters have none."""
        gradients = list(map(_GRADIENT, self.parameters))
        try:
            for parameter in self.parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    # ---- undoing it ----------------------------------------------------------------------------

    def reason_not_undone(self, *, after_backward: bool, in_backward: bool) -> str:
        """Look at what has changed; say why it cannot be undone, or return an empty string.

        Args:
            after_backward: whether a backward has run in it, to its end or not.
            in_backward: whether it has failed in a backward.
        """
        self.added.clear()
        if reason := self._state.reason_not_undone():
            return reason
        for parameter, noted in zip(self.parameters, self._gradients, strict=True):
            if after_backward and has_hooks(parameter):
                return "hooks on parameters take up the gradients as they come"
            reason = self._look_at_gradient(parameter, noted, in_backward=in_backward)
            if reason:
                return reason
        if after_backward and any(map(has_hooks, self._model.modules())):
            return "hooks on modules run in backward, and may step an optimizer"
        if self.added and self._share_storages():
            return "gradients that were there before lie in one buffer, and some have changed"
        return ""

    def _look_at_gradient(
        self,
        parameter: nn.Parameter,
        noted: tuple[weakref.ref[torch.Tensor], int] | None,
        *,
        in_backward: bool,
    ) -> str:
        gradient = parameter.grad
        if noted is None:
            self.has_written |= gradient is not None
            return ""
        before, version = noted[0](), noted[1]
        if before is None:
            return "it let go of gradients that were there before, as zero_grad() does"
        if before._version == version:
            self.has_written |= before is not gradient
            return ""
        self.has_written = True
        if before is not gradient or before._version != version + 1 or not in_backward:
            return "it changed gradients that were there before, and not by one backward alone"
        self.added.append((parameter, gradient))
        return ""

    def _share_storages(self) -> bool:
        """Say whether gradients lie in one storage, and so have one version together."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        plain = [gradient for gradient in gradients if has_storage(gradient)]
        storages = {g.untyped_storage()._cdata for g in plain if type(g) is torch.Tensor}
        return len(storages) != len(plain)

    def undo(self) -> None:
        """Put back gradients, the state of modules and random numbers, as far as possible."""
        for parameter, noted in zip(self.parameters, self._gradients, strict=True):
            before = None if noted is None else noted[0]()
            if parameter.grad is not before and (noted is None or before is not None):
                parameter.grad = before
        self._state.undo()
        self._random.restore()


def has_hooks(of: nn.Parameter | nn.Module) -> bool:
    """Say whether a parameter or module has hooks that run in backward."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks", "_backward_pre_hooks")
    return any(getattr(of, name, None) for name in names)
