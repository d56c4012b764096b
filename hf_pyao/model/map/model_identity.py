"""What tells one model from another, for documents that hold for one alone."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import named_submodules


def identity_of(found: FoundLayers) -> dict[str, Any]:
    """Return the kinds and the number of a model's layers, and a digest of their structure.

    The digest is of names, classes and sizes of all sub-modules: the same for each rank and for
    each wrapper, another for another width, or with adapters. Weights are not looked at.
    """
    digest = hashlib.sha256()
    for _, layer in found.layers:
        digest.update(_structure(layer).encode())
    return {
        "layer_classes": sorted({type(layer).__name__ for _, layer in found.layers}),
        "num_layers": len(found.layers),
        "structure_sha256": digest.hexdigest()[:16],
    }


def _structure(layer: nn.Module) -> str:
    modules = [(name, module) for name, module in named_submodules(layer)]
    return ";".join(
        f"{name}={type(module).__name__}({module.extra_repr()})" for name, module in modules
    )
