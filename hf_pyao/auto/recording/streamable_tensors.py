"""Which tensors of a model that is recorded may be streamed, as the run would have it."""

from __future__ import annotations

from torch import nn

from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.weights.ends import ends_of
from hf_pyao.model.weights.streamable import streamable_layers
from hf_pyao.plan.step.step_program import READ_BY_ROWS, READ_WHOLE
from hf_pyao.plan.step.weight_reads import Streamable

_SMALLEST_BYTES = 1
"""So that every layer with experts tells how these are divided."""


def streamable_tensors(model: nn.Module, found: FoundLayers) -> dict[int, Streamable]:
    """Return by ``id`` the tensors of *found* layers, embeddings and head that may be on the host.

    Args:
        model: the whole model, on fake tensors.
        found: its layers.
    """
    tensors: dict[int, Streamable] = {}
    for layer in streamable_layers(model, found.layers):
        numbers = {
            name: number
            for number, together in enumerate(layer.groups(_SMALLEST_BYTES), 1)
            for name in together.names
        }
        for name, tensor in layer.tensors:
            number = numbers.get(name, 0)
            tensors[id(tensor)] = Streamable(number, tensor.shape[0] if number else 0)
    ends = ends_of(model, found.layers)
    for _, parameter in ends.parameters:
        end = READ_WHOLE if id(parameter) in ends.projecting else READ_BY_ROWS
        tensors[id(parameter)] = Streamable(end=end)
    return tensors
