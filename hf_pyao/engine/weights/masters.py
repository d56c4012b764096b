"""Masters: the frozen weights of one layer, in one piece of host memory.

The Parameter objects stay in their modules, with identity and version. Their data become views of
this memory, so that ``state_dict``, ``save_pretrained`` and whoever merges adapters find the
weights as before. The copy on the host is the only one that lasts: nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_pyao.engine.transfer.layout import view_of_storage
from hf_pyao.engine.weights.host_bytes import may_differ, places_in_order, places_of
from hf_pyao.engine.weights.master import Master
from hf_pyao.engine.weights.on_disk import WeightsInFile
from hf_pyao.errors import ConflictError


class Masters:
    """The streamed weights of one layer.

    Args:
        layer: the layer's qualified name.
        parameters: name and parameter of each; frozen, dense, on any device.
        home: the device that they go back to; None: the one that each is on.
        lie_in_order: the weights are to lie one behind the other, wherever they lie now: as a file
            has them.
    """

    def __init__(
        self,
        layer: str,
        parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        home: torch.device | None = None,
        lie_in_order: bool = False,
    ) -> None:
        tensors = [tensor for _, tensor in parameters]
        places = places_in_order if lie_in_order else places_of
        lies_in, offsets, nbytes = places(tensors)
        self.layer = layer
        self.lies_in = lies_in
        """The memory that they lie in together already; None: they are to be moved."""
        self.memory: torch.Tensor | None = None
        """uint8, on the host; None until the weights are to be streamed from there."""
        self._twin: torch.Tensor | None = None
        self.masters = masters = tuple(
            Master(name, parameter, offset, home or parameter.device)
            for offset, (name, parameter) in zip(offsets, parameters, strict=True)
        )
        self.nbytes = nbytes
        """Bytes of host memory."""
        self.in_file: WeightsInFile | None = None
        """Where uploads read them, if that is a file; None: :attr:`memory`."""
        self.host_bytes_before = sum(
            master.nbytes
            for master, (_, parameter) in zip(masters, parameters, strict=True)
            if parameter.device.type == "cpu"
        )
        """Bytes that the parameters took on the host before they were moved here."""

    def stay(self, twin: torch.Tensor | None = None) -> None:
        """Leave the weights where they lie.

        Args:
            twin: the bytes of their whole storage, as they were when the weights came there, for
                uploads to read; None: uploads read the weights' own memory.
        """
        self.memory, self._twin = self.lies_in, twin

    def to_upload(self) -> torch.Tensor:
        """Return the bytes that uploads read: uint8, of the size of :attr:`memory`."""
        assert self.memory is not None
        if self._twin is None:
            return self.memory
        start = int(self.memory.storage_offset())
        same = self._twin[start : start + self.memory.numel()]
        if may_differ(self.memory) and not torch.equal(same, self.memory):
            self._twin = None  # from now on the weights are this process's own
            return self.memory
        return same

    def move_to(
        self, memory: torch.Tensor, let_go: Callable[[torch.Tensor], None] = lambda _: None
    ) -> None:
        """Copy the parameters to *memory*, and let them be views of it.

        It may be interrupted, and undone by :meth:`move_back`.

        Args:
            memory: uint8, shape (:attr:`nbytes`,), on the host.
            let_go: gets what each parameter was before, once that is copied.
        """
        self.memory = self.lies_in = memory
        self._twin = self.in_file = None
        storage = memory.untyped_storage()
        with torch.no_grad():
            for master, parameter in self._living():
                view = _view_in(storage, master)
                before = parameter.detach()
                view.copy_(before)
                _exchange(master, parameter, view)
                let_go(before)
                del before  # one weight at a time is there twice

    def take_in(self, master: Master) -> None:
        """Copy the data that *master*'s parameter was given since to the memory, as a view of it.

        They have the same dtype, shape and layout as before.
        """
        parameter = master.ref()
        assert parameter is not None
        assert self.memory is not None
        with torch.no_grad():
            view = _view_in(self.memory.untyped_storage(), master)
            view.copy_(parameter.detach())
            _exchange(master, parameter, view)

    def content(self, let_go: Callable[[torch.Tensor], None] = lambda _: None) -> torch.Tensor:
        """Return a copy of the parameters as they lie in their memory: uint8, on the host.

        Args:
            let_go: gets each parameter, once that is copied.
        """
        copied = torch.zeros(self.nbytes, dtype=torch.uint8)
        storage = copied.untyped_storage()
        with torch.no_grad():
            for master, parameter in self._living():
                _view_in(storage, master).copy_(parameter.detach())
                let_go(parameter.detach())
        return copied

    def stay_in(self, in_file: WeightsInFile) -> None:
        """Let the parameters be views of a file, which has their bytes already.

        It may be interrupted, and undone by :meth:`move_back`.
        """
        self.memory = self.lies_in = in_file.memory
        self._twin, self.in_file = None, in_file
        storage = in_file.memory.untyped_storage()
        with torch.no_grad():
            for master, parameter in self._living():
                _exchange(master, parameter, _view_in(storage, master))

    def file_to_read(self) -> WeightsInFile | None:
        """Return the file that uploads read; None: they read :meth:`to_upload`.

        Raises:
            ConflictError: weights in the file were changed in place in this process.
            DiskError: the system does not tell whether they were.
        """
        if self.in_file is not None and self.in_file.was_written():
            raise changed_in_file(self.layer, self.in_file)
        return self.in_file

    def move_back(self) -> None:
        """Return parameters to the device that they came from. It may be called again.

        Those that were on the host stay views of the memory, which they keep.
        """
        if self.memory is None:
            return
        key = self.memory.untyped_storage()._cdata
        with torch.no_grad():
            for master, parameter in self._living():
                if master.home.type != "cpu" and parameter.untyped_storage()._cdata == key:
                    _exchange(master, parameter, parameter.detach().to(master.home))
                    master.stand_for(None)  # graphs still read the memory

    def copies_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return copies of the weights on *device*, for :meth:`leave_for`.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        with torch.no_grad():
            return [p.detach().to(device, copy=True) for _, p in self._living()]

    def leave_for(self, copies: Sequence[torch.Tensor]) -> None:
        """Let the parameters have *copies* for data. Graphs may still read the memory."""
        with torch.no_grad():
            for (master, parameter), copied in zip(self._living(), copies, strict=True):
                _exchange(master, parameter, copied)
                master.stand_for(None)

    def refuse_thawed(self) -> None:
        """Check that no weight requires gradients by now.

        Raises:
            ConflictError: one does.
        """
        thawed = next((master.name for master, p in self._living() if p.requires_grad), None)
        if thawed is not None:
            raise thawed_weight(thawed)

    def _living(self) -> list[tuple[Master, torch.Tensor]]:
        return [(master, p) for master in self.masters if (p := master.ref()) is not None]


def thawed_weight(name: str) -> ConflictError:
    """Return the error for the streamed weight *name*, which requires gradients by now."""
    return ConflictError(
        f"{name!r} requires gradients, and its layer's frozen weights are streamed from the host. "
        "Detach, and attach again: weights that are trained stay on the device.",
        key="streamed-weight-trained",
    )


def changed_in_file(layer: str, in_file: WeightsInFile) -> ConflictError:
    """Return the error for weights of *layer* that were changed in place, and lie in a file."""
    return ConflictError(
        f"frozen weights of layer {layer!r} were changed in place, by a merge of adapters perhaps. "
        f"They lie in {in_file.file.path}, which other runs read too and which stays as "
        "it is. Detach, and attach again: a file of the new weights is written then. To change "
        "them often, raise host_memory_gib, or set disk_path to None.",
        key="disk-weights-changed",
    )


def _view_in(storage: torch.UntypedStorage, master: Master) -> torch.Tensor:
    """View host memory of a layer as *master* lies in it."""
    blank = torch.empty(0, dtype=master.dtype)
    first = master.offset // master.dtype.itemsize
    return view_of_storage(blank, storage, first, master.size, master.stride)


def _exchange(master: Master, parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Let *parameter*, which stays the same object, have *data*, also of another device."""
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    master.stand_for(None)  # tensors with weak references cannot be swapped
    other = torch.nn.Parameter(data, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    master.stand_for(parameter)
