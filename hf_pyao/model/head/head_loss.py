"""The memory-lean head loss on a transformers model: training forwards without the logits.

:func:`install_head_loss` exchanges ``model.forward`` for one that lets the head put its call off
(model/head/deferred.py, [Note: Deferred logits]) in forwards that are given labels, in training
mode, with gradients on. Everything else, and every model whose head is not understood, runs as
before. Facts and bounds: HEAD_LOSS.md beside this file.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hf_pyao.config import HEAD_LOSS_NAMES
from hf_pyao.errors import ConfigError, unknown_name, warn
from hf_pyao.model.head.head_forward import HeadForward, output_embeddings
from hf_pyao.model.head.output_head import NotUnderstood, understand_head
from hf_pyao.model.head.smoothing import Smoothing
from hf_pyao.model.map.wrappers import unwrap_model, wrapped_module
from hf_pyao.model.patching.lasting_forward import (
    Args,
    Kwargs,
    LeftBehind,
    Method,
    exchange,
    give_back,
    is_exchanged,
)
from hf_pyao.settings.removed import refuse_removed
from hf_pyao.training_engines import compiled_inner, is_compiled_in_place

logger = logging.getLogger(__name__)

_HANDLE = "_pyao_head_loss"

_COMPILED = (
    "it is compiled as a whole, and compiled code holds the logits; compile its layers instead "
    "(torch_compile with regional compilation, or layer.compile())"
)


def install_head_loss(
    model: nn.Module,
    mode: str = "auto",
    *,
    chunk_tokens: int | None = None,
    budget_bytes: int | None = None,
    without_gradients: bool = False,
) -> HeadLoss:
    """Let training forwards of *model* compute their loss without the logits.

    Works alone: no offloading is needed. Call it on the bare model or on what DDP, FSDP, PEFT or
    ``torch.compile`` made of it, before or after they did. Installing twice with the same settings
    returns the first handle.

    Args:
        model: a transformers model with an output head, wrapped or not.
        mode: ``"auto"`` (in chunks where the head is understood), ``"chunked"`` (the same, with a
            warning instead of a note where it is not), or ``"off"``.
        chunk_tokens: most tokens per chunk; None: as many as *budget_bytes* hold.
        budget_bytes: bytes that one chunk may take; None: a 24th of the device's memory, between
            256 MiB and 2 GiB, or 512 MiB on a CPU.
        without_gradients: also where gradients are off, as in the passes of zeroth order.

    Raises:
        ConfigError: an unknown mode, or a handle with other settings is installed already.
        ConflictError: *model* is wrapped in ``nn.DataParallel``.
    """
    refuse_removed("head_loss", "mode", mode)
    if mode not in HEAD_LOSS_NAMES:
        raise unknown_name("head_loss", mode, HEAD_LOSS_NAMES)
    handle = HeadLoss(
        model,
        mode,
        chunk_tokens=chunk_tokens,
        budget_bytes=budget_bytes,
        without_gradients=without_gradients,
    )
    if mode == "off":
        return handle
    target = _find_model(model)
    if target is None:
        handle.stand_back("it takes no labels, or has no output head")
        return handle
    if _is_compiled(model, target):
        handle.stand_back(_COMPILED)
    installed: HeadLoss | None = target.__dict__.get(_HANDLE)
    if installed is None or not is_exchanged(target):  # never, or interrupted
        handle.install(target)
        return handle
    if installed.settings != handle.settings:
        raise ConfigError(
            f"{type(target).__name__} has a head loss with (mode, chunk_tokens, budget_bytes, "
            "without_gradients) = "
            f"{installed.settings} already; asked for {handle.settings}. Call uninstall() on the "
            "first handle, or ask for the same.",
            key="attached-already",
        )
    return installed


def _find_model(model: nn.Module) -> nn.Module | None:
    """Return the outermost module that has an output head and takes labels, inside all wrappers."""
    for module in unwrap_model(model).modules():
        getter = getattr(module, "get_output_embeddings", None)
        if getter is None or getter() is None:
            continue
        if "labels" in inspect.signature(type(module).forward).parameters:
            return module
    return None


def _is_compiled(model: nn.Module, target: nn.Module) -> bool:
    """Whether *target* is compiled as a whole, by itself or by a wrapper around it."""
    wrapper: nn.Module | None = model
    while wrapper is not None and wrapper is not target:
        if compiled_inner(wrapper) is not None:
            return True
        wrapper = wrapped_module(wrapper)
    return is_compiled_in_place(target)


class HeadLoss(LeftBehind):
    """A head loss on a model; made by :func:`install_head_loss`. Holds the model weakly.

    Args:
        model: what the caller passed.
        mode: as in :func:`install_head_loss`.
        chunk_tokens: as in :func:`install_head_loss`.
        budget_bytes: as in :func:`install_head_loss`.
        without_gradients: as in :func:`install_head_loss`.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: str,
        *,
        chunk_tokens: int | None,
        budget_bytes: int | None,
        without_gradients: bool = False,
    ) -> None:
        self.mode = mode
        self.settings = (mode, chunk_tokens, budget_bytes, without_gradients)
        self._without_gradients = without_gradients
        self._target: weakref.ref[nn.Module] | None = None
        self._labels_position = 0
        self._notes = _Notes(type(unwrap_model(model)).__name__, mode)
        self._head_forward = HeadForward(
            chunk_tokens=chunk_tokens,
            budget_bytes=budget_bytes,
            stand_back=self._notes.stand_back,
            warn=self._notes.warn,
            without_gradients=without_gradients,
        )

    @property
    def is_installed(self) -> bool:
        """Whether training forwards of the model come through here."""
        return self._target is not None and self._target() is not None

    def install(self, target: nn.Module) -> None:
        """Exchange ``target.forward``. Called once, by :func:`install_head_loss`."""
        self._target, self._notes.name = weakref.ref(target), type(target).__name__
        head = understand_head(output_embeddings(target))
        if isinstance(head, NotUnderstood):
            self.stand_back(head.reason)
        # Of the class: wrappers around an instance's forward may hide its parameters.
        names = list(inspect.signature(type(target).forward).parameters)
        self._labels_position = names.index("labels") - 1
        exchange(target, _HANDLE, self)

    def uninstall(self) -> None:
        """Give the model its own ``forward`` back. Harmless if done already, wholly or in part."""
        target = None if self._target is None else self._target()
        if target is not None:
            self._head_forward.release()
            give_back(target, _HANDLE, self)
        self._target = None

    @property
    def said(self) -> tuple[str, ...]:
        """What was said about it so far, such as why the model keeps its own loss."""
        return tuple(self._notes.said)

    def stand_back(self, reason: str) -> None:
        """Say once that the model keeps its own loss, and why."""
        self._notes.stand_back(reason)

    def describe(self) -> str:
        """Return one line about what the head loss does, with the last chunk sizes."""
        plan = self._head_forward.last_plan
        parts = [f"head_loss={self.mode}: {self._notes.name}"]
        if not self.is_installed:
            parts.append("not installed")
        if plan is not None:
            parts.append(
                f"{plan.num_tokens} tokens in {plan.num_chunks} chunks of up to "
                f"{plan.chunk_tokens}, {plan.chunk_bytes / 2**20:.1f} MiB each"
            )
        parts.extend(self._notes.said)
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return counts since installation, and the chunks of the last loss."""
        forward, plan = self._head_forward, self._head_forward.last_plan
        return {
            "head_loss_num_chunked": float(forward.counts["chunked"]),
            "head_loss_num_own": float(forward.counts["own"]),
            "head_loss_num_logits_read": float(forward.counts["read"]),
            "head_loss_num_chunks": float(plan.num_chunks if plan else 0),
            "head_loss_chunk_tokens": float(plan.chunk_tokens if plan else 0),
            "head_loss_chunk_bytes": float(plan.chunk_bytes if plan else 0),
        }

    def smoothing(self, epsilon: float) -> AbstractContextManager[Smoothing]:
        """Smooth the labels of losses that the model computes in this thread inside this context.

        For Trainer's ``label_smoothing_factor``, whose own way needs the logits. ``applied`` on
        what this yields tells afterwards whether the loss was chunked and smoothed; if not, it is
        the model's own, unsmoothed one.
        """
        return self._head_forward.smoothings.opened(epsilon)

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Run the model's own forward *own*, its head put off if only the loss is wanted."""
        target = None if self._target is None else self._target()
        if target is None or not self._wants_only_loss(target, args, kwargs):
            return own(*args, **kwargs)
        return self._head_forward.run(target, own, args, kwargs)

    def _wants_only_loss(
        self, target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether this is a training forward with labels."""
        if not target.training or not (self._without_gradients or torch.is_grad_enabled()):
            return False
        position = self._labels_position
        labels = kwargs.get("labels")
        return labels is not None or (len(args) > position and args[position] is not None)


class _Notes:
    """What was said about a head loss, each message once.

    Args:
        name: of the model's class.
        mode: as in :func:`install_head_loss`.
    """

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.said: dict[str, None] = {}
        self._level = logging.INFO if mode == "auto" else logging.WARNING

    def stand_back(self, reason: str) -> None:
        """Say that the model keeps its own loss, and why."""
        self._say(f"it keeps its own loss: {reason}", self._level)

    def warn(self, message: str) -> None:
        """Log *message* as a warning."""
        self._say(message, logging.WARNING)

    def _say(self, message: str, level: int) -> None:
        if message not in self.said:
            self.said[message] = None
            warn(logger, "head-loss-left", "Head loss of %s: %s.", self.name, message, level=level)
