"""Blocks: the frozen weights of one layer, in one piece of host memory.

The Parameter objects stay in their modules, with identity and version. Their data become views of
the block's memory, so that ``state_dict``, ``save_pretrained`` and whoever merges adapters find
the weights as before. The copy on the host is the only one that lasts: nothing is copied back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hf_pyao.engine.rerun.weight_samples import WeightSamples
from hf_pyao.engine.transfer.layout import view_of_storage
from hf_pyao.engine.weights.host_bytes import HostBytes, places_of


class Weight:
    """One streamed parameter: its place in a block.

    Args:
        block: number of the block.
        name: qualified name in the model.
        parameter: held weakly.
        offset: first byte in the block.
        home: the device that it goes back to.
    """

    __slots__ = (
        *("block", "dtype", "home", "name", "nbytes", "offset", "ref", "size", "stand_in"),
        "stride",
    )

    def __init__(
        self, block: int, name: str, parameter: torch.Tensor, offset: int, home: torch.device
    ) -> None:
        self.block = block
        self.name = name
        self.ref: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self.offset = offset
        self.dtype = parameter.dtype
        self.size = parameter.size()
        self.stride = parameter.stride()
        self.nbytes = parameter.numel() * parameter.element_size()
        self.home = home
        """The device that the parameter goes back to."""
        self.stand_in: Callable[[], torch.Tensor | None] | None = None
        """Returns what is read on the device in place of a parameter of a class of its own."""

    def is_read_as(self, stand_in: Callable[[], torch.Tensor | None]) -> None:
        """Let :attr:`stand_in` be *stand_in*; None of it: the plain weight is read."""
        self.stand_in = stand_in

    def view_of(self, storage: torch.UntypedStorage, blank: torch.Tensor) -> torch.Tensor:
        """View *storage*, which holds the block from byte 0, as this weight.

        Args:
            storage: the block's bytes.
            blank: an empty tensor of the weight's dtype, on the device of *storage*.
        """
        first = self.offset // self.dtype.itemsize
        return view_of_storage(blank, storage, first, self.size, self.stride)


class Block(HostBytes):
    """The streamed weights of one layer.

    Args:
        index: its number among the blocks, in forward order.
        layer: the layer's qualified name.
        parameters: name and parameter of each; frozen, dense, on any device.
        home: the device that they go back to; None: the one that each is on.
    """

    def __init__(
        self,
        index: int,
        layer: str,
        parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        home: torch.device | None = None,
    ) -> None:
        lies_in, offsets, nbytes = places_of([tensor for _, tensor in parameters])
        super().__init__(lies_in)
        self.index = index
        self.layer = layer
        self.weights = weights = tuple(
            Weight(index, name, parameter, offset, home or parameter.device)
            for offset, (name, parameter) in zip(offsets, parameters, strict=True)
        )
        self.nbytes = nbytes
        """Bytes that an upload copies."""
        self.host_bytes_before = sum(
            weight.nbytes
            for weight, (_, parameter) in zip(weights, parameters, strict=True)
            if parameter.device.type == "cpu"
        )
        """Bytes that the parameters took on the host before they were moved here."""
        self._samples = WeightSamples()
        self._seen: tuple[list[int], list[torch.Tensor]] = ([], [])

    def has(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Say whether these are the block's weights, in its memory."""
        if self.memory is None or len(parameters) != len(self.weights):
            return False
        key = self.memory.untyped_storage()._cdata
        return all(
            weight.ref() is parameter and parameter.untyped_storage()._cdata == key
            for weight, (_, parameter) in zip(self.weights, parameters, strict=True)
        )

    def move_to(
        self, memory: torch.Tensor, let_go: Callable[[torch.Tensor], None] = lambda _: None
    ) -> None:
        """Copy the parameters to *memory*, and let them be views of it.

        It may be interrupted, and undone by :meth:`move_back`.

        Args:
            memory: uint8, shape (:attr:`nbytes`,), on the host.
            let_go: gets what each parameter was before, once that is copied.
        """
        self.memory, self._twin = memory, None
        storage = memory.untyped_storage()
        with torch.no_grad():
            for weight, parameter in self._living():
                blank = torch.empty(0, dtype=weight.dtype, device=memory.device)
                master = weight.view_of(storage, blank)
                before = parameter.detach()
                master.copy_(before)
                _exchange(weight, parameter, master)
                let_go(before)
                del before  # one weight at a time is there twice

    def move_back(self) -> None:
        """Return parameters to the device that they came from. It may be called again.

        Those that were on the host stay views of the block's memory, which they keep.
        """
        if self.memory is None:
            return
        key = self.memory.untyped_storage()._cdata
        with torch.no_grad():
            for weight, parameter in self._living():
                if weight.home.type != "cpu" and parameter.untyped_storage()._cdata == key:
                    _exchange(weight, parameter, parameter.detach().to(weight.home))

    def copies_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return copies of the weights on *device*, for :meth:`leave_for`.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        with torch.no_grad():
            return [p.detach().to(device, copy=True) for _, p in self._living()]

    def leave_for(self, copies: Sequence[torch.Tensor]) -> None:
        """Let the parameters have *copies* for data. Graphs may still read the block's memory."""
        with torch.no_grad():
            for (weight, parameter), copied in zip(self._living(), copies, strict=True):
                _exchange(weight, parameter, copied)
                weight.ref = _gone

    def note_content(self) -> None:
        """Remember what the weights hold, for :meth:`has_changed`."""
        parameters = [parameter for _, parameter in self._living()]
        versions = [parameter._version for parameter in parameters]
        self._seen = (versions, self._samples.take(parameters))

    def has_changed(self) -> bool:
        """Say whether the weights on the host were changed since :meth:`note_content`.

        By version; writes through ``.data`` change none, and are known by a few elements.
        """
        parameters = [parameter for _, parameter in self._living()]
        versions, samples = self._seen
        if versions != [parameter._version for parameter in parameters]:
            return True
        return self._samples.have_changed(parameters, samples)

    def thawed(self) -> str:
        """Return the name of a weight that requires gradients by now; empty if none does."""
        return next((weight.name for weight, p in self._living() if p.requires_grad), "")

    def _living(self) -> list[tuple[Weight, torch.Tensor]]:
        return [(weight, p) for weight in self.weights if (p := weight.ref()) is not None]


def _exchange(weight: Weight, parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Let *parameter*, which stays the same object, have *data*, also of another device."""
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    weight.ref = _gone  # tensors with weak references cannot be swapped
    other = torch.nn.Parameter(data, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    weight.ref = weakref.ref(parameter)


def _gone() -> None:
    """Return None: the weight has left the block."""
