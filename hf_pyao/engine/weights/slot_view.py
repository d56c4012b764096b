"""``SlotView``: a weight on the device, as a module's attribute gives it.

[Note: Lost writes]
What a layer writes into a slot is lost: the copy on the host is the one that lasts. A change in
place raises the view's version, and is refused. One through ``.data`` raises none, and PEFT makes
some (it takes a merged adapter out of the weight inside of forward). So a view hands out one tensor
as its ``data``, whose own version tells of changes in place, and refuses an assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_pyao.errors import ConflictError

if TYPE_CHECKING:
    from hf_pyao.engine.weights.blocks import Weight

_PLAIN_DATA: Any = torch.Tensor.data


class SlotView(torch.Tensor):
    """A view of a slot. Operations on it return plain tensors."""

    weight: Weight
    parameter: torch.Tensor | None
    """The parameter that it stands for: whoever exchanges it in a module may hold this alone."""
    _data: torch.Tensor | None
    _first_version: int
    _on_write: Callable[[], None]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def over(plain: torch.Tensor, weight: Weight, on_write: Callable[[], None]) -> SlotView:
        """Return *plain*, a view of a slot, as one of *weight*.

        Args:
            plain: has the weight's dtype and shape, on the device.
            weight: which it is.
            on_write: called before an assignment to ``data`` is refused.
        """
        view = torch.Tensor._make_subclass(SlotView, plain, False)
        view.weight = weight
        view.parameter = weight.ref()
        view._data = None
        view._first_version = view._version
        view._on_write = on_write
        return view

    @property
    def data(self) -> torch.Tensor:
        """The same bytes without history; each time the same tensor."""
        if self._data is None:
            self._data = _PLAIN_DATA.__get__(self)
        return self._data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._on_write()
        raise lost_write(self.weight.name)

    @property
    def was_written(self) -> bool:
        """Whether a layer has changed it, see [Note: Lost writes]."""
        changed = self._version != self._first_version
        return changed or (self._data is not None and self._data._version != 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leave an unpickled one plain."""
        plain: Any = self.detach().clone()
        return plain.__reduce_ex__(protocol)


def lost_write(name: str) -> ConflictError:
    """Return the error for a layer that changes the frozen weight *name* as it runs."""
    return ConflictError(
        f"a layer changes the frozen weight {name!r} in place as it runs, and its weights are "
        "streamed from the host, where the change would be lost. Change it outside of forward and "
        "backward (with PEFT: unmerge_adapter() first), or give stream_weights='off'.",
        key="streamed-weight-changed",
    )
