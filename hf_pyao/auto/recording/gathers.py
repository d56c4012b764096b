"""Weights of a copy that are there while a module runs, as FSDP2 and DeepSpeed's ZeRO have them.

A unit's weights are gathered where one of its modules is entered, and let go of where it is left,
in forward and in backward. Between the two their storage is empty. When its backward is over its
gradients are reduced, and this rank's part is kept. No process group takes part, and nothing is
sent.

What an engine does beyond that is not followed: weights that ZeRO-3 gathers ahead of their turn, or
keeps for their next use but one, and buckets. It is in what a run measures
(``plan/measure/segment_memory.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import Collective
from hf_pyao.training_engines import stays_whole


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that come together, and gradients that are reduced together."""

    modules: tuple[nn.Module, ...]
    """That use them, in the order of their calls. None: gradients are reduced after backward."""
    parameters: tuple[nn.Parameter, ...]
    """Whole ones of the copy."""
    num_ranks: int
    """Among which they are divided."""
    is_gathered: bool = True
    """False: weights are whole throughout."""
    stays: bool = False
    """What forward has gathered is there until backward."""
    is_reduced: bool = True
    """False: gradients stay whole, for the next micro-batch."""
    is_buffered: bool = False
    """Weights go through a buffer that is there as long as they are, gradients through one that is
    there until the next reduction."""
    runs_ahead: bool = True
    """All-gathers run beside compute."""
    num_beside: int = 1
    """How many reductions may run beside compute; 0: compute waits for each."""
    sums_all: bool = False
    """Every rank receives the whole sum of the gradients."""
    sent_dtype: torch.dtype | None = None
    """What gradients are reduced in; None: their own."""
    kept_dtype: torch.dtype | None = None
    """What this rank's part of them is kept in; None: it is not the step's."""


class Gathers:
    """Gathers weights of a copy, and reduces its gradients.

    Args:
        units: of the copy. Units inside of others come first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._exchanged: Exchanged = lambda collective, num_beside: None
        self._kept: list[Tensor] = []
        """This rank's parts of gradients."""
        self._gathered: Tensor | None = None
        self._sent: Tensor | None = None
        self._next: tuple[Collective, int] | None = None
        """A reduction. What is gathered next goes first: an engine has begun with it by then."""

    def install(self) -> None:
        """Let go of all weights, and put hooks on the copy's modules; under its fake mode."""
        for unit in self._units:
            self._let_go(unit)
            for module in unit.modules:
                self._install_on(module, unit)

    def tell(self, exchanged: Exchanged) -> None:
        """Tell *exchanged* of each collective from now on."""
        self._exchanged = exchanged

    def end_micro_batch(self) -> None:
        """Leave the units whose inputs have no gradients, as backward is over."""
        for unit in reversed(self._units):
            self._leave_backward(unit)
        self._reduce()
        self._sent = None

    def _install_on(self, module: nn.Module, unit: Unit) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._gather(unit)
            if module is not unit.modules[0]:
                return None
            leaves, spec = tree_flatten((args, kwargs))
            places = [n for n, each in enumerate(leaves) if _has_gradient(each)]
            given = [leaves[n] for n in places]
            if given and torch.is_grad_enabled():
                passed = _BackwardEnds.apply(  # type: ignore[no-untyped-call]
                    lambda: self._leave_backward(unit), *given
                )
                for place, each in zip(places, passed, strict=True):
                    leaves[place] = each
            return tree_unflatten(leaves, spec)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            back = [each for each in tensors_in((output,)) if _has_gradient(each)]
            for each in back:
                each.register_hook(lambda _: self._gather(unit))  # type: ignore[no-untyped-call]
            # What runs again in backward is followed by its own backward.
            runs_again = is_in_backward() and back
            if module is unit.modules[-1] and not unit.stays and not runs_again:
                self._let_go(unit)

        if (
            "torch._dynamo" in sys.modules
        ):  # compiled code calls hooks, and is not to have them in it
            enter, leave = map(torch.compiler.disable, (enter, leave))
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    @torch.no_grad()
    def _gather(self, unit: Unit) -> None:
        gone = [each for each in unit.parameters if not each.untyped_storage().nbytes()]
        if not gone:
            return
        nbytes = sum(each.nbytes for each in gone)
        received = nbytes - nbytes // unit.num_ranks
        self._exchanged(Collective(received, is_gather=unit.runs_ahead), 0)
        self._reduce()
        if unit.is_buffered:
            self._gathered = _buffer_for(gone)
        for each in gone:
            each.untyped_storage().resize_(each.nbytes)
            if self._gathered is not None:
                each.data.copy_(_place_of(each, self._gathered))

    @torch.no_grad()
    def _let_go(self, unit: Unit) -> None:
        if unit.is_gathered:
            for each in unit.parameters:
                if not stays_whole(each):
                    each.untyped_storage().resize_(0)

    @torch.no_grad()
    def _leave_backward(self, unit: Unit) -> None:
        self._let_go(unit)
        self._gathered = None
        reduced = [each for each in unit.parameters if each.grad is not None]
        if not unit.is_reduced or not reduced:
            return
        nbytes = sum(each.numel() * (unit.sent_dtype or each.dtype).itemsize for each in reduced)
        received = (1 + unit.sums_all) * (nbytes - nbytes // unit.num_ranks)
        self._reduce()
        self._next = Collective(received, is_gather=False), unit.num_beside
        if unit.is_buffered:
            self._sent = _buffer_for(reduced, unit.sent_dtype)
            for each in reduced:
                assert each.grad is not None
                _place_of(each, self._sent).copy_(each.grad)
        if unit.kept_dtype is not None:
            part = sum(ceil(each.numel() / unit.num_ranks) for each in reduced)
            device = reduced[0].device
            self._kept.append(torch.empty(part, dtype=unit.kept_dtype, device=device))
        for each in reduced:
            each.grad = None

    def _reduce(self) -> None:
        if self._next is not None:
            self._exchanged(*self._next)
            self._next = None


def reused(modules: Iterable[nn.Module], num_elements: int) -> set[nn.Module]:
    """Return those whose weights ZeRO-3 keeps from forward to backward.

    They are noted on the modules, too: layers that differ in that do not stand for each other.

    Args:
        modules: that have weights, in the order of their calls.
        num_elements: what may be gathered between two uses: ``stage3_max_reuse_distance``.
    """
    found: set[nn.Module] = set()
    num_behind = 0
    for module in reversed(list(modules)):
        if 2 * num_behind >= num_elements:
            break
        found.add(module)
        module.is_reused = True  # type: ignore[assignment]
        num_behind += sum(each.numel() for each in module.parameters(recurse=False))
    return found


class _BackwardEnds(torch.autograd.Function):
    """Calls a function when the gradients of all tensors that it has passed on are there."""

    @staticmethod
    def forward(ctx: Any, then: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.then()
        return None, *gradients


def _buffer_for(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    num_elements = sum(each.numel() for each in tensors)
    return tensors[0].new_empty(num_elements, dtype=dtype)


def _place_of(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Return a part of *buffer* that is as large; any is: nothing is read."""
    return buffer[: tensor.numel()].view(tensor.shape)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
