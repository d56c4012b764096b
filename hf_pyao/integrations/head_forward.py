"""One training forward of a model whose head's call is put off until the loss is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.integrations.lazy_outputs import read_lazily, replace_deferred
from hf_pyao.integrations.liger import liger_can, liger_loss
from hf_pyao.integrations.output_head import (
    LossRequest,
    NotUnderstood,
    OutputHead,
    PutOffCall,
    forward_replaced,
    understand_head,
)
from hf_pyao.losses import (
    ChunkPlan,
    DeferredLogits,
    choose_chunk_tokens,
    chunked_linear_cross_entropy,
    chunked_module_cross_entropy,
)
from hf_pyao.losses.chunking import default_budget_bytes, plan_chunks
from hf_pyao.losses.options import autocast_dtype
from hf_pyao.losses.tied_embedding import WaitingGradient, tied_embedding

_NOT_CALLED = (
    "its forward does not call its head: something else computes the loss from hidden states "
    "already (Liger's patch, say), and hf_pyao stands back"
)
_TRL = "TRL's fused LM head computes the loss from hidden states itself, and hf_pyao stands back"

_READ = (
    "something reads outputs.logits after training forwards: they are computed for it beside the "
    "chunked loss, which costs their memory and one more matrix product"
)

Forward = Callable[..., Any]

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that are just their elements; fake ones estimate memory."""


@dataclass
class Smoothing:
    """Label smoothing that is asked for from outside the model."""

    epsilon: float
    """Share of each target that is spread evenly over the vocabulary."""
    applied: bool = False
    """Whether a loss has had it."""


class HeadForward:
    """Runs training forwards, and counts.

    Args:
        use_liger: compute the loss by Liger's kernel where it can.
        chunk_tokens: most tokens per chunk; None: as many as fit the budget.
        budget_bytes: bytes that one chunk may take; None: by the device.
        stand_back: told why a forward keeps the model's own loss.
        note: told what else is worth saying once.
    """

    def __init__(
        self,
        *,
        use_liger: bool,
        chunk_tokens: int | None,
        budget_bytes: int | None,
        stand_back: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.num_chunked = 0
        """Forwards whose loss was computed without the logits."""
        self.num_own = 0
        """Training forwards with labels that kept the model's own loss."""
        self.num_read = 0
        """Logits that somebody read although the loss was computed without them."""
        self.last_plan: ChunkPlan | None = None
        """How the last loss was cut."""
        self.smoothing: Smoothing | None = None
        """What to add to losses that the model takes unsmoothed."""
        self._use_liger = use_liger
        self._chunk_tokens = chunk_tokens
        self._budget_bytes = budget_bytes
        self._stand_back = stand_back
        self._note = note
        self._waiting = WaitingGradient()
        self._num_items: Tensor | float | None = None
        self._is_running = False

    def run(self, model: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run ``own(*args, **kwargs)``, a training forward of *model* that is given labels."""
        if self._is_running:
            return own(*args, **kwargs)
        self._is_running = True
        try:
            return self._run(model, own, args, kwargs)
        finally:
            self._is_running = False

    def _run(self, model: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: Any) -> Any:
        head = understand_head(output_embeddings(model))
        if isinstance(head, NotUnderstood) or kwargs.get("fused_lm_head"):
            self._stand_back(head.reason if isinstance(head, NotUnderstood) else _TRL)
            self.num_own += 1
            return own(*args, **kwargs)
        self._num_items = kwargs.get("num_items_in_batch")
        calls: list[PutOffCall] = []
        with ExitStack() as stack:
            stack.enter_context(forward_replaced(head.inner, self._put_off(head, calls)))
            if (embedding := _tied_embedding(model, head)) is not None:
                stack.enter_context(forward_replaced(embedding, self._embed(embedding)))
            outputs = own(*args, **kwargs)
        return self._finish(outputs, calls)

    def _put_off(self, head: OutputHead, calls: list[PutOffCall]) -> Forward:
        """Return a ``forward`` for the head that projects nothing."""
        own_forward = head.own_forward()

        def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            plain = isinstance(hidden, Tensor) and torch.is_grad_enabled() and not (args or kwargs)
            if not plain or hidden.numel() == 0 or not _has_plain_parameters(head.inner):
                return own_forward(hidden, *args, **kwargs)
            num_vocab, dtype, device = _result_of(head, own_forward, hidden)
            call = PutOffCall(
                head,
                hidden,
                num_vocab=num_vocab,
                dtype=dtype,
                device=device,
                own_forward=own_forward,
                compute_loss=self._compute_loss,
                note_reading=self._note_reading,
            )
            calls.append(call)
            return DeferredLogits(hidden, call)

        return forward

    def _embed(self, embedding: nn.Embedding) -> Callable[[Tensor], Tensor]:
        def forward(ids: Tensor) -> Tensor:
            return tied_embedding(ids, embedding.weight, embedding.padding_idx, self._waiting)

        return forward

    def _finish(self, outputs: Any, calls: list[PutOffCall]) -> Any:
        """Compute logits that are handed out without a loss having been taken of them."""
        chunked = bool(calls) and all(call.loss_taken for call in calls)
        self.num_chunked += chunked
        self.num_own += not chunked

        def replace(logits: DeferredLogits) -> Any:
            keep = logits.tensor is None and chunked
            return logits if keep else logits.materialize("its outputs, without a loss")

        outputs = read_lazily(replace_deferred(outputs, replace))
        if not calls:
            self._stand_back(_NOT_CALLED)
        for call in calls:
            if not call.loss_taken:
                self._stand_back(f"before its loss it needs the logits for {call.computed_for}")
        return outputs

    def _note_reading(self) -> None:
        self.num_read += 1
        self._note(_READ)

    def _compute_loss(self, call: PutOffCall, hidden: Tensor, request: LossRequest) -> Tensor:
        """Compute the loss inside the head's own call, where its weight is whole."""
        inner: Any = call.head.inner
        if self.smoothing is not None and not request.label_smoothing:
            request = dataclasses.replace(request, label_smoothing=self.smoothing.epsilon)
            self.smoothing.applied = True
        if self._use_liger and call.head.is_linear and liger_can(request):
            return liger_loss(hidden, inner.weight, inner.bias, request)
        chunk_tokens = self._plan(call, hidden, request)
        # What the model divides a sum by next; only roundings depend on the guess.
        items = self._num_items if request.reduction == "sum" else None
        expected = (
            None if items is None else request.labels.new_ones((), dtype=torch.float32) / items
        )
        if not call.head.is_linear:
            return chunked_module_cross_entropy(
                hidden,
                call.own_forward,
                call.head.trainable(),
                request.labels,
                logits_dtype=call.dtype,
                num_vocab=request.num_valid_vocab,
                chunk_tokens=chunk_tokens,
                expected_factor=expected,
                **request.options(),
            )
        return chunked_linear_cross_entropy(
            hidden,
            inner.weight,
            request.labels,
            inner.bias,
            num_valid_vocab=request.num_valid_vocab,
            chunk_tokens=chunk_tokens,
            expected_factor=expected,
            waiting=self._waiting if inner.weight.is_leaf else None,
            **request.options(),
        )

    def _plan(self, call: PutOffCall, hidden: Tensor, request: LossRequest) -> int:
        """Choose the most tokens per chunk, and note the plan that follows from it."""
        num_vocab, num_hidden, steps = request.num_valid_vocab, hidden.shape[1], request.transforms
        chunk_tokens = self._chunk_tokens
        if chunk_tokens is None:
            budget_bytes = self._budget_bytes or default_budget_bytes(hidden.device)
            chunk_tokens = choose_chunk_tokens(
                num_vocab, num_hidden, call.dtype, budget_bytes, steps
            )
        self.last_plan = plan_chunks(
            hidden.shape[0], num_vocab, num_hidden, call.dtype, steps, chunk_tokens
        )
        return chunk_tokens


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the head that *model* has now: PEFT and resizing replace it."""
    transformers_model: Any = model
    head: nn.Module | None = transformers_model.get_output_embeddings()
    return head


def _has_plain_parameters(module: nn.Module) -> bool:
    """Whether all parameters are tensors that matrix products can take (no DTensor, not empty)."""
    return all(
        type(parameter) in _PLAIN and parameter.numel() > 0
        for parameter in module.parameters(recurse=False)
    )


def _result_of(
    head: OutputHead, own_forward: Forward, hidden: Tensor
) -> tuple[int, torch.dtype, torch.device]:
    """Return vocabulary, dtype and device of what the head would return for *hidden*."""
    inner: Any = head.inner
    if head.is_linear:
        weight = inner.weight
        return weight.shape[0], autocast_dtype(hidden, weight, inner.bias), weight.device
    device_type = hidden.device.type
    # One token tells. Autocast would keep the weights that it casts here, without their graph.
    uncached = torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )
    with torch.no_grad(), uncached:
        row = own_forward(hidden.reshape(-1, hidden.shape[-1])[:1])
    return row.shape[-1], row.dtype, row.device


def _tied_embedding(model: nn.Module, head: OutputHead) -> nn.Embedding | None:
    """Return the input embedding if it has the head's weight, and nothing special about it."""
    transformers_model: Any = model
    embedding = transformers_model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or not head.is_linear or head.is_sharded:
        return None
    weight = embedding.weight
    plain = (
        type(embedding).forward is nn.Embedding.forward
        and "forward" not in embedding.__dict__
        and type(weight) in _PLAIN
        and weight.is_leaf
        and not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm)
    )
    return embedding if plain and weight.requires_grad and weight is head.inner.weight else None
