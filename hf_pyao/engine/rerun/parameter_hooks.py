"""Hooks on parameters, which a forward may register or remove: noted, and put back.

``parameter.register_hook`` changes a table that belongs to the parameter, and not to a module. If a
second run of a layer registered its hook once more, the hook would be called twice with each
gradient from then on.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter

from hf_pyao.engine.rerun.values import without_ours

_NAMES = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TABLES = operator.attrgetter(*_NAMES)
_NONE = (None, None)


class ParameterHooks:
    """The hooks on *parameters* when this is made.

    Hooks on the node that accumulates a gradient are not among them: torch has no list of those.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        tables = list(map(_TABLES, parameters))
        self._noted: dict[int, tuple[dict[int, Any] | None, ...]] = {}
        """Contents of tables by index of the parameter, of those that have hooks."""
        if tables.count(_NONE) != len(tables):
            self._noted = {
                index: tuple(None if each is None else dict(each) for each in both)
                for index, both in enumerate(tables)
                if both != _NONE
            }

    def restore(self) -> None:
        """Put the hooks back that were there, and remove others than those of this package."""
        for index, (parameter, tables) in enumerate(
            zip(self._parameters, map(_TABLES, self._parameters), strict=True)
        ):
            if tables == _NONE and index not in self._noted:
                continue
            for name, now, noted in zip(_NAMES, tables, self._noted.get(index, _NONE), strict=True):
                _restore(parameter, name, now, noted or {})


def _restore(parameter: Parameter, name: str, now: Any, noted: dict[int, Any]) -> None:
    """Make the table *name* of *parameter*, which is *now*, hold what was *noted*."""
    wanted = noted if now is None else without_ours(now, noted)
    if now is None and wanted:
        setattr(parameter, name, OrderedDict(wanted))
    elif now is not None and list(now.items()) != list(wanted.items()):
        now.clear()  # in place: handles of hooks refer to the table
        now.update(wanted)
