"""What the search for layers found, and the roles that hold in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

Roles = Mapping[str, Sequence[str]]
"""Role -> paths of sub-modules inside one layer."""


@dataclass(frozen=True, kw_only=True)
class FoundLayers:
    """The layers of one model, and what is known about them."""

    layers: tuple[tuple[str, nn.Module], ...]
    """``(fqn, module)`` in the order of definition, which is the order of the forward in
    transformers' models: an encoder's layers come before the decoder's. Where a layer is compiled,
    checkpointed or sharded, the module is the outermost wrapper of that layer alone. The fqn is
    relative to the unwrapped model, without wrapper components."""
    stack: nn.Module
    """The smallest module with a forward of its own that holds all layers: ``LlamaModel``,
    ``OPTDecoder``, ``BartModel``; with its own wrapper, if it has one inside the model."""
    roles: Mapping[str, Roles] = field(default_factory=dict)
    """Layer fqn -> the roles in that layer, by a module map or else inferred."""
    how: str = ""
    """By which rule the layers were found."""

    def roles_of(self, fqn: str) -> Roles:
        """Return the roles of one layer."""
        return self.roles.get(fqn, {})

    @property
    def all_roles(self) -> dict[str, tuple[str, ...]]:
        """The roles of all layers together, for messages: one path may play two of them."""
        paths: dict[str, dict[str, None]] = {}
        for roles in self.roles.values():
            for role, of_layer in roles.items():
                paths.setdefault(role, {}).update(dict.fromkeys(of_layer))
        return {role: tuple(of_all) for role, of_all in paths.items()}
