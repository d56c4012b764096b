"""The layers that ``PyAOConfig.layers`` names, instead of those of an architecture."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_pyao.errors import ConfigError, NoLayersFoundError, nearest
from hf_pyao.model.map.module_walk import Hit, is_called, walk
from hf_pyao.model.map.wrappers import class_name

_MAX_NAMES_IN_MESSAGE = 16


def find_named_layers(root: nn.Module, patterns: Sequence[str], field: str = "layers") -> list[Hit]:
    """Return the modules of *root* (unwrapped) that *patterns* name.

    A pattern is a qualified name as ``root.named_modules()`` gives it, in which ``*``, ``?`` and
    ``[...]`` stand for parts of one component: ``model.layers.*`` is every element of that list,
    and nothing inside of one. The order is that of the patterns, which should be the order of the
    forward; what one pattern matches is in order of registration.

    Args:
        root: a model, unwrapped.
        patterns: ``PyAOConfig.layers``.
        field: what messages call that.

    Raises:
        NoLayersFoundError: no pattern matches anything in this model.
        ConfigError: one of several patterns matches nothing; a match is a list or dict of modules,
            which is never called itself; or a match lies inside another one.
    """
    by_path: dict[str, Hit] = {}
    for hit in walk(root):
        by_path.setdefault(hit.path, hit)
    del by_path[""]  # the model itself
    matches = [[hit for hit in by_path.values() if _fits(hit.path, p)] for p in patterns]
    missing = [p for p, found in zip(patterns, matches, strict=True) if not found]
    if missing:
        error = ConfigError if any(matches) else NoLayersFoundError
        raise error(_nothing_matches(missing[0], root, by_path, field))
    by_module: dict[int, Hit] = {}
    for found in matches:
        for hit in found:
            by_module.setdefault(id(hit.module), hit)
    hits = list(by_module.values())
    _check(hits, field)
    return hits


def _fits(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _check(hits: Sequence[Hit], field: str) -> None:
    """Check that each of *hits* is called itself, and none is inside of another."""
    owner = {id(hit.module): hit for hit in hits}
    for outer in hits:
        if not is_called(outer.module):
            raise ConfigError(
                f"{field} names {outer.path!r}, a {class_name(outer.module)}: the model runs its "
                f"elements and never calls it itself. Write '{outer.path}.*' for its elements.",
                key="modules-overlap",
            )
        for module in outer.module.modules():
            inner = owner.get(id(module), outer)
            if inner is not outer:
                raise ConfigError(
                    f"{field} names {inner.path!r} and {outer.path!r}, one of which is inside the "
                    "other: what the inner one saves would be counted twice. Name one of them.",
                    key="modules-overlap",
                )


def _nothing_matches(pattern: str, root: nn.Module, by_path: dict[str, Hit], field: str) -> str:
    """Say that *pattern* matches nothing, and which names of as many components there are."""
    depth = pattern.count(".")
    alike = [path for path in by_path if path.count(".") == depth]
    rest = len(alike) - _MAX_NAMES_IN_MESSAGE
    listed = ", ".join(alike[:_MAX_NAMES_IN_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
    hint = nearest(pattern, alike) or nearest(pattern, by_path) or "."
    return (
        f"{field} names {pattern!r}, which matches no module of {class_name(root)}{hint} Names of "
        f"{depth + 1} components: {listed or 'none'}. Names are those of the model inside all "
        "wrappers; '*' stands for one component of a name."
    )
