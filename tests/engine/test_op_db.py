"""torch's own list of operations (``op_db``), each inside of a layer that hf_pyao has.

The list has sample inputs for each operation. Outputs and gradients must have the bits of a run
that never saw hf_pyao, out of place and, where the operation has such a variant, in place.
"""

from __future__ import annotations

import importlib
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map

NUM_SHARES = 60
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpoint_every": 1},
    {"recompute_modules": ("pointwise",)},
)
LEFT_OUT = {"nn.functional.rrelu": "its kernel changes what autograd saved before, unseen"}
"""Why an operation is not compared; LIMITS.md says it too."""


def operations() -> list[Any]:
    """Return torch's list, and leave the process as it was.

    ``expecttest``, which only torch's own tests call, need not be there.
    """
    stand_in: Any = types.SimpleNamespace(TestCase=unittest.TestCase)
    used = sys.modules.setdefault("expecttest", stand_in)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            name = "torch.testing._internal.common_methods_invocations"
            found = importlib.import_module(name).op_db
    finally:
        vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
        if used is stand_in:
            del sys.modules["expecttest"]
    return [each for each in found if each.supports_autograd and each.name not in LEFT_OUT]


TRAINED = object()
TO_NUMPY = {torch.bfloat16: torch.int16, torch.complex32: torch.int32}
"""Dtypes that numpy does not have, and others of their size."""


class OperationLayer(nn.Module):
    """Runs *function*, whose arguments that are trained are the layer's."""

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.run, self.process = function, sample.output_process_fn_grad
        flat, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.flat = [TRAINED if _is_trained(each) else each for each in flat]

    def forward(self, *trained: Tensor) -> tuple[Tensor, ...]:
        made = (each.clone() for each in trained)  # what is saved is no leaf
        flat = [next(made) if each is TRAINED else each for each in self.flat]
        value, args, kwargs = tree_unflatten(flat, self.spec)
        found = tree_flatten(self.process(self.run(value, *args, **kwargs)))[0]
        return tuple(each for each in found if isinstance(each, Tensor) and each.requires_grad)


class OperationNet(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.Identity()])

    def forward(self, *trained: Tensor) -> tuple[Tensor, ...]:
        return self.layers[0](*trained)


register_module_map("OperationNet", ModuleMap(layers=("layers",)))


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def bits(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    known = dense.resolve_conj().view(TO_NUMPY.get(dense.dtype, dense.dtype))
    return dense.dtype, dense.shape, known.numpy(force=True).tobytes()


def outcome(model: nn.Module, trained: Sequence[Tensor]) -> list[object]:
    """Return the bits of outputs and gradients."""
    torch.manual_seed(0)
    outputs = model(*trained)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    found = torch.autograd.grad(outputs, trained, grads, allow_unused=True)
    return [bits(each) for each in (*outputs, *found)]


def cases(operation: Any, dtype: torch.dtype) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    samples = operation.sample_inputs("cpu", dtype, requires_grad=True)
    for sample in islice(samples, 2):
        flat, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
        trained = [each for each in flat if _is_trained(each)]
        for function in (operation.op, operation.get_inplace()):
            if trained and function is not None:
                yield OperationNet(OperationLayer(function, sample)), trained


def differences(operation: Any, dtype: torch.dtype) -> Iterator[str]:
    """Compare the runs of *operation*; say what differs."""
    for model, trained in cases(operation, dtype):
        function = model.layers[0].run
        try:
            expected = outcome(model, trained)
        except RuntimeError:
            if function is operation.op:
                raise
            continue  # in place it would broadcast, or change the dtype
        for settings in SETTINGS:
            config = PyAOConfig(policy="all", min_bytes=0, keep_last_layers=0, **settings)
            try:
                with attach(model, config):
                    found: object = outcome(model, trained)
            except Exception as error:
                found = error
            if found != expected:
                why = found if isinstance(found, Exception) else "other bits"
                yield f"{operation.formatted_name}, {function}, {settings}: {why}"


@pytest.mark.sampled(every=NUM_SHARES)
@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_operations(share: int) -> None:
    found = [each for each in operations() if torch.float64 in each.dtypes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of some operations that they are old
        wrong = [w for each in found[share::NUM_SHARES] for w in differences(each, torch.float64)]
    assert not wrong, "\n".join(wrong)
