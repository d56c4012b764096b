"""Recomputation: traces layer calls, finds recipes, drops storages and rebuilds them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.recompute.recipes import RecipeFinder, settle
from hf_pyao.engine.recompute.replay import DroppedStorage, Replay
from hf_pyao.engine.recompute.trace_values import Source, Value
from hf_pyao.engine.recompute.tracing import Trace
from hf_pyao.engine.recompute.verification import REBUILT, SecondRuns
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.policy import LayerRun, Policy
from hf_pyao.engine.runtime.recomputation import Anchor, Recipe, Refused
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.transfer.layout import TensorLayout


class LayerRecomputer:
    """Traces the layers of which a policy may recompute something.

    Args:
        second_runs: says in which forwards what is rebuilt is checked; None: in none.
    """

    def __init__(self, second_runs: SecondRuns | None = None) -> None:
        self._rules = Rules()
        self._second_runs = second_runs or SecondRuns.unchecked(REBUILT)

    def open(
        self,
        run: LayerRun,
        policy: Policy,
        paths: Sequence[str],
        *,
        reason_not_traceable: Callable[[], str | None],
        is_constant: Callable[[torch.Tensor, int], bool],
        streamed: Callable[[torch.Tensor], Source | None],
        watcher: Observer | None,
    ) -> CallRecomputation | None:
        """Prepare to trace a layer call, if *policy* may recompute something of it; else None."""
        products = policy.products_to_replay(run)
        if products is None:
            return None
        reason = reason_not_traceable()
        trace = None
        if reason is None:
            trace = Trace(paths, products, is_constant, streamed, self._rules, watcher)
        return CallRecomputation(trace, reason or "", watcher, self._second_runs)


class CallRecomputation:
    """What of one layer call is traced, dropped and rebuilt."""

    def __init__(
        self,
        trace: Trace | None,
        reason_not_traced: str,
        watcher: Observer | None,
        second_runs: SecondRuns,
    ) -> None:
        self._second_runs = second_runs
        self.trace = trace
        """What it computed so far, while it runs; None if that is not seen."""
        self._reason_not_traced = reason_not_traced
        self._replay = Replay(trace, watcher, second_runs)
        self._planned: set[Value] = set()
        """What recipes rebuild, while the call runs."""

    # ---- forward -------------------------------------------------------------------------------

    @property
    def is_traced(self) -> bool:
        """True while the layer call runs and its operations are seen."""
        return self.trace is not None

    def start(self) -> None:
        """See operations from here on."""
        if self.trace is not None:
            self.trace.start()

    def pause(self) -> None:
        """See no operations until :meth:`go_on`."""
        if self.trace is not None:
            self.trace.pause()

    def go_on(self) -> None:
        """See operations again."""
        if self.trace is not None:
            self.trace.go_on()

    def close(self) -> None:
        """End the trace, of which recipes keep what they need.

        It may be called again, also where it was interrupted.
        """
        trace = self.trace
        if trace is not None:
            trace.stop()
            self._replay.forget_trace()
            self.trace = None
            self._planned.clear()
            trace.close()

    def producer_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return the sub-module that made *storage*'s content; None if that was not seen."""
        if self.trace is None:
            return None
        value = self.trace.values.get(storage._cdata)
        return None if value is None or value.producer is None else value.producer.path

    def note_stored(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, source: Source
    ) -> None:
        """Note that *storage* will be there in backward, so that recipes may end in it."""
        if self.trace is None:
            return
        value = self.trace.value_of(tensor, storage)
        if value.source is None and not value.is_blocked:
            value.is_stored_in(source)

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Say whether an operation has written its storage since this was asked of it."""
        written, key = self.trace.written if self.trace else set(), tensor.untyped_storage()._cdata
        is_written = key in written
        written.discard(key)
        return is_written

    def known(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> DroppedStorage | None:
        """Return what stands for the content of *storage*, if it was dropped before; else None."""
        if self.trace is None:
            return None
        return self._replay.dropped.get(self.trace.value_of(tensor, storage))

    def recipe_for(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        shared_keys: Container[int] = frozenset(),
    ) -> Recipe | Refused:
        """Find how to rebuild what *tensor*'s storage holds."""
        if self.trace is None:
            return Refused(self._reason_not_traced)
        value = self.trace.value_of(tensor, storage)
        found = RecipeFinder(self.trace, self._planned, shared_keys).find(value)
        if isinstance(found, Refused):
            return found
        return Recipe(
            value,
            [
                Anchor(each, on, each.producer.path if each.producer is not None else "")
                for each, on in found.items()
            ],
        )

    def stored(self, anchor: Anchor, source: Source) -> None:
        """Record that *anchor* is available in backward: *source* reads it."""
        anchor.value.is_stored_in(source)

    def drop(
        self,
        recipe: Recipe,
        call: LayerCall,
        tensor: torch.Tensor,
        layout: TensorLayout,
        slot: Slot,
    ) -> DroppedStorage:
        """Let go of *tensor*'s storage; return what stands for it."""
        settle(recipe.value, self._planned)
        replay = self._replay
        check = self._second_runs.of_forward(call.tape.number)
        record = DroppedStorage(replay, recipe.value, call, slot, tensor, layout, check)
        replay.add(record)
        return record

    # ---- backward ------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Say whether some graph node may still ask for what was dropped."""
        return bool(self._replay.dropped)

    def reset(self) -> None:
        """Drop what was rebuilt; it may be asked for again."""
        self._replay.reset()
