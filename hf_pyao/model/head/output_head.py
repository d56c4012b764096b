"""A model's output head: what it is, and whether its loss can be computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.model.losses.options import autocast_dtype, autocast_of_now
from hf_pyao.model.map.sharding import is_sharded_for_calls
from hf_pyao.model.map.wrappers import wrapped_module
from hf_pyao.model.patching.exchanged_forwards import (
    Forward,
    has_forward_of_its_own,
    own_forward,
    runs_forward_of_its_class,
)
from hf_pyao.training_engines import FSDP1, FSDP2, compiled_inner

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that are just their elements; fake ones estimate memory."""


@dataclass(frozen=True)
class OutputHead:
    """A head whose loss can be computed in chunks."""

    outer: nn.Module
    """What the model calls, wrappers included."""
    inner: nn.Module
    """What projects: a linear layer, or a module that is run as it is."""
    is_linear: bool
    """Whether *inner* computes ``F.linear(hidden, weight, bias)`` and nothing else."""
    is_sharded: bool
    """Whether FSDP2 or ZeRO-3 gathers its weight in module hooks around its calls."""

    @property
    def is_gathered(self) -> bool:
        """Whether any library gathers its weight for each call, FSDP's first generation included.

        Outside of the call its parameters have other memory then, of another size.
        """
        return self.is_sharded or any(map(FSDP1.has, self.inner.parameters()))

    @property
    def fsdp2_unit(self) -> nn.Module | None:
        """The module that ``fully_shard`` was called with, alone or in a list; None if neither."""
        for module in (self.inner, self.outer):
            if FSDP2.wraps(module):
                return module
        return None

    @property
    def has_plain_parameters(self) -> bool:
        """Whether its parameters are tensors that products can take (no DTensor, not empty)."""
        return all(
            type(parameter) in PLAIN and parameter.numel() > 0
            for parameter in self.inner.parameters(recurse=False)
        )

    def own_forward(self) -> Forward:
        """Return the ``forward`` that *inner* has now, exchanged or not."""
        return own_forward(self.inner)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of *inner* that want a gradient."""
        return [parameter for parameter in self.inner.parameters() if parameter.requires_grad]

    def result_of(self, hidden: Tensor) -> tuple[int, torch.dtype, torch.device]:
        """Return vocabulary, dtype and device of what the head would return for *hidden*."""
        inner: Any = self.inner
        if self.is_linear:
            weight = inner.weight
            return weight.shape[0], autocast_dtype(hidden, weight, inner.bias), weight.device
        # One token tells. Autocast would keep the weights that it casts here, without their graph.
        uncached = autocast_of_now(hidden.device, cache_enabled=False)
        # Not by `with`: [Note: Modes] in model/losses/options.py.
        project = torch.no_grad()(uncached(self.own_forward()))
        row = project(hidden.reshape(-1, hidden.shape[-1])[:1])
        return row.shape[-1], row.dtype, row.device

    def tied_embedding(self, model: Any) -> nn.Embedding | None:
        """Return *model*'s input embedding if it has the head's weight and is like any other."""
        embedding = model.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding) or not self.is_linear or self.is_sharded:
            return None
        weight = embedding.weight
        is_plain = (
            type(embedding).forward is nn.Embedding.forward
            and not has_forward_of_its_own(embedding)
            and type(weight) in PLAIN
            and weight.is_leaf
            and not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm)
        )
        is_tied = weight is self.inner.weight and weight.requires_grad
        return embedding if is_plain and is_tied else None


def understand_head(head: nn.Module | None) -> OutputHead | str:
    """Return *head* as one whose loss can be computed in chunks, or why it cannot.

    Linear layers can (bias or not, tied or not, sharded or not), and so can PEFT's layers around
    one and subclasses of ``nn.Linear`` with a ``forward`` of their own (quantised weights), as
    long as every token is projected by itself and nothing is drawn at random.
    """
    if head is None:
        return "get_output_embeddings() returns none"
    inner = _innermost(head)
    if inner is None:
        return f"its head is a compiled {type(head).__name__}"
    is_sharded = is_sharded_for_calls(inner)
    if not is_sharded and (hooked := _first_with_hooks(head, inner)) is not None:
        return f"its head ({type(hooked).__name__}) has module hooks"
    has_own_class = type(inner).forward is nn.Linear.forward
    if has_own_class and runs_forward_of_its_class(inner):
        return OutputHead(head, inner, is_linear=True, is_sharded=is_sharded)
    package = type(inner).__module__.partition(".")[0]
    if not isinstance(inner, nn.Linear) and package != "peft":
        return f"its head is a {type(inner).__name__}, not a linear layer"
    if is_sharded:
        return f"its head is a sharded {type(inner).__name__}"
    if dropout := _active_dropout(inner):
        return (
            f"its head has dropout (p={dropout}), which would be drawn chunk by chunk; "
            "set it to 0 for the head"
        )
    return OutputHead(head, inner, is_linear=False, is_sharded=False)


def _innermost(head: nn.Module) -> nn.Module | None:
    """Return what projects inside wrappers; None inside a compiled one, which runs another code."""
    while True:
        if compiled_inner(head) is not None:
            return None
        inner = wrapped_module(head) or _saved_by_peft(head)
        if inner is None:
            return head
        head = inner


def _saved_by_peft(head: nn.Module) -> nn.Module | None:
    """Return the copy that PEFT's ``modules_to_save`` trains, or the original if switched off."""
    if not any(cls.__name__ == "ModulesToSaveWrapper" for cls in type(head).__mro__):
        return None
    wrapper: Any = head
    if wrapper.disable_adapters or not wrapper.active_adapters:
        original: nn.Module = wrapper.original_module
        return original
    active: nn.Module = wrapper.modules_to_save[wrapper.active_adapters[0]]
    return active


def _first_with_hooks(head: nn.Module, inner: nn.Module) -> nn.Module | None:
    """Return a module from *head* to *inner* whose hooks would see the loss instead of logits."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooked = (each for each in (head, inner) if any(getattr(each, kind) for kind in kinds))
    return next(hooked, None)


def _active_dropout(module: nn.Module) -> float:
    kind = nn.modules.dropout._DropoutNd
    dropouts = [child for child in module.modules() if isinstance(child, kind)]
    return max((child.p for child in dropouts if child.training), default=0.0)
