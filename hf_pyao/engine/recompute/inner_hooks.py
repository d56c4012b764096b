"""Module hooks of others that run between those of this package and a layer's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


class InnerHooks:
    """Module hooks of others that run between ours and the layer's forward.

    The second run calls ``forward`` alone: hooks that sit around ours, as those of engines that
    gather parameters, have done their part by then.
    """

    def __init__(self, module: nn.Module, is_ours: Callable[[object], bool]) -> None:
        self._before: list[tuple[Callable[..., Any], bool]] = []
        self._after: list[tuple[Callable[..., Any], bool]] = []
        if len(module._forward_pre_hooks) > 1:
            is_inside = False
            for key, hook in module._forward_pre_hooks.items():
                if is_inside:
                    self._before.append((hook, key in module._forward_pre_hooks_with_kwargs))
                is_inside = is_inside or is_ours(hook)
        if len(module._forward_hooks) > 1:
            for key, hook in module._forward_hooks.items():
                if is_ours(hook):
                    break
                self._after.append((hook, key in module._forward_hooks_with_kwargs))
        torchs: Any = module
        self._gives_views = bool(
            torchs._get_backward_hooks()[0] or torchs._get_backward_pre_hooks()
        )
        """True where torch gives the layer views of its arguments, for its backward hooks."""

    def run(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call *module*'s forward as its caller does, with these hooks."""
        for hook, with_kwargs in self._before:
            if with_kwargs:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        if self._gives_views and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            args = tuple(a.view_as(a) if isinstance(a, Parameter) else a for a in args)
        outputs = module.forward(*args, **kwargs)
        for hook, with_kwargs in self._after:
            given = (args, kwargs) if with_kwargs else (args,)
            changed = hook(module, *given, outputs)
            if changed is not None:
                outputs = changed
        return outputs
