"""One training forward of a model whose head's call is put off until the loss is known."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.model.head.callers import caller_outside
from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.head.lazy_outputs import read_lazily, replace_deferred
from hf_pyao.model.head.output_head import (
    PLAIN,
    NotUnderstood,
    OutputHead,
    has_plain_parameters,
    understand_head,
)
from hf_pyao.model.head.put_off_call import PutOffCall
from hf_pyao.model.head.smoothing import Smoothing, Smoothings
from hf_pyao.model.losses import (
    ChunkPlan,
    choose_chunk_tokens,
    chunked_linear_cross_entropy,
    chunked_module_cross_entropy,
)
from hf_pyao.model.losses.chunking import default_budget_bytes, plan_chunks
from hf_pyao.model.losses.options import autocast_dtype
from hf_pyao.model.losses.tied_embedding import WaitingGradient, tie, tied_embedding
from hf_pyao.model.patching.exchanged_forwards import (
    ExchangedForwards,
    Forward,
    has_forward_of_its_own,
    own_forward,
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


@dataclass
class _Run:
    """What the calls of the head in one forward share.

    Each :class:`PutOffCall` refers to it, so it must not refer to them: the hidden states that a
    call holds would then be freed by Python's cyclic collector alone.
    """

    num_items: Tensor | float | None
    """What the model will divide a summed loss by."""
    smoothing: Smoothing | None
    """Label smoothing that is asked for from outside."""
    tied: tuple[Tensor, WaitingGradient] | None = None
    """Alias of the weight that embedding and head share, once the embedding has been called."""


class HeadForward:
    """Runs training forwards, and counts. Of several with gradients at a time the first is served.

    Args:
        chunk_tokens: most tokens per chunk; None: as many as fit the budget.
        budget_bytes: bytes that one chunk may take; None: by the device.
        stand_back: told why a forward keeps the model's own loss.
        warn: told what is worth a warning once.
        without_gradients: put the head's call off where gradients are off, too.
    """

    def __init__(
        self,
        *,
        chunk_tokens: int | None,
        budget_bytes: int | None,
        stand_back: Callable[[str], None],
        warn: Callable[[str], None],
        without_gradients: bool = False,
    ) -> None:
        self._without_gradients = without_gradients
        self.counts: Counter[str] = Counter()
        """``chunked``: forwards whose loss was computed without the logits. ``own``: training
        forwards with labels that kept the model's own loss. ``read``: logits that somebody read
        although the loss was computed without them."""
        self.last_plan: ChunkPlan | None = None
        """How the last loss was cut."""
        self.smoothings = Smoothings()
        """What to add to losses that the model takes unsmoothed."""
        self._chunk_tokens = chunk_tokens
        self._budget_bytes = budget_bytes
        self._stand_back = stand_back
        self._warn = warn
        self._exchanged = ExchangedForwards()

    def run(self, model: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run ``own(*args, **kwargs)``, a training forward of *model* that is given labels."""
        if self._exchanged.answers:  # the model calls itself
            return own(*args, **kwargs)
        if self._exchanged.is_active and torch.is_grad_enabled():
            self._stand_back(_OTHER_THREAD)
            self.counts["own"] += 1
            return own(*args, **kwargs)
        head = understand_head(output_embeddings(model))
        if isinstance(head, NotUnderstood) or kwargs.get("fused_lm_head"):
            self._stand_back(head.reason if isinstance(head, NotUnderstood) else _TRL)
            self.counts["own"] += 1
            return own(*args, **kwargs)
        run = _Run(kwargs.get("num_items_in_batch"), self.smoothings.current())
        calls: list[PutOffCall] = []
        answers = [(head.inner, self._put_off(head, run, calls))]
        if (embedding := _tied_embedding(model, head)) is not None:
            answers.append((embedding, _embed(embedding, run)))
        outputs = self._exchanged.during(answers, own, *args, **kwargs)
        return self._finish(outputs, calls)

    def release(self) -> None:
        """Take back every ``forward`` that an interrupted call may have left exchanged."""
        self._exchanged.clear()

    def _put_off(self, head: OutputHead, run: _Run, calls: list[PutOffCall]) -> Forward:
        """Return a ``forward`` for the head that projects nothing; it adds its calls to *calls*."""
        own_forward = head.own_forward()

        def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            plain = isinstance(hidden, Tensor) and not (args or kwargs)
            plain = plain and (self._without_gradients or torch.is_grad_enabled())
            if not plain or hidden.numel() == 0 or not has_plain_parameters(head.inner):
                return own_forward(hidden, *args, **kwargs)
            num_vocab, dtype, device = _result_of(head, own_forward, hidden)
            call = PutOffCall(
                head,
                hidden,
                num_vocab=num_vocab,
                dtype=dtype,
                device=device,
                own_forward=own_forward,
                exchanged=self._exchanged,
                without_gradients=self._without_gradients,
                compute_loss=functools.partial(self._compute_loss, run),
                note_reading=self._note_reading,
            )
            calls.append(call)
            return DeferredLogits(hidden, call)

        return forward

    def _finish(self, outputs: Any, calls: list[PutOffCall]) -> Any:
        """Compute logits that are handed out without a loss having been taken of them."""
        chunked = bool(calls) and all(call.loss_taken for call in calls)
        self.counts["chunked" if chunked else "own"] += 1

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
        if not self.counts["read"]:
            self._warn(_READ.format(reader=caller_outside("hf_pyao", "torch.utils", "torch.amp")))
        self.counts["read"] += 1

    def _compute_loss(
        self, run: _Run, call: PutOffCall, hidden: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute the loss inside the head's own call, where its weight is whole."""
        inner: Any = call.head.inner
        if run.smoothing is not None and not options["label_smoothing"]:
            options["label_smoothing"] = run.smoothing.epsilon
            run.smoothing.note_applied()
        options["chunk_tokens"] = self._plan(call, hidden, options)
        options["expected_factor"] = _expected_factor(run, options)
        if not call.head.is_linear:
            parameters = call.head.trainable()
            return chunked_module_cross_entropy(
                hidden, call.own_forward, parameters, logits_dtype=call.dtype, **options
            )
        weight, waiting = run.tied or (inner.weight, None)
        return chunked_linear_cross_entropy(
            hidden, weight, bias=inner.bias, waiting=waiting, **options
        )

    def _plan(self, call: PutOffCall, hidden: Tensor, options: dict[str, Any]) -> int:
        """Choose the most tokens per chunk, and note the plan that follows from it."""
        num_hidden = hidden.shape[1]
        num_vocab, steps = options["num_valid_vocab"], options["transforms"]
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


def _expected_factor(run: _Run, options: dict[str, Any]) -> Tensor | None:
    """Return what the model most likely multiplies a sum by next; only roundings depend on it."""
    items = run.num_items
    if items is None or options["reduction"] != "sum":
        return None
    one: Tensor = options["labels"].new_ones((), dtype=torch.float32)
    return one / (items.to(one.device) if isinstance(items, Tensor) else items)


def _embed(embedding: nn.Embedding, run: _Run) -> Forward:
    """Return a ``forward`` for a tied embedding whose gradient joins the head's."""
    own = own_forward(embedding)

    def forward(ids: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return own(ids)
        if run.tied is None:
            run.tied = tie(embedding.weight)
        alias, waiting = run.tied
        return tied_embedding(ids, alias, embedding.padding_idx, waiting)

    return forward


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the head that *model* has now: PEFT and resizing replace it."""
    transformers_model: Any = model
    head: nn.Module | None = transformers_model.get_output_embeddings()
    return head


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
    # Not by `with`: [Note: Modes] in model/losses/options.py.
    row = torch.no_grad()(uncached(own_forward))(hidden.reshape(-1, hidden.shape[-1])[:1])
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
        and not has_forward_of_its_own(embedding)
        and type(weight) in PLAIN
        and weight.is_leaf
        and not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm)
    )
    return embedding if plain and weight.requires_grad and weight is head.inner.weight else None
