"""The memory-lean head loss on a transformers model: training forwards without the logits.

:func:`install_head_loss` exchanges ``model.forward`` for one that lets the head put its call off
(model/head/deferred.py, [Note: Deferred logits]) in forwards that are given labels, in training
mode, with gradients on. Everything else, and every model whose head is not understood, runs as
before. Facts and bounds: HEAD_LOSS.md beside this file.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_pyao.config import HEAD_LOSS_NAMES
from hf_pyao.errors import ConfigError, unknown_name, warn
from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.head.output_head import understand_head
from hf_pyao.model.head.put_off_call import HeadRun, PutOffCall
from hf_pyao.model.losses.chunking import ChunkPlan
from hf_pyao.model.losses.cross_entropy import Chunks, LinearChunks, ModuleChunks
from hf_pyao.model.losses.options import LossOptions
from hf_pyao.model.losses.stand_in import in_full
from hf_pyao.model.map.wrappers import is_compiled_whole, unwrap_model
from hf_pyao.model.patching.exchanged_forwards import ExchangedForwards, Forward
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
from hf_pyao.training_engines import is_compiled

logger = logging.getLogger(__name__)

_HANDLE = "_pyao_head_loss"

_COMPILED = (
    "it is compiled as a whole, and compiled code holds the logits; compile its layers instead "
    "(torch_compile with regional compilation, or layer.compile())"
)
_NOT_CALLED = (
    "its forward does not call its head: something else computes the loss from hidden states "
    "already (Liger's patch, say), and hf_pyao leaves it alone"
)
_OTHER_THREAD = (
    "a training forward of another thread was under way: one at a time is without its logits"
)
_TRL = "TRL's fused LM head computes the loss from hidden states, and hf_pyao leaves it alone"
_READ = (
    "something reads outputs.logits after training forwards ({reader}): they are computed for it "
    "beside the chunked loss, which costs their memory and one more matrix product"
)
_NO_READERS = "hf_pyao", "torch"


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
    name = type(unwrap_model(model)).__name__
    handle = HeadLoss(name, mode, chunk_tokens, budget_bytes, without_gradients)
    if mode == "off":
        return handle
    target = _find_model(model)
    if target is None:
        handle.stand_back("it takes no labels, or has no output head")
        return handle
    if is_compiled_whole(model) or is_compiled(target):
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


class HeadLoss(LeftBehind):
    """A head loss on a model; made by :func:`install_head_loss`. Holds the model weakly.

    Of several training forwards with gradients at a time the first is served.

    Args:
        name: of the model's class.
        mode: as in :func:`install_head_loss`.
        chunk_tokens: as in :func:`install_head_loss`.
        budget_bytes: as in :func:`install_head_loss`.
        without_gradients: as in :func:`install_head_loss`.
    """

    def __init__(
        self,
        name: str,
        mode: str,
        chunk_tokens: int | None,
        budget_bytes: int | None,
        without_gradients: bool,
    ) -> None:
        self.mode = mode
        self.settings = (mode, chunk_tokens, budget_bytes, without_gradients)
        self.said: dict[str, None] = {}
        """What was said about it so far, such as why the model keeps its own loss; each once."""
        self.counts: Counter[str] = Counter()
        """``chunked``: forwards whose loss was computed without the logits. ``own``: training
        forwards with labels that kept the model's own loss. ``read``: logits that somebody read
        although the loss was computed without them."""
        self._last_plan: ChunkPlan | None = None
        self._name = name
        self._sizes: dict[str, Any] = {"chunk_tokens": chunk_tokens, "budget_bytes": budget_bytes}
        self._without_gradients = without_gradients
        self._target: Callable[[], nn.Module | None] = lambda: None
        self._labels_position = 0
        self._exchanged = ExchangedForwards()

    @property
    def is_installed(self) -> bool:
        """Whether training forwards of the model come through here."""
        return self._target() is not None

    def install(self, target: nn.Module) -> None:
        """Exchange ``target.forward``. Called once, by :func:`install_head_loss`."""
        self._target, self._name = weakref.ref(target), type(target).__name__
        head = understand_head(_output_embeddings(target))
        if isinstance(head, str):
            self.stand_back(head)
        # Of the class: wrappers around an instance's forward may hide its parameters.
        names = list(inspect.signature(type(target).forward).parameters)
        self._labels_position = names.index("labels") - 1
        exchange(target, _HANDLE, self)

    def uninstall(self) -> None:
        """Give the model its own ``forward`` back. Harmless if done already, wholly or in part."""
        if (target := self._target()) is not None:
            self._exchanged.clear()
            give_back(target, _HANDLE, self)
        self._target = lambda: None

    def stand_back(self, reason: str) -> None:
        """Say once that the model keeps its own loss, and why."""
        level = logging.INFO if self.mode == "auto" else logging.WARNING
        self._say(f"it keeps its own loss: {reason}", level)

    def _say(self, message: str, level: int) -> None:
        if message not in self.said:
            self.said[message] = None
            warn(logger, "head-loss-left", "Head loss of %s: %s.", self._name, message, level=level)

    def describe(self) -> str:
        """Return one line about what the head loss does, with the last chunk sizes."""
        plan = self._last_plan
        parts = [f"head_loss={self.mode}: {self._name}"]
        if not self.is_installed:
            parts.append("not installed")
        if plan is not None:
            parts.append(
                f"{plan.num_tokens} tokens in {plan.num_chunks} chunks of up to "
                f"{plan.chunk_tokens}, {plan.chunk_bytes / 2**20:.1f} MiB each"
            )
        return "; ".join([*parts, *self.said])

    def metrics(self) -> dict[str, float]:
        """Return counts since installation, and the chunks of the last loss."""
        plan = self._last_plan
        return {
            "head_loss_num_chunked": float(self.counts["chunked"]),
            "head_loss_num_own": float(self.counts["own"]),
            "head_loss_num_logits_read": float(self.counts["read"]),
            "head_loss_num_chunks": float(plan.num_chunks if plan else 0),
            "head_loss_chunk_tokens": float(plan.chunk_tokens if plan else 0),
            "head_loss_chunk_bytes": float(plan.chunk_bytes if plan else 0),
        }

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Run the model's own forward *own*, its head put off if only the loss is wanted."""
        if not self._wants_only_loss(module, args, kwargs):
            return own(*args, **kwargs)
        head = understand_head(_output_embeddings(module))
        if self._exchanged.is_active and torch.is_grad_enabled():
            head = _OTHER_THREAD
        elif kwargs.get("fused_lm_head"):
            head = _TRL
        if isinstance(head, str):
            self.stand_back(head)
            self.counts["own"] += 1
            return own(*args, **kwargs)
        run = HeadRun(
            head,
            self._exchanged,
            self._compute_loss,
            self._note_reading,
            kwargs.get("num_items_in_batch"),
            self._without_gradients,
        )
        calls: list[PutOffCall] = []
        answers = [(head.inner, _put_off(run, calls))]
        if (embedding := head.tied_embedding(module)) is not None:
            answers.append((embedding, run.embed(embedding)))
        outputs = self._exchanged.during(answers, own, *args, **kwargs)
        return self._finish(outputs, calls)

    def _wants_only_loss(self, target: nn.Module, args: Args, kwargs: Kwargs) -> bool:
        """Whether this is a training forward with labels, and not one inside of another."""
        if not target.training or not (self._without_gradients or torch.is_grad_enabled()):
            return False
        position = self._labels_position
        labels = kwargs.get("labels", args[position] if len(args) > position else None)
        return labels is not None and not self._exchanged.answers

    def _finish(self, outputs: Any, calls: list[PutOffCall]) -> Any:
        """Compute logits that are handed out without a loss having been taken of them."""
        chunked = bool(calls) and all(call.loss_taken for call in calls)
        self.counts["chunked" if chunked else "own"] += 1
        if not calls:
            self.stand_back(_NOT_CALLED)
        for call in calls:
            call.end()

        why = "its outputs, without a loss"
        if not chunked and isinstance(outputs, dict):
            for key, value in list(outputs.items()):
                if isinstance(value, DeferredLogits):
                    outputs[key] = value.materialize(why)
        elif not chunked and isinstance(outputs, tuple):
            outputs = in_full(outputs, why)
        for call in calls:
            if not call.loss_taken:
                self.stand_back(f"before its loss it needs the logits for {call.computed_for}")
        return outputs

    def _note_reading(self) -> None:
        self.counts["read"] += 1
        if self.counts["read"] > 1:
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in _NO_READERS:
            frame = frame.f_back
        reader = f"{frame.f_code.co_name} in {frame.f_code.co_filename}, line {frame.f_lineno}"
        self._say(_READ.format(reader=reader), logging.WARNING)

    def _compute_loss(
        self, call: PutOffCall, hidden: Tensor, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute the loss inside the head's own call, where its weight is whole."""
        run, inner = call.run, cast("Any", call.run.head.inner)
        factor = _expected_factor(run.num_items, labels) if options["reduction"] == "sum" else None
        given = LossOptions(**self._sizes, **options, expected_factor=factor)
        sizes: dict[str, Any] = {"num_vocab": call.num_vocab, "compute_dtype": call.dtype}
        weight, waiting = run.tied or (inner.weight, None)
        chunks: Chunks
        if run.head.is_linear:
            parameters = [weight] if inner.bias is None else [weight, inner.bias]
            chunks = LinearChunks(hidden, parameters, labels, given, **sizes)
        else:
            of_module = hidden, run.head.trainable(), labels, given
            chunks = ModuleChunks(*of_module, **sizes, project=call.own_forward)
        self._last_plan = chunks.plan
        return chunks.loss(waiting)


def _put_off(run: HeadRun, calls: list[PutOffCall]) -> Forward:
    """Return a ``forward`` for the head that projects nothing; it adds its calls to *calls*."""

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = isinstance(hidden, Tensor) and not (args or kwargs)
        is_plain = is_plain and (run.without_gradients or torch.is_grad_enabled())
        if not is_plain or hidden.numel() == 0 or not run.head.has_plain_parameters:
            return run.head.own_forward()(hidden, *args, **kwargs)
        calls.append(PutOffCall(run, hidden))
        return DeferredLogits(hidden, calls[-1])

    return forward


def _expected_factor(num_items: Tensor | float | None, labels: Tensor) -> Tensor | None:
    """Return what the model most likely multiplies a sum by next; only roundings depend on it."""
    if num_items is None:
        return None
    one = labels.new_ones((), dtype=torch.float32)
    return one / (num_items.to(one.device) if isinstance(num_items, Tensor) else num_items)


def _output_embeddings(model: Any) -> nn.Module | None:
    """Return the head that *model* has now: PEFT and resizing replace it."""
    head: nn.Module | None = model.get_output_embeddings()
    return head
