"""``DeviceWeight``: a streamed weight on the device, which stands for the parameter in its module.

[Note: Lost writes]
What a layer writes there is lost: the copy on the host is the one that lasts. A change in place
raises the tensor's version, and is refused. One through ``.data`` raises none, and PEFT makes some
(it takes a merged adapter out of the weight inside of forward). So there is one tensor for
``data``, whose own version tells of changes, and an assignment is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.errors import ConflictError

if TYPE_CHECKING:
    from hf_pyao.engine.weights.blocks import Weight

_PLAIN_DATA: Any = torch.Tensor.data


class DeviceWeight(torch.Tensor):
    """A view of a block. Operations on it return plain tensors."""

    weight: Weight
    parameter: torch.Tensor | None
    """The parameter that it stands for: whoever exchanges it in a module may hold this alone."""
    _data: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _first: tuple[int, int]

    @staticmethod
    def of(weight: Weight, storage: torch.UntypedStorage, device: torch.device) -> DeviceWeight:
        """Return *weight*, whose block lies in *storage* on *device*."""
        plain = weight.view_of(storage, device)
        made = torch.Tensor._make_subclass(DeviceWeight, plain, False)
        made.weight = weight
        made.parameter = weight.ref()
        made._data = _PLAIN_DATA.__get__(made)
        made._first = made._versions
        return made

    @property
    def data(self) -> torch.Tensor:
        """The same bytes without history; each time the same tensor."""
        return self._data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise lost_write(self.weight.name)

    @property
    def _versions(self) -> tuple[int, int]:
        return self._version, self._data._version

    def was_written(self) -> bool:
        """Say whether it was changed, see [Note: Lost writes]."""
        return self._versions != self._first

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy."""
        return Parameter(self.detach().clone(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leave an unpickled one plain."""
        plain: Any = Parameter(self.detach().clone(), requires_grad=False)
        return plain.__reduce_ex__(protocol)


_PLAIN = frozenset({torch.Tensor, DeviceWeight})


def key_of(tensor: torch.Tensor) -> int | None:
    """Return by what the storage of a saved *tensor* is known; None for one that is no plain view.

    What a layout does not tell is to hold the memory itself.
    """
    if type(tensor) not in _PLAIN or not has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    key: int = tensor.untyped_storage()._cdata
    return key


def lost_write(name: str) -> ConflictError:
    """Return the error for a layer that changes the frozen weight *name* as it runs."""
    return ConflictError(
        f"a layer changes the frozen weight {name!r} in place as it runs, and its weights are "
        "streamed from the host, where the change would be lost. Change it outside of forward and "
        "backward (with PEFT: unmerge_adapter() first), or give stream_weights='off'.",
        key="streamed-weight-changed",
    )
