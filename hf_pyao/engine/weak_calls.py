"""Calls of methods that do not keep their object alive.

[Note: Who owns whom] What is dropped must be gone at once: device memory and page-locked host
memory cannot wait for Python's cyclic collector, which counts objects and not bytes. So references
go one way, from the owner to what it owns: the model owns its hooks, these own the lifecycle, that
owns the offloader, that the engine, and that what it moves with. A part that has to call its owner
holds the owner's methods weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def weakly(method: Callable[Arguments, Result], otherwise: Result) -> Callable[Arguments, Result]:
    """Return a function that calls the bound *method* and does not keep its object alive.

    Args:
        method: a bound method.
        otherwise: what the function returns once the object is gone.
    """
    weak = weakref.WeakMethod(method)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = weak()
        return otherwise if bound is None else bound(*args, **kwargs)

    return call
