"""A model's output head: what it is, and whether its loss can be computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.model.map.sharding import is_sharded_for_calls
from hf_pyao.model.map.wrappers import wrapped_module
from hf_pyao.model.patching.exchanged_forwards import (
    Forward,
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

    def own_forward(self) -> Forward:
        """Return the ``forward`` that *inner* has now, exchanged or not."""
        return own_forward(self.inner)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of *inner* that want a gradient."""
        return [parameter for parameter in self.inner.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class NotUnderstood:
    """Why a head keeps its own loss."""

    reason: str


def understand_head(head: nn.Module | None) -> OutputHead | NotUnderstood:
    """Decide whether the loss of *head* can be computed in chunks.

    Linear layers can (bias or not, tied or not, sharded or not), and so can PEFT's layers around
    one and subclasses of ``nn.Linear`` with a ``forward`` of their own (quantised weights), as
    long as every token is projected by itself and nothing is drawn at random.
    """
    if head is None:
        return NotUnderstood("get_output_embeddings() returns none")
    inner = _innermost(head)
    if inner is None:
        return NotUnderstood(f"its head is a compiled {type(head).__name__}")
    is_sharded = is_sharded_for_calls(inner)
    if not is_sharded and (hooked := _first_with_hooks(head, inner)) is not None:
        return NotUnderstood(f"its head ({type(hooked).__name__}) has module hooks")
    has_own_class = type(inner).forward is nn.Linear.forward
    if has_own_class and runs_forward_of_its_class(inner):
        return OutputHead(head, inner, is_linear=True, is_sharded=is_sharded)
    package = type(inner).__module__.partition(".")[0]
    if not isinstance(inner, nn.Linear) and package != "peft":
        return NotUnderstood(f"its head is a {type(inner).__name__}, not a linear layer")
    if is_sharded:
        return NotUnderstood(f"its head is a sharded {type(inner).__name__}")
    if dropout := _active_dropout(inner):
        return NotUnderstood(
            f"its head has dropout (p={dropout}), which would be drawn chunk by chunk; "
            "set it to 0 for the head"
        )
    return OutputHead(head, inner, is_linear=False, is_sharded=False)


def has_plain_parameters(module: nn.Module) -> bool:
    """Whether all parameters are tensors that matrix products can take (no DTensor, not empty)."""
    return all(
        type(parameter) in PLAIN and parameter.numel() > 0
        for parameter in module.parameters(recurse=False)
    )


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
    for module in (head, inner):
        hooks: Any = module
        if (
            hooks._forward_hooks
            or hooks._forward_pre_hooks
            or hooks._backward_hooks
            or hooks._backward_pre_hooks
        ):
            return module
    return None


def _active_dropout(module: nn.Module) -> float:
    kind = nn.modules.dropout._DropoutNd
    dropouts = [child for child in module.modules() if isinstance(child, kind)]
    return max((child.p for child in dropouts if child.training), default=0.0)
