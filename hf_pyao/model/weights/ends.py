"""Which weights outside of a model's layers may be on the host: embeddings, and the output head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

from hf_pyao.model.weights.streamable import (
    ADAPTER,
    PARAMETRIZED,
    TIED,
    is_tied,
    owners_by_storage,
    parameters_of_adapters,
    reason_to_stay,
    wrapped_by_peft,
)

RENORMALISED = "with max_norm"
"""Such an embedding writes into its weight in forward."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The frozen weights of embeddings and head; tied ones once."""

    parameters: tuple[tuple[str, Parameter], ...] = ()
    """Qualified name in the model, and parameter."""
    projecting: frozenset[int] = frozenset()
    """By ``id``, those that the head multiplies with: all their bytes are read."""
    modules: frozenset[int] = frozenset()
    """By ``id``, the embeddings and the linear modules of the head that have one of them."""
    left_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of weights of embeddings and head that stay on the device, by reason."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for _, parameter in self.parameters)


def ends_of(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> Ends:
    """Return the weights of embeddings and head that may be on the host.

    A weight is one if it is frozen, and all modules that have it are embeddings or linear modules
    of the head.

    Args:
        model: the whole model.
        layers: qualified name and module; what they have is not looked at.
    """
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    heads = list(_modules_of_heads(model))
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    modules = set(map(id, (*heads, *embeddings))) - inside
    owners, adapters = owners_by_storage(model), parameters_of_adapters(model)
    wrapped = wrapped_by_peft(model)
    found: dict[int, tuple[str, Parameter]] = {}
    left: Counter[str] = Counter()
    seen: set[int] = set()
    for path, module in model.named_modules():
        parameter = module._parameters.get("weight") if id(module) in modules else None
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        reason = ADAPTER if id(parameter) in adapters else reason_to_stay(module, parameter)
        if not reason and (id(module), "weight") in wrapped:
            reason = PARAMETRIZED
        if not reason and is_tied(parameter, owners, modules):
            reason = TIED
        if not reason and isinstance(module, nn.Embedding) and module.max_norm is not None:
            reason = RENORMALISED
        if reason:
            left[reason] += parameter.nbytes
        else:
            found[id(parameter)] = f"{path}.weight" if path else "weight", parameter
    return Ends(
        parameters=tuple(found.values()),
        projecting=frozenset(id(each._parameters.get("weight")) for each in heads) & set(found),
        modules=frozenset(
            id(module)
            for module in model.modules()
            if id(module._parameters.get("weight")) in found
        ),
        left_bytes=left,
    )


def _modules_of_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear modules of the output heads of *model* and of its parts."""
    for module in model.modules():
        getter = getattr(type(module), "get_output_embeddings", None)
        head = None if getter is None else module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, nn.Module):
            yield from (each for each in head.modules() if isinstance(each, nn.Linear))
