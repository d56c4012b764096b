"""Which weights outside of a model's layers may be on the host: embeddings, and the output head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

from hf_pyao.model.weights.streamable import Surroundings, reason_to_stay

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
    around = Surroundings(model)
    found: dict[int, tuple[str, Parameter]] = {}
    left: Counter[str] = Counter()
    modules, candidates = _candidates(model, layers)
    for name, module, parameter in candidates:
        reason = reason_to_stay(module, parameter)
        reason = reason or around.reason(module, "weight", parameter, modules)
        if not reason and getattr(module, "max_norm", None) is not None:
            reason = RENORMALISED
        if reason:
            left[reason] += parameter.nbytes
        else:
            found[id(parameter)] = name, parameter
    return Ends(
        parameters=tuple(found.values()),
        projecting=_weights_of_heads(model) & set(found),
        modules=frozenset(
            id(module)
            for module in model.modules()
            if id(module._parameters.get("weight")) in found
        ),
        left_bytes=left,
    )


def _candidates(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]]
) -> tuple[set[int], list[tuple[str, nn.Module, Parameter]]]:
    """Return embeddings and modules of heads by ``id``, and their weights, each once."""
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    modules = {id(module) for module in _modules_of_heads(model)}
    modules |= {id(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    modules -= inside
    found: dict[int, tuple[str, nn.Module, Parameter]] = {}
    for path, module in model.named_modules():
        parameter = module._parameters.get("weight") if id(module) in modules else None
        if parameter is not None:
            name = f"{path}.weight" if path else "weight"
            found.setdefault(id(parameter), (name, module, parameter))
    return modules, list(found.values())


def _weights_of_heads(model: nn.Module) -> frozenset[int]:
    return frozenset(id(each._parameters.get("weight")) for each in _modules_of_heads(model))


def _modules_of_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear modules of the output heads of *model* and of its parts."""
    for module in model.modules():
        getter = getattr(type(module), "get_output_embeddings", None)
        head = None if getter is None else module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, nn.Module):
            yield from (each for each in head.modules() if isinstance(each, nn.Linear))
