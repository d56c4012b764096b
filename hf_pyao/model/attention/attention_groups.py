"""Modules of a model whose attention runs in groups: which, and what is said of it.

:class:`AttentionGroups` exchanges the forwards of attention modules (see [Note: Lasting forwards]
in ``lasting_forward``) for ones that run attention through ``hf_pyao.model.attention``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from hf_pyao.model.attention import GroupPlan
from hf_pyao.model.attention.grouped_attention import KEY, GroupedAttention, Notes
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.model.patching.lasting_forward import exchange, give_back

_NAMES = ("attention", "attn")
"""What the class names of attention modules have in them."""


class AttentionGroups:
    """Runs the attention of a model's layers in groups, or not. Holds the model weakly.

    Args:
        name: of the model, for messages.
        found: the layers.
    """

    def __init__(self, name: str, found: FoundLayers) -> None:
        self.groups: int | str = "off"
        self._notes = Notes(name)
        self._modules = [weakref.ref(module) for module in _attention_modules(found)]
        self._exchanged: list[tuple[weakref.ref[nn.Module], GroupedAttention]] = []

    def set_groups(self, groups: int | str) -> None:
        """Run attention in *groups* (``"off"``: not at all), from the next call on.

        A layer that runs again in backward finds what it had in forward (see [Note: State of
        modules] in ``rerun.module_state``).
        """
        if groups == self.groups:
            return
        self.uninstall()
        self.groups = groups
        if groups == "off":
            return
        handle = GroupedAttention(groups, self._notes)
        try:
            for ref in self._modules:
                if (module := ref()) is not None:
                    self._exchanged.append((ref, handle))  # first: see [Note: Lasting forwards]
                    exchange(module, KEY, handle)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Give the modules their forwards back. Harmless if done already, wholly or in part."""
        self.groups = "off"
        while self._exchanged:
            ref, handle = self._exchanged[-1]
            if (module := ref()) is not None:
                give_back(module, KEY, handle)
            self._exchanged.pop()

    @property
    def last_plan(self) -> GroupPlan | None:
        """How the last call of attention was divided; None before."""
        return self._notes.last_plan

    def describe(self) -> str:
        """Return one line about the groups, and why calls are not divided; empty if off."""
        if self.groups == "off":
            return ""
        how = "as many groups as keep its temporaries small"
        if self.groups != "auto":
            how = f"{self.groups} groups"
        parts = [f"attention_groups={self.groups}: flash attention runs in {how}"]
        if torch.are_deterministic_algorithms_enabled():
            parts.append(
                "torch.use_deterministic_algorithms is on, so only where a group has as many "
                "samples times heads as the device has multiprocessors"
            )
        if (plan := self._notes.last_plan) is not None:
            parts.append(
                f"the last call, of {plan.num_samples} samples with {plan.num_heads} key-value "
                f"heads, in {plan.num_groups}"
            )
        parts.extend(f"not divided: {reason}" for reason in self._notes.described())
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return in how many groups the last call of attention ran; 0 before."""
        plan = self._notes.last_plan
        return {"attention_groups_num_groups": float(plan.num_groups if plan else 0)}


def groups_of(model: nn.Module, found: FoundLayers) -> AttentionGroups:
    """Return what runs the attention of *model*'s layers in groups; nothing does so yet."""
    return AttentionGroups(class_name(model), found)


def _attention_modules(found: FoundLayers) -> Iterator[nn.Module]:
    """Yield the modules that call attention, each once: those named so, or else whole layers."""
    seen: set[int] = set()
    for _, layer in found.layers:
        for module in list(_outermost(layer)) or [layer]:
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def _outermost(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside of *layer* with attention in their class names, outermost first."""
    inside: tuple[str, ...] = ()
    for path, module in layer.named_modules():
        if not path or path.startswith(inside):
            continue
        if any(name in type(module).__name__.lower() for name in _NAMES):
            inside += (f"{path}.",)
            yield module
