"""Which parameters of a model's layers may be streamed, and why the others stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.utils import parametrize

from hf_pyao.engine.transfer.layout import byte_span
from hf_pyao.engine.weights import expert_groups
from hf_pyao.engine.weights.blocks import ExpertGroups
from hf_pyao.engine.weights.converted import ITEMSIZE
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.model.weights.experts import FusedExperts, fused_experts
from hf_pyao.model.weights.flattened import FlattenedWeight, flattened
from hf_pyao.model.weights.quantised import QuantisedWeight, quantised
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
"""Recurrent cells keep references to their weights, and so the memory of a slot."""


@dataclass(frozen=True, kw_only=True)
class StreamableLayer:
    """The parameters of one layer that may be streamed."""

    fqn: str
    parameters: tuple[tuple[str, Parameter], ...]
    """Qualified name in the model, and parameter; each of them once."""
    quantised: tuple[tuple[str, QuantisedWeight], ...] = ()
    """Those of them that are quantised, by qualified name; their scales travel with them."""
    flattened: tuple[tuple[str, FlattenedWeight], ...] = ()
    """Parameters of tensor classes whose parts are streamed in their place, by qualified name."""
    experts: tuple[tuple[str, FusedExperts], ...] = ()
    """Modules of fused experts, by qualified name, of which all weights may be streamed."""
    left_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the others, by reason."""
    convertible: frozenset[str] = frozenset()
    """Names of the parameters that may be uploaded in the dtype of autocast."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that may be streamed, and of their scales."""
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @property
    def converted_nbytes(self) -> int:
        """Bytes that copies of those parameters take on the host."""
        return sum(
            aligned(parameter.numel() * ITEMSIZE)
            for name, parameter in self.parameters
            if name in self.convertible
        )

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of all that is streamed: parameters, scales, parts of tensor classes."""
        scales = [
            (f"{name}.{scale}", tensor)
            for name, weight in self.quantised
            for scale, tensor in weight.scales
        ]
        parts = [
            (f"{name}.{part}", tensor)
            for name, weight in self.flattened
            for part, tensor in weight.tensors
        ]
        return [*self.parameters, *scales, *parts]

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

    def group_bytes(self, groups: ExpertGroups) -> int:
        """Return the bytes of the first group of *groups*, which is the largest."""
        weights = [each for name, each in self.parameters if name in groups.names]
        return sum(each.nbytes // each.shape[0] * groups.group_size for each in weights)


def largest_block_bytes(layers: Sequence[StreamableLayer]) -> int:
    """Return how large a block of *layers* may be: layers with more are divided, if they can be."""
    return expert_groups.largest_block_bytes(each.nbytes - each.expert_bytes for each in layers)


def slot_bytes(layers: Sequence[StreamableLayer]) -> int:
    """Return about how large a slot is that takes any block of *layers*, alignment left out."""
    limit_bytes = largest_block_bytes(layers)
    sizes = []
    for layer in layers:
        groups = [layer.group_bytes(each) for each in layer.groups(limit_bytes)]
        sizes += [layer.nbytes - layer.expert_bytes, *groups] if groups else [layer.nbytes]
    return max(sizes, default=0)


def streamable_layers(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]]
) -> list[StreamableLayer]:
    """Return for each of *layers* which of its parameters may be streamed.

    Args:
        model: the whole model: what is tied with a parameter outside of its layer stays.
        layers: qualified name and module, in forward order.
    """
    owners = owners_by_storage(model)
    wrapped = wrapped_by_peft(model)
    adapters = parameters_of_adapters(model)
    by_dora = _read_by_dora(model)
    holders = _holders(model)
    found = []
    for fqn, layer in layers:
        inside = {id(module) for module in layer.modules()}
        parameters: dict[int, tuple[str, Parameter]] = {}
        packed: list[tuple[str, QuantisedWeight]] = []
        convertible: set[str] = set()
        in_parts: dict[int, tuple[str, FlattenedWeight]] = {}
        fused: list[tuple[str, FusedExperts]] = []
        left: Counter[str] = Counter()
        for path, module in layer.named_modules():
            experts = fused_experts(module)
            if experts is not None:
                fused.append((".".join(part for part in (fqn, path) if part), experts))
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in parameters:
                    continue
                if id(parameter) in in_parts:
                    continue
                weight = quantised(module, parameter)
                parts = _parts_of(parameter) if weight is None else None
                is_known = weight is not None or parts is not None
                reason = reason_to_stay(module, parameter, is_known=is_known)
                if not reason and id(parameter) in adapters:
                    reason = ADAPTER
                if not reason and experts is not None and name in experts.biases:
                    reason = VECTOR
                if not reason and (id(module), name) in wrapped:
                    reason = PARAMETRIZED
                if not reason and is_tied(parameter, owners, inside):
                    reason = TIED
                if not reason and parts is not None and not holders[id(parameter)] <= inside:
                    reason = TIED
                if reason:
                    is_strided = parameter.layout is torch.strided
                    left[reason] += parameter.nbytes if is_strided else 0
                    continue
                whole = ".".join(part for part in (fqn, path, name) if part)
                if parts is not None:
                    in_parts[id(parameter)] = whole, parts
                else:
                    parameters[id(parameter)] = whole, parameter
                    if id(module) not in by_dora and _is_convertible(module, parameter, experts):
                        convertible.add(whole)
                    if weight is not None:
                        packed.append((whole, weight))
        names = {name for name, _ in parameters.values()}
        whole_experts = [
            (path, experts)
            for path, experts in fused
            if all(f"{path}.{name}" in names for name in experts.names)
        ]
        of_experts = {f"{path}.{name}" for path, each in whole_experts for name in each.names}
        found.append(
            StreamableLayer(
                fqn=fqn,
                # Experts last: what else a layer has lies together, for one copy.
                parameters=tuple(sorted(parameters.values(), key=lambda p: p[0] in of_experts)),
                experts=tuple(whole_experts),
                quantised=tuple(packed),
                flattened=tuple(in_parts.values()),
                left_bytes=left,
                convertible=frozenset(convertible),
            )
        )
    return found


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
    if parameter.layout is not torch.strided or not parameter.numel() or not is_dense(parameter):
        return NOT_DENSE
    if isinstance(module, nn.RNNBase):
        return HELD
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return HOOKED
    if parametrize.is_parametrized(module) or isinstance(module, parametrize.ParametrizationList):
        return PARAMETRIZED
    return ""


def _parts_of(parameter: Parameter) -> FlattenedWeight | None:
    """Return what streams *parameter* by its parts, if its class has dense ones; else None."""
    if _is_plain(parameter) or any(engine.has(parameter) for engine in ENGINES):
        return None
    weight = flattened(parameter)
    if weight is None or not all(is_dense(tensor) for _, tensor in weight.tensors):
        return None
    return weight


def _holders(model: nn.Module) -> dict[int, set[int]]:
    """Return by id of each parameter the ids of the modules that have it."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(module))
    return holders


def _is_convertible(module: nn.Module, parameter: Parameter, experts: FusedExperts | None) -> bool:
    """Say whether autocast casts *parameter* wherever *module* is taken to read it.

    It does not for look-ups in tables, nor for products of several experts at once.
    """
    if not _is_plain(parameter) or parameter.dtype != torch.float32:
        return False
    if experts is not None and not experts.are_read_together:
        return False
    return not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def parameters_of_adapters(model: nn.Module) -> set[int]:
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


def _read_by_dora(model: nn.Module) -> set[int]:
    """Return the ids of the modules whose weights PEFT's DoRA reads in their stored dtype."""
    found = set()
    for module in model.modules():
        anything: Any = module
        used = getattr(module, "use_dora", None)
        if isinstance(used, dict) and any(used.values()) and hasattr(module, "get_base_layer"):
            found.add(id(anything.get_base_layer()))
    return found


def wrapped_by_peft(model: nn.Module) -> set[tuple[int, str]]:
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
            if parameter.layout is torch.strided:
                key = parameter.untyped_storage()._cdata
                owners.setdefault(key, {})[id(module), name] = parameter
    return owners


def is_tied(parameter: Parameter, owners: Owners, inside: set[int]) -> bool:
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
