"""What around the layers takes the effect of a setting away, as a look at the model tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_pyao.auto.install.conflicts import other_checkpointing
from hf_pyao.no_effect import NoEffect


def inside_of_checkpoints(model: nn.Module) -> Iterator[NoEffect]:
    """Yield that layers are checkpointed already, if they are."""
    what = other_checkpointing(model)
    if what:
        yield NoEffect(
            setting="offloading what layers save inside",
            expected="what the operations of a layer save leaves the device",
            seen=f"{what}: autograd saves only each layer's input, and only that is offloaded",
            reason="a checkpointed layer is computed again in backward from its input",
            remedy="to offload instead of recomputing, set gradient_checkpointing=False "
            "(activation_checkpointing=False from transformers 5.23 on; TRL's configurations "
            "switch it on by default), and fsdp_config's activation_checkpointing to false",
        )


def adapters_without_gradients(model: nn.Module) -> Iterator[NoEffect]:
    """Yield that trainable tensors get no gradients, if that is known before the first step."""
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    offloaded: dict[int, None] = {}
    for module in model.modules():
        if _is_offloaded_by_accelerate(module):
            own = (each for each in module.parameters(recurse=False) if id(each) in trained)
            offloaded.update(dict.fromkeys(id(each) for each in own))
    on_meta = [key for key, each in trained.items() if each.is_meta]
    if offloaded:
        yield NoEffect(
            setting="Accelerate's cpu_offload (or a device_map with 'cpu' or 'disk')",
            expected=f"the {len(trained)} trainable tensors are trained",
            seen=f"{len(offloaded)} of them get no gradient",
            reason="its hooks put a copy of each weight in the model for a forward and take it out "
            "afterwards: gradients go to the copies",
            remedy="load the model without it; stream_weights keeps frozen weights on the host, "
            "and trains adapters on the device",
        )
    elif on_meta:
        yield NoEffect(
            setting="training of tensors on the meta device",
            expected=f"the {len(trained)} trainable tensors are trained",
            seen=f"{len(on_meta)} of them are on 'meta' and hold no values",
            reason="adapters were made beside weights that were on 'meta' (low_cpu_mem_usage, or "
            "Accelerate's cpu_offload), and were not filled since",
            remedy="load the weights before get_peft_model, or call it without low_cpu_mem_usage",
        )


def _is_offloaded_by_accelerate(module: nn.Module) -> bool:
    hook: Any = getattr(module, "_hf_hook", None)
    return any(
        bool(getattr(each, "offload", False)) for each in (hook, *getattr(hook, "hooks", ()))
    )
