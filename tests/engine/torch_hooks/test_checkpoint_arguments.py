"""A checkpoint that asks what to do with saved-tensor hooks around it is told."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_pyao import attach
from hf_pyao.engine.torch_hooks.checkpoint_arguments import hooks_argument
from hf_pyao.tools.bench import peers
from tests.helpers import (
    EVERY_LAYER,
    HIDDEN,
    NUM_LAYERS,
    assert_same_trajectory,
    enable_checkpointing,
    tiny_batch,
    tiny_model,
    train,
)

STEP = ((tiny_batch(0),),)

seen: list[Any] = []


def without(function: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool = True) -> Any:
    """Do as torch has until now."""
    return checkpoint(
        function, *args, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state
    )


def optional(
    function: Any,
    *args: Any,
    use_reentrant: bool,
    respect_saved_tensors_hooks: bool | None = None,
) -> Any:
    """Take the argument, but for reentrant checkpoints."""
    if use_reentrant and respect_saved_tensors_hooks is not None:
        raise ValueError("respect_saved_tensors_hooks needs use_reentrant=False")
    seen.append(respect_saved_tensors_hooks)
    return checkpoint(function, *args, use_reentrant=use_reentrant)


def mandatory(
    function: Any,
    *args: Any,
    use_reentrant: bool,
    respect_saved_tensors_hooks: bool | None = None,
) -> Any:
    """Want the argument where hooks are on."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not use_reentrant and top is not None and respect_saved_tensors_hooks is None:
        raise RuntimeError("say respect_saved_tensors_hooks")
    return optional(
        function,
        *args,
        use_reentrant=use_reentrant,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )


def checkpointed(function: Callable[..., Any], **given: Any) -> nn.Module:
    """Return a model whose layers are checkpointed by *function*."""
    model = tiny_model("llama")
    enable_checkpointing(model, use_reentrant=False)
    for module in model.modules():
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = functools.partial(  # type: ignore[assignment]
                function, **{"use_reentrant": False, **given}
            )
    return model


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (without, {}, None),
        (optional, {}, True),
        (mandatory, {}, True),
        (optional, {"respect_saved_tensors_hooks": False}, False),
        (mandatory, {"respect_saved_tensors_hooks": False}, False),
        (optional, {"use_reentrant": True}, None),
        (mandatory, {"use_reentrant": True}, None),
    ],
)
def test_layers_are_checkpointed_and_their_inputs_leave(
    function: Callable[..., Any], given: dict[str, Any], expected: bool | None
) -> None:
    model = checkpointed(function, **given)
    reference = train(copy.deepcopy(model), STEP)
    functions = [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]
    with attach(model, EVERY_LAYER) as offloader:
        seen.clear()
        assert_same_trajectory(train(model, STEP), reference)
        assert seen == ([] if function is without else [expected] * NUM_LAYERS)
        assert offloader.metrics()["offloaded_bytes"] == NUM_LAYERS * 2 * 8 * HIDDEN * 4
    assert functions == [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]


def test_what_is_passed() -> None:
    assert hooks_argument(optional, {"use_reentrant": False}) == {
        "respect_saved_tensors_hooks": True
    }
    for function, given in (
        (without, {"use_reentrant": False}),
        (optional, {}),
        (optional, {"use_reentrant": True}),
        (optional, {"use_reentrant": False, "respect_saved_tensors_hooks": None}),
        (dict.get, {"use_reentrant": False}),
    ):
        assert hooks_argument(function, given) == {}


def test_the_benchmarks_peer_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", optional)
    model = tiny_model("llama")
    with peers.checkpointing(model):
        functions = [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]
        given = next(function.keywords for function in functions if function is not None)
        assert given["respect_saved_tensors_hooks"] is True
