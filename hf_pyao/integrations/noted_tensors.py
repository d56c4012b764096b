"""What a micro-batch may change in a model, noted when it begins, and whether it can be undone.

[Note: What can be undone]
- A gradient that was not there is removed.
- One that was there and was not touched needs nothing; one in whose place another was put comes
  back.
- One that backward has added to cannot be taken apart again. The sum is the right one, though, if
  the next try adds nothing to it: see ``added_gradients``.
- Buffers are copied before, but only those that are known to change: which these are is seen by
  comparing all of them over the first micro-batch, since kernels (batch norm's) change some without
  a version telling. One that changes later for the first time cannot be brought back.
- Parameters never change in a micro-batch. Where they did (an optimizer that steps in backward),
  nothing can be undone.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

_GRADIENT = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")


class ModelTensors:
    """A model's parameters and buffers; found once, since looking for them takes long.

    Args:
        model: held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.is_leaf]
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.devices = sorted(
            {p.device for p in parameters if p.device.type not in ("cpu", "meta")}, key=str
        )
        """Those that the model is on, the CPU apart."""
        self.buffers = [
            (module._buffers, name) for module in model.modules() for name in module._buffers
        ]
        """Dictionary and name of each; modules exchange what is there."""
        self.changing: set[tuple[int, str]] | None = None
        """Buffers that micro-batches change; None before one has shown which."""


class NotedBuffer(NamedTuple):
    """A buffer as it was."""

    place: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        """True if its module has another one by now, or a version tells of a change."""
        return self.place.get(self.name) is not self.buffer or self.version != self.buffer._version


class NotedTensors:
    """A model's tensors when a micro-batch began.

    Made before every micro-batch, so that what it does is written for speed.

    Args:
        tensors: the model's.
    """

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._parameters = [p for ref in tensors.parameters if (p := ref()) is not None]
        self._versions = list(map(_VERSION, self._parameters))
        self._gradients, self._gradient_versions = _note(list(map(_GRADIENT, self._parameters)))
        self._buffers = [] if not tensors.buffers else self._note_buffers()
        self.added: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Parameters to whose gradients backward has added, and those; known by
        :meth:`reason_not_undone`."""
        self.has_written = False
        """True if any gradient was written; known likewise."""

    def _note_buffers(self) -> list[NotedBuffer]:
        changing = self._tensors.changing
        noted = []
        for place, name in self._tensors.buffers:
            buffer = place.get(name)
            if buffer is None:
                continue
            copy = None
            if (changing is None or (id(place), name) in changing) and _is_plain(buffer):
                # To the host where all are copied, and may be many.
                copy = buffer.detach().to("cpu" if changing is None else buffer.device, copy=True)
            noted.append(NotedBuffer(place, name, buffer, buffer._version, copy))
        return noted

    def learn(self) -> None:
        """See which buffers the micro-batch, which is over, has changed, if that is not known."""
        if self._tensors.changing is not None:
            return
        self._tensors.changing = {
            (id(noted.place), noted.name)
            for noted in self._buffers
            if noted.is_changed
            or (noted.copy is not None and not torch.equal(noted.buffer.cpu(), noted.copy))
        }

    # ---- after a failure -----------------------------------------------------------------------

    def reason_not_undone(self, model: nn.Module, *, in_backward: bool) -> str:
        """Look at what has changed; say why it cannot be undone, or return an empty string.

        Args:
            model: the model, as it is now.
            in_backward: whether the micro-batch has failed in a backward.
        """
        self.added.clear()
        for parameter, version, gradient, gradient_version in zip(
            self._parameters,
            self._versions,
            self._gradients,
            self._gradient_versions,
            strict=True,
        ):
            if parameter._version != version:
                return "parameters were changed in it, as by an optimizer that steps in backward"
            if in_backward and parameter._post_accumulate_grad_hooks:
                return "hooks on parameters take up the gradients as they come"
            reason = self._look_at_gradient(
                parameter, gradient, gradient_version, in_backward=in_backward
            )
            if reason:
                return reason
        if self.added and self._share_storages():
            return "gradients that were there before lie in one buffer, and some have changed"
        known = self.known_ids
        if any(id(p) not in known and p.grad is not None for p in model.parameters()):
            return "the model has parameters that were not there before"
        for buffer in self._buffers:
            if buffer.buffer._version != buffer.version and buffer.copy is None:
                return f"it changed buffer {buffer.name!r}, which had not changed before"
        return ""

    def _look_at_gradient(
        self,
        parameter: nn.Parameter,
        noted: weakref.ref[torch.Tensor] | None,
        version: int,
        *,
        in_backward: bool,
    ) -> str:
        gradient = parameter.grad
        if noted is None:
            self.has_written |= gradient is not None
            return ""
        before = noted()
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
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        storages = {g.untyped_storage()._cdata for g in gradients if type(g) is torch.Tensor}
        return len(storages) != len(gradients)

    @property
    def known_ids(self) -> set[int]:
        """The ids of the parameters."""
        return {id(parameter) for parameter in self._parameters}

    def undo(self) -> None:
        """Bring gradients and buffers back, as far as they can be."""
        for parameter, noted in zip(self._parameters, self._gradients, strict=True):
            before = None if noted is None else noted()
            if parameter.grad is not before and (noted is None or before is not None):
                parameter.grad = before
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.place[buffer.name] = buffer.buffer
                if buffer.copy is not None:
                    buffer.buffer.copy_(buffer.copy)


def _note(
    gradients: list[torch.Tensor | None],
) -> tuple[Sequence[weakref.ref[torch.Tensor] | None], Sequence[int]]:
    """Return weak references on *gradients*, and their versions.

    Weak ones, so that whoever lets go of a gradient meanwhile gets its memory.
    """
    if gradients and gradients[0] is not None:
        try:  # mostly all are there, or none is
            return list(map(weakref.ref, gradients)), list(map(_VERSION, gradients))  # type: ignore[arg-type]
        except (TypeError, AttributeError):
            pass
    return (
        [None if gradient is None else weakref.ref(gradient) for gradient in gradients],
        [0 if gradient is None else gradient._version for gradient in gradients],
    )


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.device.type != "meta"
