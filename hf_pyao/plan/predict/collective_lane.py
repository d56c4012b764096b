"""When the collectives of a step run: one after the other, beside compute."""

from __future__ import annotations


class CollectiveLane:
    """The stream of a process group.

    An all-gather needs nothing that the step computes. It starts when the one before has ended, but
    not before compute has copied out what it waited for last: until then the training engine has no
    buffer for it. A host that is far ahead has queued it by then. A reduction starts when compute
    has made what it reduces.
    """

    def __init__(self) -> None:
        self._ends_ms: list[float] = []
        self._copied_out_ms = 0.0
        """When compute went on after its last wait for one."""

    def queue(self, elapsed_ms: float, now_ms: float, *, is_gather: bool) -> None:
        """Queue a collective.

        Args:
            elapsed_ms: what it takes.
            now_ms: where compute has got to.
            is_gather: it needs nothing of compute.
        """
        ready_ms = self._copied_out_ms if is_gather else now_ms
        free_ms = self._ends_ms[-1] if self._ends_ms else 0.0
        self._ends_ms.append(max(ready_ms, free_ms) + elapsed_ms)

    def wait(self, which: int, now_ms: float) -> float:
        """Return when compute goes on if it waits for one now.

        Args:
            which: 1 is the newest, 2 the one before.
            now_ms: where compute has got to.
        """
        if which > len(self._ends_ms):
            return now_ms
        self._copied_out_ms = max(now_ms, self._ends_ms[-which])
        return self._copied_out_ms

    def finish(self, now_ms: float) -> float:
        """Return when all have ended, or *now_ms* if that is later."""
        return max([now_ms, *self._ends_ms[-1:]])
