"""By which backend ``torch.compile`` has compiled a module, and the same on fake tensors.

[Note: Compiled calls] A module is compiled in one of three places: ``module.compile()`` leaves a
compiled ``_call_impl`` in it, ``torch.compile(module)`` a wrapper around it, and
``module.forward = torch.compile(module.forward)`` a compiled function in its place. Each holds one
of torch's compile contexts, which knows the backend. torch has no public way to ask for that. What
is read is listed in :func:`_context_of`. Where nothing is found there, the module counts as
compiled by an unknown backend.

[Note: Fake backends] AOTAutograd traces a graph forward and backward, decomposes it, runs the
backend's passes over both, and divides them. What the forward half returns for backward is what
autograd saves. Where the backend is Inductor, that much of it runs on fake tensors, and the halves
are then called operation by operation. Fused code makes fewer temporary tensors, and takes less
time; what it saves is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_pyao.training_engines import COMPILED

Backend = Callable[..., Any]

_AS_THEY_ARE = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends of torch that generate no code, and run on fake tensors as they are."""


class Place(Enum):
    """Where a module's compiled code is."""

    IN_PLACE = "compile()"
    WRAPPER = "torch.compile(module)"
    FORWARD = "torch.compile(module.forward)"


class CompiledCall(NamedTuple):
    """A module that is compiled, and how."""

    path: str
    """Its qualified name in the model that was searched; empty: the model."""
    module: nn.Module
    """It; in a wrapper, the wrapper."""
    place: Place
    backend: Backend | None
    """What compiles its graphs; None: not known."""
    options: Mapping[str, Any]
    """Further arguments of ``torch._dynamo.optimize``."""


def compiled_calls(model: nn.Module) -> Iterator[CompiledCall]:
    """Yield what of *model* is compiled, outermost first; see [Note: Compiled calls]."""
    for path, module in model.named_modules():
        held = module.__dict__
        if COMPILED.wraps(module):
            yield _found(path, module, Place.WRAPPER, held.get("dynamo_ctx"))
            continue
        if (function := held.get("_compiled_call_impl")) is not None:
            yield _found(path, module, Place.IN_PLACE, _context_of(function))
        forward = held.get("forward")
        is_disabled = getattr(forward, "_torchdynamo_disable", False)
        if hasattr(forward, "_torchdynamo_orig_callable") and not is_disabled:
            yield _found(path, module, Place.FORWARD, _context_of(forward))


def _found(path: str, module: nn.Module, place: Place, context: Any) -> CompiledCall:
    options = {
        "dynamic": getattr(context, "_dynamic", None),
        "nopython": bool(getattr(context, "fullgraph", False)),
    }
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return CompiledCall(path, module, place, backend if callable(backend) else None, options)


def _context_of(function: Any) -> Any:
    """Return the compile context that a compiled function closes over; None if there is none."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(() if code is None else code.co_freevars, cells, strict=True):
        if name == "self" and hasattr(cell.cell_contents, "callback"):
            return cell.cell_contents
    return None


def new_context(backend: Backend, options: Mapping[str, Any]) -> Any:
    """Return one of torch's compile contexts; what it is called with is compiled by *backend*.

    Modules that are compiled by one context share their code where they are equal. Their code is
    kept apart from other code of the same classes; where torch cannot do that, it counts among the
    most compilations that torch makes of a function (``torch._dynamo.config.recompile_limit``).

    Args:
        backend: compiles graphs.
        options: as :attr:`CompiledCall.options`.
    """
    optimize = torch._dynamo.optimize
    is_known = "isolate_recompiles" in inspect.signature(optimize).parameters
    more = {"isolate_recompiles": True} if is_known else {}
    return optimize(backend=backend, **options, **more)


def compile_alike(module: nn.Module, place: Place, context: Any) -> nn.Module:
    """Compile *module*, a copy, as another is compiled at *place*; return it, or its wrapper."""
    copy: Any = module
    if place is Place.WRAPPER:
        wrapper: nn.Module = context(module)
        return wrapper
    if place is Place.IN_PLACE:
        copy._compiled_call_impl = context(copy._call_impl)
    else:
        copy.__dict__.pop("forward", None)  # a function is not copied: it leads to the original
        copy.forward = context(copy.forward)
    return module


def fake_backend(backend: Backend | None) -> Backend | None:
    """Return a backend for fake tensors that divides graphs as *backend* does; None: not known."""
    if getattr(backend, "compiler_name", "") == "inductor":
        return _inductor_partition
    given = getattr(backend, "compiler_fn", backend)
    is_of_torch = getattr(given, "__module__", "").startswith("torch._dynamo.backends")
    return given if is_of_torch and getattr(given, "__name__", "") in _AS_THEY_ARE else None


def _inductor_partition(graph: Any, inputs: Any, **_: Any) -> Any:
    """Compile *graph* by Inductor's passes and partitioner, without its code generation."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(half: Any, _: Any) -> Any:
        return make_boxed_func(half.forward)

    compiler = aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=partition_fn,
        decompositions=select_decomp_table,
    )
    return compiler(graph, inputs)
