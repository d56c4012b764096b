"""Names of what an inventory has found, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

_MOST_VISITED = 100_000


def name_of(target: Any, roots: Iterable[nn.Module], others: Iterable[Any] = ()) -> str:
    """Return by which way *target* is reached from *roots*: ``attribute 'mlp.state[0]'``.

    Args:
        target: a value, or a module's dictionary of attributes.
        roots: modules.
        others: further values to begin from.
    """
    pending: list[tuple[str, Any]] = [("", root) for root in roots]
    pending += [("an argument", other) for other in others]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_VISITED:
        path, value = pending.pop(0)
        if value is target:
            return f"attribute {path!r}" if path else "a module"
        if id(value) in seen:
            continue
        seen.add(id(value))
        if getattr(value, "__dict__", None) is target:
            return f"{type(value).__name__} {path!r}" if path else type(value).__name__
        pending.extend(_inside(path, value))
    return f"a {type(target).__name__}"


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__"):
        start = f"{path}." if path else ""
        is_module = isinstance(value, nn.Module)
        for name, item in vars(value).items():
            is_table = is_module and name in ("_modules", "_buffers", "_parameters")
            if is_table:
                yield f"{start}{name}", item
                yield from ((f"{start}{key}", each) for key, each in item.items())
            else:
                yield f"{start}{name}", item
