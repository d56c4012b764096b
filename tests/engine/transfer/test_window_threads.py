"""A window that several threads use: what one of them releases, another one passes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import pytest

from hf_pyao.engine.transfer.schedule import Window


class Lock:
    """A window's lock, which another thread holds, and releases some items, when it is first taken.

    What happens between the decision to take a lock and getting it is thus the same in each run.
    """

    def __init__(self, other: Callable[[], None]) -> None:
        self._other: Callable[[], None] | None = other

    def __enter__(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class CountedWindow(Window):
    """Its copies are done when someone waits for them; each may be let go of once."""

    def __init__(self, limit_bytes: int | None, items: Sequence[int]) -> None:
        super().__init__(limit_bytes)
        self.leaving = set(items)
        self.num_waits = 0
        for item in items:
            self.note_offload(item, 10)

    def is_done(self, item: int) -> bool:
        assert item in self.leaving
        return bool(self.num_waits)

    def await_copies(self, items: Sequence[int]) -> None:
        assert self.leaving.issuperset(items)
        self.num_waits += 1

    def let_go(self, item: int) -> None:
        self.leaving.remove(item)


@pytest.mark.parametrize("num_released", [1, 3])
@pytest.mark.parametrize("limit_bytes", [None, 100])
def test_the_end_of_a_layer_passes_over_what_another_thread_releases(
    limit_bytes: int | None, num_released: int
) -> None:
    window = CountedWindow(limit_bytes, range(3))
    window._lock = Lock(  # type: ignore[assignment]
        lambda: window.release(list(window.waiting)[:num_released])
    )

    window.layer_end()

    assert not window.leaving
    assert not window.waiting_bytes
