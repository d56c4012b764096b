"""By which backend ``torch.compile`` has compiled a module.

[Note: Compiled calls] A module is compiled in one of three places: ``module.compile()`` leaves a
compiled ``_call_impl`` in it, ``torch.compile(module)`` a wrapper around it, and
``module.forward = torch.compile(module.forward)`` a compiled function in its place. Each holds one
of torch's compile contexts, which knows the backend. torch has no public way to ask for that. What
is read is listed in :func:`_context_of`. Where nothing is found there, the module counts as
compiled by an unknown backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from hf_pyao.training_engines import COMPILED

Backend = Callable[..., Any]


class Place(Enum):
    """Where a module's compiled code is."""

    IN_PLACE = "compile()"
    WRAPPER = "torch.compile(module)"
    FORWARD = "torch.compile(module.forward)"


@dataclass(frozen=True, eq=False)
class CompiledBy:
    """How something is compiled."""

    backend: Backend | None
    """What compiles its graphs; None: not known."""
    options: Mapping[str, Any]
    """Further arguments of ``torch._dynamo.optimize``."""


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """A module that is compiled, and how."""

    path: str
    """Its qualified name in the model that was searched; empty: the model."""
    module: nn.Module
    """It; in a wrapper, the wrapper."""
    place: Place
    by: CompiledBy


def compiled_calls(model: nn.Module) -> Iterator[CompiledCall]:
    """Yield what of *model* is compiled, outermost first; see [Note: Compiled calls]."""
    for path, module in model.named_modules():
        attributes = module.__dict__
        if COMPILED.wraps(module):
            context = attributes.get("dynamo_ctx")
            yield _found(path, module, Place.WRAPPER, context)
            continue
        if attributes.get("_compiled_call_impl") is not None:
            function = attributes["_compiled_call_impl"]
            yield _found(path, module, Place.IN_PLACE, _context_of(function))
        forward = attributes.get("forward")
        is_disabled = getattr(forward, "_torchdynamo_disable", False)
        if hasattr(forward, "_torchdynamo_orig_callable") and not is_disabled:
            yield _found(path, module, Place.FORWARD, _context_of(forward))


def new_context(backend: Backend, options: Mapping[str, Any]) -> Any:
    """Return one of torch's compile contexts; what it is called with is compiled by *backend*.

    Modules that are compiled by one context share their code where they are equal.

    Args:
        backend: compiles graphs.
        options: as :attr:`CompiledBy.options`.
    """
    return torch._dynamo.optimize(backend=backend, **options)


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


def alone(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return *options* for code that is kept apart from other code of the same classes.

    Where torch cannot do that, it counts among the most compilations that torch makes of a function
    (``torch._dynamo.config.recompile_limit``).
    """
    is_known = "isolate_recompiles" in inspect.signature(torch._dynamo.optimize).parameters
    return {**options, **({"isolate_recompiles": True} if is_known else {})}


def _found(path: str, module: nn.Module, place: Place, context: Any) -> CompiledCall:
    options: dict[str, Any] = {
        "dynamic": getattr(context, "_dynamic", None),
        "nopython": bool(getattr(context, "fullgraph", False)),
    }
    if getattr(context, "_isolate_recompiles_id", -1) != -1:
        options["isolate_recompiles"] = True
    return CompiledCall(path, module, place, CompiledBy(_backend_in(context), options))


def _context_of(function: Any) -> Any:
    """Return the compile context that a compiled function closes over; None if there is none."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(() if code is None else code.co_freevars, cells, strict=True):
        if name == "self" and hasattr(cell.cell_contents, "callback"):
            return cell.cell_contents
    return None


def _backend_in(context: Any) -> Backend | None:
    """Return the backend of a compile context; None if it is not found."""
    found: Any = getattr(context, "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found if callable(found) else None
