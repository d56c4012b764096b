"""What kernels of attention return, kept in forward and given back where a segment runs again.

A kernel's time grows by the square of the length, what it returns with the length alone: output,
statistics, the state of its random numbers. A dispatch mode sees the kernel run; what autograd
saves right behind it and lies in what it returned is the segment's to keep. As the segment runs
again, another mode returns that in place of running the kernel.

Not kept: what a kernel with dropout returns, since the random numbers that it draws must be drawn
again; and what no kernel computed: attention that is written out, or torch's own formula.
Attention in groups (``hf_pyao.model.attention``) counts as one kernel, which returns the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from hf_pyao.engine.recompute.dispatch_modes import RemovableMode, device_asked_for
from hf_pyao.engine.recompute.operations import Rule, Rules
from hf_pyao.engine.runtime.saved_tensor import Handle
from hf_pyao.engine.torch_hooks.custom_operators import runner_of
from hf_pyao.engine.transfer.layout import has_storage

KERNELS = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Operators whose first arguments are query, key and value, and whose first output is attention."""


class _Layout(NamedTuple):
    """What a tensor that a kernel returned is like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class KernelCall:
    """One run of a kernel, and what of its outputs is kept."""

    def __init__(self, func: Any, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._func = func
        self._inputs = _layouts(arguments)
        self._outputs = [_Layout.of(o) if isinstance(o, Tensor) else o for o in outputs]
        self._handles: dict[int, Handle] = {}

    def keep(self, index: int, handle: Handle) -> None:
        """Record that *handle* stands for output number *index*."""
        self._handles[index] = handle

    def outputs_for(
        self, func: Any, arguments: Sequence[Any], give: Callable[[Handle], Tensor]
    ) -> tuple[Any, ...] | None:
        """Return what the kernel returned; None if not all is kept, or another one is to run."""
        if func is not self._func or _layouts(arguments) != self._inputs or not self._handles:
            return None
        for index, output in enumerate(self._outputs):
            if isinstance(output, _Layout) and index not in self._handles and output.shape.numel():
                return None
        return tuple(self._given(index, give) for index in range(len(self._outputs)))

    def _given(self, index: int, give: Callable[[Handle], Tensor]) -> Any:
        output = self._outputs[index]
        if not isinstance(output, _Layout):
            return output
        handle = self._handles.get(index)
        if handle is not None:
            return give(handle).detach()
        return torch.empty_strided(
            output.shape, output.stride, dtype=output.dtype, device=output.device
        )


def _layouts(arguments: Sequence[Any]) -> list[Any]:
    return [
        _Layout.of(each)
        if isinstance(each, Tensor)
        else _layouts(each)
        if isinstance(each, tuple)
        else each
        for each in arguments
    ]


class _AttentionMode(RemovableMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a layer call."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules
        self._is_inside = False
        """True while kernels run that count as one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func*, or what stands in its place."""
        device = device_asked_for(func, args)
        if device is not None:
            return device
        kwargs = kwargs or {}
        rule = self._rules[func]
        if rule.takes_tensor and args and isinstance(args[0], bool | int | float | complex):
            args = (torch.tensor(args[0]), *args[1:])  # see Trace
        if rule.name in KERNELS and not self._is_inside:
            return self.run_kernel(func, args, kwargs, draws=_draws(rule, args, kwargs))
        return runner_of(func)(*args, **kwargs)

    def run_as_one(self, run: Callable[..., Any], arguments: Sequence[Any], *, draws: bool) -> Any:
        """Return ``run(*arguments)``, or what stands for it; the kernels inside do not count."""
        self._is_inside = True
        try:
            return self.run_kernel(run, tuple(arguments), {}, draws=draws)
        finally:
            self._is_inside = False

    def run_kernel(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, draws: bool
    ) -> Any:
        """Run a kernel of attention; *draws* says whether it draws random numbers."""
        return func(*args, **kwargs)


def _draws(rule: Rule, args: tuple[Any, ...], kwargs: Any) -> bool:
    position = rule.dropout_at
    if position is None:
        return False
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


class SeenAttention(_AttentionMode):  # type: ignore[no-untyped-call]
    """Sees the kernels that a layer call runs in forward.

    Args:
        rules: of operators.
        has_room: says whether that many bytes more may leave in this forward.
    """

    def __init__(self, rules: Rules, has_room: Callable[[int], bool]) -> None:
        super().__init__(rules)
        self.calls: list[KernelCall | None] = []
        """Its kernels; None where nothing is kept of one."""
        self._has_room = has_room
        self._newest: dict[int, tuple[int, _Layout]] = {}
        """Weak references on the storages that the newest kernel returned, whose addresses no
        others get meanwhile, until autograd has saved them or the next kernel runs."""

    def run_kernel(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, draws: bool
    ) -> Any:
        """Run a kernel, and see what it returns."""
        outputs = func(*args, **kwargs)
        self._forget()
        tensors = [o for o in outputs if isinstance(o, Tensor) and o.numel()]
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        # A custom autograd function runs with gradients off, and only where they are wanted.
        is_graded = self._is_inside or torch.is_grad_enabled()
        if draws or not is_graded or not self._has_room(nbytes):
            self.calls.append(None)
            return outputs
        self.calls.append(KernelCall(func, (*args, *kwargs.items()), outputs))
        self._newest = {
            cast(int, tensor.untyped_storage()._weak_ref()): (index, _Layout.of(tensor))
            for index, tensor in enumerate(outputs)
            if isinstance(tensor, Tensor) and tensor.numel()
        }
        return outputs

    def packed(self, tensor: Tensor, keep: Callable[[Tensor], Handle]) -> None:
        """Keep *tensor*, which autograd saves, if the newest kernel returned it."""
        if not self._newest or not has_storage(tensor):
            return
        key = tensor.untyped_storage()._cdata
        index, layout = self._newest.get(key, (-1, None))
        if layout is None or layout != _Layout.of(tensor):
            return
        del self._newest[key]
        torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]
        call = self.calls[-1]
        assert call is not None
        call.keep(index, keep(tensor))

    def _forget(self) -> None:
        newest, self._newest = self._newest, {}
        for key in newest:
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        """Let go of the weak references."""
        if "_newest" in vars(self):  # else an interrupt came as it was made
            self._forget()


class GivenAttention(_AttentionMode):  # type: ignore[no-untyped-call]
    """Gives back what the kernels of a layer call returned in forward.

    Args:
        rules: of operators.
        calls: those of the call in forward.
        give: returns what a handle stands for.
    """

    def __init__(
        self, rules: Rules, calls: Sequence[KernelCall | None], give: Callable[[Handle], Tensor]
    ) -> None:
        super().__init__(rules)
        self._calls = iter(calls)
        self._give = give

    def run_kernel(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, draws: bool
    ) -> Any:
        """Return what the kernel returned in forward, or run it."""
        call = next(self._calls, None)
        if call is not None:
            outputs = call.outputs_for(func, (*args, *kwargs.items()), self._give)
            if outputs is not None:
                return outputs
        return func(*args, **kwargs)


def run_as_one_kernel(run: Callable[..., Any], arguments: Sequence[Any], *, draws: bool) -> Any:
    """Return ``run(*arguments)``, whose kernels count as one where attention is kept.

    Args:
        run: runs the kernels.
        arguments: what *run* takes, tensors among it.
        draws: whether it draws random numbers.
    """
    for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        if isinstance(mode, _AttentionMode):
            return mode.run_as_one(run, arguments, draws=draws)
    return run(*arguments)
