"""Arguments of torch's checkpoint that not all releases have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

RESPECT_HOOKS = "respect_saved_tensors_hooks"
"""Where a checkpoint saves tensors beside its input, as a selective one does: whether saved-tensor
hooks around it get them. Releases that have it ask for an answer where hooks are on."""


def hooks_argument(checkpoint: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, bool]:
    """Return what to call *checkpoint* with besides, so that our hooks get what it saves.

    Args:
        checkpoint: ``torch.utils.checkpoint.checkpoint``, or what stands for it.
        given: the keyword arguments that it is called with; the user's answer stands.
    """
    if RESPECT_HOOKS in given or given.get("use_reentrant") is not False:
        return {}  # a reentrant one refuses the argument: it saves nothing but its input
    try:
        parameters = inspect.signature(checkpoint).parameters
    except (TypeError, ValueError):
        return {}
    return {RESPECT_HOOKS: True} if RESPECT_HOOKS in parameters else {}
