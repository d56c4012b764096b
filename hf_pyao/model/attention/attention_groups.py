"""Modules of a model whose attention runs in groups: which, and what is said of it.

:class:`AttentionGroups` exchanges the forwards of attention modules (see [Note: Lasting forwards]
in ``lasting_forward``). While one runs, a torch function mode sees its calls of
``scaled_dot_product_attention``, made directly or through transformers' attention functions. The
kernel is the one that torch itself would choose; every other call is left to torch, and the reason
said.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import warn
from hf_pyao.model.attention import kernels
from hf_pyao.model.attention.kernels import (
    AttentionCall,
    FlashKernel,
    NoKernel,
    as_autocast_has_it,
    attention_in_groups,
)
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.patching.lasting_forward import Args, Exchanged, Kwargs, LeftBehind, Method
from hf_pyao.plan.options.group_plan import GroupPlan, plan_groups

logger = logging.getLogger(__name__)

KEY = "_pyao_attention_groups"

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_NAMES = ("attention", "attn")
"""What the class names of attention modules have in them."""
_OTHER_FUNCTIONS = ("eager", "flash_attention", "flex", "paged")
"""How transformers calls attention functions that do not come to torch's."""
_NOT_PLAIN = NoKernel("query, key or value is no plain tensor of four dimensions")
_A_MASK = NoKernel(
    "a mask is given, and flash attention takes none (padding, packed samples or a sliding window; "
    "transformers 4 also makes one where neither a cache nor an attention_mask is given)"
)


class Notes:
    """What is said about calls, once each, and how the last one was divided.

    Args:
        name: of the model, for messages.
    """

    def __init__(self, name: str) -> None:
        self.said: dict[str, None] = {}
        self.last_plan: GroupPlan | None = None
        """How the last call was divided; with one group where it was not."""
        self._name = name

    def say(self, why: NoKernel) -> None:
        """Say, once, why a call is not divided; loudly, if there is a remedy."""
        what = "; ".join(filter(None, why))
        if what not in self.said:
            self.said[what] = None
            level = logging.WARNING if why.remedy else logging.INFO
            warn(
                logger,
                "attention-not-grouped",
                "attention of %s does not run in groups: %s.",
                self._name,
                what,
                level=level,
            )


class AttentionGroups:
    """Runs the attention of a model's layers in groups, or not. Holds the model weakly.

    Args:
        name: of the model, for messages.
        found: the layers.
    """

    def __init__(self, name: str, found: FoundLayers) -> None:
        self.groups: int | str = "off"
        self._notes = Notes(name)
        self._modules = [weakref.ref(module) for module in dict.fromkeys(_modules_of(found))]
        self._exchanged: Exchanged[GroupedAttention] = Exchanged(KEY)

    def set_groups(self, groups: int | str) -> None:
        """Run attention in *groups* (``"off"``: not at all), from the next call on.

        A layer that runs again in backward finds what it had in forward (see [Note: State of
        modules] in ``rerun.module_state``).
        """
        if groups == self.groups:
            return
        self.uninstall()
        self.groups = groups
        handle = GroupedAttention(groups, self._notes)
        for ref in self._modules if groups != "off" else ():
            if (module := ref()) is not None:
                self._exchanged.put(module, handle)

    def uninstall(self) -> None:
        """Give the modules their forwards back. Harmless if done already, wholly or in part."""
        self.groups = "off"
        self._exchanged.take_back()

    @property
    def last_plan(self) -> GroupPlan | None:
        """How the last call of attention was divided; None before."""
        return self._notes.last_plan

    def describe(self) -> str:
        """Return one line about the groups, and why calls are not divided; empty if off."""
        if self.groups == "off":
            return ""
        parts = [f"attention_groups={self.groups}: flash attention runs in groups"]
        if (plan := self.last_plan) is not None:
            pairs = f"{plan.num_samples} samples with {plan.num_heads} key-value heads"
            parts.append(f"the last call, of {pairs}, in {plan.num_groups}")
        return "; ".join([*parts, *(f"not divided: {reason}" for reason in self._notes.said)])

    def metrics(self) -> dict[str, float]:
        """Return in how many groups the last call of attention ran; 0 before."""
        plan = self.last_plan
        return {"attention_groups_num_groups": float(plan.num_groups if plan else 0)}


def _modules_of(found: FoundLayers) -> Iterator[nn.Module]:
    """Yield the outermost modules that are called attention, or else whole layers."""
    for _, layer in found.layers:
        named = [
            module
            for module in layer.modules()
            if module is not layer and any(n in type(module).__name__.lower() for n in _NAMES)
        ]
        inner = {each for module in named for each in module.modules() if each is not module}
        yield from [module for module in named if module not in inner] or [layer]


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
        if isinstance(function, str) and function.startswith(_OTHER_FUNCTIONS):
            self._notes.say(NoKernel(f"the model's attention function is {function!r}, not 'sdpa'"))
            return own(*args, **kwargs)
        with _AttentionCalls(self):
            return own(*args, **kwargs)

    def attend(self, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Return what a call of attention returns; *own* is torch's function."""
        found = self._divided(AttentionCall(*args, **kwargs))
        if isinstance(found, NoKernel):
            self._notes.say(found)
        elif found is not None:
            self._notes.last_plan = found[1]
            if found[1].num_groups > 1:
                return attention_in_groups(*found)
        return own(*args, **kwargs)

    def _divided(
        self, call: AttentionCall
    ) -> tuple[FlashKernel, GroupPlan, AttentionCall] | NoKernel | None:
        tensors = call[:3]
        if not any(each.requires_grad for each in tensors):
            return None
        is_plain = all(type(each) in _PLAIN and has_storage(each) for each in tensors)
        if not is_plain or {each.dim() for each in tensors} != {4}:
            return _NOT_PLAIN
        if call.attn_mask is not None:
            return _A_MASK
        (batch, heads, length, width), key_heads = call.query.shape, call.key.shape[1]
        of_keys = (batch, key_heads, call.key.shape[2], width)
        is_known = call.key.shape == call.value.shape == of_keys
        is_grouped = heads == key_heads or (call.enable_gqa and heads % key_heads == 0)
        if not is_known or not is_grouped or length < 2 or not call.query.numel():
            return None
        query, key, value = map(as_autocast_has_it, tensors)
        call = call._replace(query=query, key=key, value=value)
        kernel = kernels.chosen_kernel(call)
        if isinstance(kernel, NoKernel):
            return kernel
        ratio = heads // key_heads
        plan = plan_groups(
            self._groups,
            num_samples=batch,
            num_heads=key_heads,
            pair_bytes=kernel.pair_bytes(call),
            least_pairs=-(-kernel.least_pairs(call, is_auto=False) // ratio),
            least_pairs_of_auto=-(-kernel.least_pairs(call, is_auto=True) // ratio),
        )
        return kernel, plan, call


class _AttentionCalls(TorchFunctionMode):
    """Sees the calls of attention while a module runs."""

    def __init__(self, grouped: GroupedAttention) -> None:
        super().__init__()
        self._grouped = grouped

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func*, attention in groups."""
        if func is F.scaled_dot_product_attention:
            return self._grouped.attend(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
