"""Fake copies of quantised weights, for a step that is recorded on fake tensors.

bitsandbytes' ``Params4bit`` and ``Int8Params`` are parameters with attributes beside their tensor:
scales, code books, the layer that they belong to. ``copy.deepcopy`` of one makes a real tensor, or
fails under a fake mode. A stand-in is a plain fake parameter with fake copies of these attributes.
That is what the library's kernels look at: their operators have fake implementations
(``bitsandbytes._ops``), so that a recorded step has the shapes of the real one. Weights of other
libraries have no stand-in: what their layers do with another class is not known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.training_engines import package_of

_LIBRARY = "bitsandbytes"


def note_stand_ins(model: nn.Module, memo: dict[int, Any]) -> None:
    """Have ``copy.deepcopy(model, memo)`` take stand-ins for quantised weights.

    Call it under ``FakeCopyMode``, with the *memo* that the copy of the model is made with: what
    attributes share with the model, their copies share with its copy.

    Args:
        model: whose parameters are looked at.
        memo: copies by the id of the original; stand-ins are added.
    """
    foreign = [each for each in model.parameters() if holds_more(each)]
    for parameter in foreign:
        plain = parameter.detach().as_subclass(torch.Tensor)
        fake = copy.deepcopy(plain, memo)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for parameter in foreign:  # whose attributes may lead to modules, and so to each other
        vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))


def holds_more(parameter: nn.Parameter) -> bool:
    """Say whether *parameter* is of a class for which a stand-in runs the library's own kernels."""
    return package_of(type(parameter)) == _LIBRARY


def tensors_beside(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what quantised weights hold beside their tensor, named as their layers are.

    Args:
        model: real, or a copy whose stand-ins :func:`note_stand_ins` made.
    """
    own = (*model.parameters(), *model.buffers())
    storages = {each.untyped_storage()._cdata for each in own if has_storage(each)}
    for path, module in model.named_modules():
        if package_of(type(module)) in ("torch", "transformers", "peft"):
            continue
        known = {id(module), *map(id, module.parameters()), *map(id, module.buffers())}
        held: list[Any] = [vars(each) for each in module.parameters(recurse=False)]
        if any(held):
            held += (value for name, value in vars(module).items() if not name.startswith("_"))
        for tensor in _tensors_under(held, known):
            if (key := tensor.untyped_storage()._cdata) not in storages:  # nor a packed weight
                storages.add(key)
                yield f"{path}.scales", tensor


def _tensors_under(value: Any, known: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that *value* leads to, modules left out; *known* grows."""
    if id(value) in known or isinstance(value, (nn.Module, type)):
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    within: Any = ()
    if isinstance(value, dict):
        within = value.values()
    elif isinstance(value, (list, tuple)):
        within = value
    elif package_of(type(value)) not in ("torch", "builtins"):
        within = vars(value).values() if hasattr(value, "__dict__") else ()
    for each in within:
        yield from _tensors_under(each, known)
