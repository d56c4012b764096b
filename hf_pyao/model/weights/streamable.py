"""Which parameters of a model's layers may be streamed, and why the others stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.utils import parametrize

from hf_pyao.engine.transfer.layout import byte_span, has_storage
from hf_pyao.engine.weights import expert_groups
from hf_pyao.engine.weights.blocks import ExpertGroups
from hf_pyao.model.weights.experts import FusedExperts, fused_experts
from hf_pyao.model.weights.packed import FlattenedWeight, PackedWeight, packed_weight
from hf_pyao.training_engines import ENGINES, package_of

LEAST_DIMENSIONS = 2
"""Vectors (norms, biases) stay: they are a few kB of a layer, and are read by many operations."""

TRAINED = "trained"
ADAPTER = "of adapters"
VECTOR = "vectors"
SUBCLASS = "of class {name} ({package})"
NOT_DENSE = "not dense"
TIED = "tied with others"
HOOKED = "with hooks"
PARAMETRIZED = "parametrized"
HELD = "held by their module"
"""Recurrent cells keep references to their weights, and so the memory of a block."""


@dataclass(frozen=True, kw_only=True)
class StreamableLayer:
    """The parameters of one layer that may be streamed."""

    fqn: str
    parameters: tuple[tuple[str, Parameter], ...]
    """Qualified name in the model, and parameter, of those that are one tensor; each once."""
    packed: tuple[tuple[str, PackedWeight], ...] = ()
    """The parameters that are streamed as several tensors, by qualified name."""
    experts: tuple[tuple[str, FusedExperts], ...] = ()
    """Modules of fused experts, by qualified name, of which all weights may be streamed."""
    left_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the others, by reason."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that may be streamed."""
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of all that is streamed; fused experts come last."""
        of_packed = [
            (f"{name}.{part}" if part else name, tensor)
            for name, weight in self.packed
            for part, tensor in weight.tensors
        ]
        return [*of_packed, *self.parameters]

    @property
    def expert_bytes(self) -> int:
        """Bytes of the fused experts."""
        return sum(sum(experts.nbytes) for _, experts in self.experts)

    def groups(self, limit_bytes: int) -> list[ExpertGroups]:
        """Return the groups of experts that the layer is divided into; none if it is small enough.

        Args:
            limit_bytes: the largest block that is wanted.
        """
        if self.nbytes <= limit_bytes:
            return []
        return [each for fqn, experts in self.experts for each in experts.groups(limit_bytes, fqn)]


def largest_block_bytes(layers: Sequence[StreamableLayer]) -> int:
    """Return how large a block of *layers* may be: layers with more are divided, if they can be."""
    return expert_groups.largest_block_bytes(each.nbytes - each.expert_bytes for each in layers)


def slot_bytes(layers: Sequence[StreamableLayer]) -> int:
    """Return about how large a slot is that takes any block of *layers*, alignment left out."""
    limit_bytes = largest_block_bytes(layers)
    sizes = (min(each.nbytes, limit_bytes) if each.experts else each.nbytes for each in layers)
    return max(sizes, default=0)


def streamable_layers(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]]
) -> list[StreamableLayer]:
    """Return for each of *layers* which of its parameters may be streamed.

    Args:
        model: the whole model: what is tied with a parameter outside of its layer stays.
        layers: qualified name and module, in forward order.
    """
    around = Surroundings(model, layers)
    return [_streamable(fqn, layer, around) for fqn, layer in layers]


class Surroundings:
    """What of a whole model decides whether a weight may be streamed.

    Args:
        model: the whole model.
        layers: qualified name and module.
    """

    def __init__(self, model: nn.Module, layers: Sequence[tuple[str, nn.Module]] = ()) -> None:
        self._owners = owners_by_storage(model)
        self._wrapped = _wrapped_by_peft(model)
        self._adapters = _parameters_of_adapters(model)
        self._in_layers = Counter(id(each) for _, layer in layers for each in layer.modules())
        self._holders: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self._holders.setdefault(id(parameter), set()).add(id(module))

    def reason(self, module: nn.Module, name: str, parameter: Parameter, inside: Set[int]) -> str:
        """Return why *parameter* of *module* stays on the device; empty: it need not.

        Args:
            module: its owner.
            name: of the parameter there.
            parameter: any.
            inside: by ``id``, modules that may have it.
        """
        if id(parameter) in self._adapters:
            return ADAPTER
        if (id(module), name) in self._wrapped:
            return PARAMETRIZED
        is_shared = self._in_layers[id(module)] > 1 or not self._holders[id(parameter)] <= inside
        return TIED if is_shared or is_tied(parameter, self._owners, inside) else ""


def _streamable(fqn: str, layer: nn.Module, around: Surroundings) -> StreamableLayer:
    inside = {id(module) for module in layer.modules()}
    parameters: dict[int, tuple[str, Parameter]] = {}
    packed: dict[int, tuple[str, PackedWeight]] = {}
    fused: list[tuple[str, FusedExperts]] = []
    left: Counter[str] = Counter()
    for path, module in layer.named_modules():
        prefix = ".".join(part for part in (fqn, path) if part)
        experts = fused_experts(module)
        if experts is not None:
            fused.append((prefix, experts))
        for name, parameter in module._parameters.items():
            key = id(parameter)
            if parameter is None or key in parameters or key in packed:
                continue
            weight = _packed(module, parameter)
            reason = reason_to_stay(module, parameter, is_known=weight is not None)
            if not reason and experts is not None and name in experts.biases:
                reason = VECTOR
            reason = reason or around.reason(module, name, parameter, inside)
            if reason:
                left[reason] += parameter.nbytes if has_storage(parameter) else 0
            elif weight is not None:
                packed[key] = f"{prefix}.{name}", weight
            else:
                parameters[key] = f"{prefix}.{name}", parameter
    names = {name for name, _ in parameters.values()}
    whole = [
        (path, experts)
        for path, experts in fused
        if names.issuperset(f"{path}.{name}" for name in experts.names)
    ]
    of_experts = {f"{path}.{name}" for path, each in whole for name in each.names}
    # Experts last: what else a layer has lies together, for one copy.
    in_order = sorted(parameters.values(), key=lambda each: each[0] in of_experts)
    return StreamableLayer(
        fqn=fqn,
        parameters=tuple(in_order),
        experts=tuple(whole),
        packed=tuple(packed.values()),
        left_bytes=left,
    )


def reason_to_stay(module: nn.Module, parameter: Parameter, *, is_known: bool = False) -> str:
    """Return why *parameter* of *module* cannot be streamed, whatever else has it; else empty.

    Args:
        module: its owner.
        parameter: any.
        is_known: it is of a class of its own that can be streamed.
    """
    if parameter.requires_grad:
        return TRAINED
    if not (_is_plain(parameter) or is_known):
        kind = type(parameter)
        return SUBCLASS.format(name=kind.__name__, package=package_of(kind))
    if parameter.dim() < LEAST_DIMENSIONS:
        return VECTOR
    if not has_storage(parameter) or not parameter.numel() or not is_dense(parameter):
        return NOT_DENSE
    if isinstance(module, nn.RNNBase):
        return HELD
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return HOOKED
    if parametrize.is_parametrized(module) or isinstance(module, parametrize.ParametrizationList):
        return PARAMETRIZED
    return ""


def _packed(module: nn.Module, parameter: Parameter) -> PackedWeight | None:
    """Return what streams *parameter* as several tensors; None if its class has no dense ones."""
    weight = None if any(e.has(parameter) for e in ENGINES) else packed_weight(module, parameter)
    if isinstance(weight, FlattenedWeight) and not all(is_dense(t) for _, t in weight.tensors):
        return None
    return weight


def _parameters_of_adapters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of PEFT's adapters, and of what they take the place of.

    PEFT freezes and thaws both as adapters are switched, as DPO does for its reference.
    """
    found: set[int] = set()
    for module in model.modules():
        names = getattr(type(module), "adapter_layer_names", None)
        if names is None and "modules_to_save" in module._modules:  # PEFT 0.17 names none there
            names = ("modules_to_save",)
        if not isinstance(names, tuple):
            continue
        parts = [getattr(module, name, None) for name in names]
        if "modules_to_save" in module._modules:  # its original comes back
            parts.append(getattr(module, "original_module", None))
        for part in parts:
            if isinstance(part, nn.Module | nn.ParameterDict):
                found.update(map(id, part.parameters()))
    return found


def _wrapped_by_peft(model: nn.Module) -> set[tuple[int, str]]:
    """Return module and name of the parameters that PEFT parametrizes during forward.

    Its ``ParamWrapper`` (adapters on parameters, as those of fused experts) puts what the module's
    attribute gives into the module again when forward ends.
    """
    wrapped = set()
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "ParamWrapper" and package_of(kind) == "peft":
            anything: Any = module
            wrapped.add((id(anything.get_base_layer()), str(anything.parameter_name)))
    return wrapped


def _is_plain(parameter: Parameter) -> bool:
    """Say whether a parameter is of no class of its own; on fake tensors none is."""
    return type(parameter) is Parameter or isinstance(parameter, FakeTensor)


def is_dense(parameter: torch.Tensor) -> bool:
    """Say whether its elements fill its bytes, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


Owners = dict[int, dict[tuple[int, str], Parameter]]


def owners_by_storage(model: nn.Module) -> Owners:
    """Return by storage who has a part of it: module, name and parameter."""
    owners: Owners = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_plain(parameter) or parameter.is_meta:
                continue
            if has_storage(parameter):
                key = parameter.untyped_storage()._cdata
                owners.setdefault(key, {})[id(module), name] = parameter
    return owners


def is_tied(parameter: Parameter, owners: Owners, inside: Set[int]) -> bool:
    """Say whether another parameter has some of its bytes, or a module outside of the layer has it.

    Parameters that lie beside each other in one storage are not tied.
    """
    first, last = byte_span(parameter)
    for (module, _), other in owners.get(parameter.untyped_storage()._cdata, {}).items():
        if other is parameter:
            if module not in inside:
                return True
            continue
        start, end = byte_span(other)
        if start < last and first < end:
            return True
    return False
