"""The protocol of recomputation: traces a layer call, drops storages and rebuilds them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_pyao.engine.runtime.policy import LayerRun, Policy
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.transfer.layout import TensorLayout
from hf_pyao.engine.transfer.watcher import CopyWatcher


class Anchor(NamedTuple):
    """A value to be stored, which autograd does not save, so that others can be rebuilt from it."""

    value: Any
    """The recomputation's own."""
    tensor: torch.Tensor
    """A tensor that holds it."""
    path: str
    """Sub-module that made it; empty for the layer itself, or if that is not known."""


class Refused(NamedTuple):
    """A storage cannot be rebuilt, or had better not be."""

    reason: str
    """Short and constant, since reports count by it."""


class Recipe(NamedTuple):
    """How a storage can be rebuilt."""

    value: Any
    """The recomputation's own."""
    anchors: Sequence[Anchor]
    """What must be stored for it."""


class Recomputation(Protocol):
    """What of one layer call is traced, dropped and rebuilt."""

    @property
    def is_traced(self) -> bool:
        """True while the layer call runs and its operations are seen."""
        ...

    def start(self) -> None:
        """See operations from here on."""
        ...

    def pause(self) -> None:
        """See no operations until :meth:`go_on`."""
        ...

    def go_on(self) -> None:
        """See operations again."""
        ...

    def producer_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return the sub-module that made *storage*'s content; None if that was not seen."""
        ...

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Say whether its storage was written since this was asked of it; a version need not tell.

        ``data`` has a version of its own.
        """
        ...

    def known(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Any:
        """Return what stands for the content of *storage*, if it was dropped before; else None."""
        ...

    def recipe_for(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        shared_keys: Container[int] = frozenset(),
    ) -> Recipe | Refused:
        """Find how to rebuild what *tensor*'s storage holds.

        Args:
            tensor: what autograd saves.
            storage: its storage.
            shared_keys: storages that other layers get too, which may be kept at no cost.
        """
        ...

    def stored(self, anchor: Anchor, source: Any) -> None:
        """Record that *anchor* is available in backward: *source* reads it."""
        ...

    def drop(
        self, recipe: Recipe, call: Any, tensor: torch.Tensor, layout: TensorLayout, slot: Slot
    ) -> Any:
        """Let go of *tensor*'s storage; return what stands for it."""
        ...

    def note_stored(self, storage: torch.UntypedStorage, tensor: torch.Tensor, source: Any) -> None:
        """Record that *storage* is available in backward: *source* reads it."""
        ...

    def close(self) -> None:
        """See no more, and forget all but what recipes need.

        It may be called again, also where it was interrupted.
        """
        ...

    def is_live(self) -> bool:
        """Say whether some graph node may still ask for what was dropped."""
        ...

    def reset(self) -> None:
        """Drop what was rebuilt; it may be asked for again."""
        ...


class Recomputer(Protocol):
    """Begins recomputations."""

    def open(
        self,
        run: LayerRun,
        policy: Policy,
        paths: Sequence[str],
        *,
        reason_not_traceable: Callable[[], str | None],
        is_constant: Callable[[torch.Tensor, int], bool],
        watcher: CopyWatcher | None,
    ) -> Recomputation | None:
        """Prepare to trace a layer call, if *policy* may recompute something of it; else None.

        Args:
            run: the layer call.
            policy: says what may be recomputed.
            paths: stack of the sub-modules that run, innermost last; kept up to date by the caller.
            reason_not_traceable: asked if something is to be recomputed: says why the layer's
                operations cannot be seen, or returns None.
            is_constant: says of a tensor that no operation made, and the key of its storage,
                whether it stays on the device in any case (a buffer, a parameter's cast).
            watcher: is told how long tracing and rebuilding take.
        """
        ...
