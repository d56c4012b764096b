"""Sees the calls of attention that a module makes, and runs them in groups where that is exact.

A module calls ``torch.nn.functional.scaled_dot_product_attention``, directly or through
transformers' attention functions. While it runs, a torch function mode sees that call. The kernel
is the one that torch itself would choose; every other call is left to torch, and the reason said.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import warn
from hf_pyao.model.attention import GroupPlan, NoKernel, attention_in_groups, kernels, plan_groups
from hf_pyao.model.attention.grouped import GroupedCall
from hf_pyao.model.attention.kernels import AttentionSettings, Kernel
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method

logger = logging.getLogger(__name__)

KEY = "_pyao_attention_groups"

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_A_MASK = (
    "a mask is given, and flash attention takes none (padding, packed samples or a sliding window; "
    "transformers 4 also makes one where neither a cache nor an attention_mask is given)"
)
_NOT_WORTH_SAYING = NoKernel("")


class Notes:
    """What is said about calls, once each, and how the last one was divided.

    Args:
        name: of the model, for messages.
    """

    def __init__(self, name: str) -> None:
        self.said: dict[str, str] = {}
        """By reason, the remedy."""
        self.last_plan: GroupPlan | None = None
        """How the last call was divided; with one group where it was not."""
        self._name = name

    def say(self, reason: str, remedy: str = "") -> None:
        """Say, once, why a call is not divided; loudly, if there is a *remedy*."""
        if reason not in self.said:
            self.said[reason] = remedy
            level = logging.WARNING if remedy else logging.INFO
            what = "; ".join(filter(None, (reason, remedy)))
            warn(
                logger,
                "attention-not-grouped",
                "attention of %s does not run in groups: %s.",
                self._name,
                what,
                level=level,
            )

    def described(self) -> list[str]:
        """Return what was said."""
        return ["; ".join(filter(None, each)) for each in self.said.items()]


class GroupedAttention(LeftBehind):
    """Answers for the forward of a module that calls attention; holds no module.

    Args:
        groups: a number of groups, or ``"auto"``.
        notes: where things are said.
    """

    def __init__(self, groups: int | str, notes: Notes) -> None:
        self._groups = groups
        self._notes = notes

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Run the module's own forward, its attention in groups."""
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return own(*args, **kwargs)
        function = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
        if isinstance(function, str) and _is_other(function):
            self._notes.say(f"the model's attention function is {function!r}, not 'sdpa'")
            return own(*args, **kwargs)
        mode = _AttentionCalls(self)
        try:
            with mode:
                return own(*args, **kwargs)
        finally:
            mode.is_on = False  # an interrupt may leave it behind, which must do nothing then

    def attend(self, own: Method, asked: _Asked) -> Any:
        """Return what a call of attention returns; *own* is torch's function."""
        found = self._divided(asked)
        if isinstance(found, NoKernel):
            if found.reason:
                self._notes.say(*dataclasses.astuple(found))
            return own(*asked.tensors, **asked.others)
        call, (query, key, value) = found
        self._notes.last_plan = call.plan
        if call.plan.num_groups < 2:
            return own(*asked.tensors, **asked.others)
        return attention_in_groups(call, query, key, value)

    def _divided(self, asked: _Asked) -> tuple[GroupedCall, tuple[Tensor, ...]] | NoKernel:
        """Return the call in groups and its tensors; or why not.

        The tensors have the dtype that autocast gives them.
        """
        tensors, others = asked
        if any(type(each) not in _PLAIN for each in tensors):
            return NoKernel("query, key or value is no plain tensor")
        query, key, value = tensors
        if not any(each.requires_grad for each in tensors):
            return _NOT_WORTH_SAYING
        if not has_storage(query) or {each.dim() for each in tensors} != {4}:
            dimensions = "(batch, heads, length, head_dim)"
            return NoKernel(f"query, key or value has other dimensions than {dimensions}")
        if others["attn_mask"] is not None:
            return NoKernel(_A_MASK)
        if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[2] < 2:
            return _NOT_WORTH_SAYING
        if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3] or not query.numel():
            return _NOT_WORTH_SAYING
        query, key, value = (as_autocast_has_it(each) for each in tensors)
        settings = AttentionSettings(
            bool(others["is_causal"]),
            others["scale"],
            float(others["dropout_p"]),
        )
        enable_gqa = bool(others["enable_gqa"])
        if query.shape[1] != key.shape[1] and not enable_gqa:
            return _NOT_WORTH_SAYING  # torch refuses it
        kernel = kernels.chosen_kernel(query, key, value, settings, enable_gqa=enable_gqa)
        if isinstance(kernel, NoKernel):
            return kernel
        plan = self._plan(kernel, query, key, settings)
        if plan.num_groups < 2 and (reason := _why_whole(kernel, plan)):
            return NoKernel(reason)
        return GroupedCall(kernel, plan, settings), (query, key, value)

    def _plan(
        self, kernel: Kernel, query: Tensor, key: Tensor, settings: AttentionSettings
    ) -> GroupPlan:
        ratio, length = query.shape[1] // key.shape[1], query.shape[2]
        return plan_groups(
            self._groups,
            num_samples=query.shape[0],
            num_heads=key.shape[1],
            pair_bytes=kernel.pair_bytes(query, key),
            least_pairs=-(-kernel.least_pairs(length, settings.dropout_p) // ratio),
            least_pairs_of_auto=-(-kernel.least_pairs_of_auto(length) // ratio),
        )


def _why_whole(kernel: Kernel, plan: GroupPlan) -> str:
    """Say why a call that is not divided is not, if that is worth saying."""
    if kernel.is_deterministic:
        return (
            "with deterministic algorithms the kernel allocates as much for a few heads as for all "
            "of them, unless a group has as many samples times heads as the device has "
            f"multiprocessors; the call has {plan.num_samples} samples with {plan.num_heads} "
            "key-value heads"
        )
    return ""


class _Asked(NamedTuple):
    """The arguments of a call of attention."""

    tensors: list[Any]
    """Query, key and value."""
    others: dict[str, Any]
    """By name."""


class _AttentionCalls(TorchFunctionMode):
    """Sees the calls of attention while a module runs."""

    def __init__(self, grouped: GroupedAttention) -> None:
        super().__init__()
        self.is_on = True
        self._grouped = grouped

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func*, attention in groups."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self.is_on:
            return func(*args, **kwargs)
        asked = _asked(*args, **kwargs)
        return self._grouped.attend(func, asked)


def _asked(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Asked:
    """Return the arguments of ``scaled_dot_product_attention`` in one form."""
    others = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    return _Asked([query, key, value], others)


def _is_other(function: str) -> bool:
    """Say whether an attention function of transformers does not come to torch's."""
    return function == "eager" or function.startswith(("flash_attention", "flex", "paged"))


def as_autocast_has_it(tensor: Tensor) -> Tensor:
    """Return *tensor* in the dtype to which autocast, if it is on, casts what attention gets."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))
