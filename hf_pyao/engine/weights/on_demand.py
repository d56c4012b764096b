"""Weights outside of the layers that are uploaded when they are read: embeddings and the head.

Their memory on the host is that of streamed layers (``masters.py``), and so are their places in the
modules' tables (``tables.py``). No slot is kept for them: between two reads they take no memory of
the device. See [Note: Reading on demand] in ``host_weight.py``.

- Rows of an embedding: the ids are read on the host, which waits for the device once. Each row
  that occurs is gathered into page-locked memory and uploaded. The look-up runs on the device, over
  these rows. A frozen embedding saves nothing for backward.
- A whole weight: uploaded into memory of its own. What autograd saves of it becomes a block and a
  layout, and is uploaded again in backward, where it lives as long as the node that reads it.
  :meth:`WeightsOnDemand.held` keeps it over several reads, as those of a loss in chunks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.layout import Layouts, TensorLayout, has_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Block, SavedWeight, Weight, weights_by_parameter
from hf_pyao.engine.weights.checkpointed import weights_kept_from_graphs
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.device_weight import DeviceWeight, lost_write
from hf_pyao.engine.weights.figures import OnDemandFigures
from hf_pyao.engine.weights.host_weight import HostWeight
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.staging import Staging
from hf_pyao.engine.weights.unrecorded import unrecorded

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _Here(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.depth = 0
        """Forwards of the model, or of parts of it, that run."""
        self.held: dict[int, DeviceWeight] = {}
        """Weights that are kept on the device over several reads, by the weight's id."""
        self.to_hold: frozenset[int] = frozenset()
        """Weights that are to be kept once they are read."""


class WeightsOnDemand:
    """Reads weights on the host in forwards of the model; none, until :meth:`take`.

    Args:
        link: has the transport.
        device: where compute reads the weights.
        on_forward: called as the model's forward begins.
        counts: what is counted further; None: anew.
    """

    def __init__(
        self,
        link: LinkContext,
        device: torch.device,
        on_forward: Callable[[], None] = lambda: None,
        counts: OnDemandFigures | None = None,
    ) -> None:
        self.device = device
        self.blocks: tuple[Block, ...] = ()
        """One for each parameter."""
        self.counts = OnDemandFigures() if counts is None else counts
        """What was counted so far; :meth:`figures` brings it up to date."""
        self._link = link
        self._weights: dict[int, Weight] = {}
        self._on_device: list[DeviceBlock] = []
        self._transport = link.transport
        store: Store = link.tiers.stores[0]
        self._staging = Staging(store, link.transport)
        self._times = LinkTimes()
        """Of rows: what the uploads took, and compute's waits for them."""
        self._on_forward = on_forward
        self._stand_ins: dict[int, HostWeight] = {}
        self._layouts = Layouts()
        self._here = _Here()
        self._lock = threading.RLock()

    def take(self, masters: Sequence[Masters]) -> None:
        """Read these weights from now on; one of *masters* for each parameter, with its memory."""
        self.blocks = tuple(Block(index, each) for index, each in enumerate(masters))
        self.counts.pool_bytes = sum(each.nbytes for each in masters)
        self._on_device = [
            DeviceBlock(each, self._link, self.device, self.counts, self._times)
            for each in self.blocks
        ]
        self._weights = weights_by_parameter(self.blocks)

    # ---- what the model sees -------------------------------------------------------------------

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is read on demand."""
        return self.weight_of(parameter) is not None

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is known of *parameter*; None if it is not read on demand."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def read(self, parameter: Parameter | None) -> torch.Tensor | None:
        """Return what a module's attribute gives where *parameter* is in its table.

        In a forward of the model: what stands for the weight on the device. Elsewhere the parameter
        itself.
        """
        weight, here = self.weight_of(parameter), self._here
        if weight is None:
            return parameter
        if id(weight) in here.to_hold:
            return self._hold(weight)
        return self._stand_in(weight) if here.depth else parameter

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is what a look-up has given; it knows its parameter itself."""
        return False

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what *call* does, which is a forward of the model or of a part of it."""
        here, has_gradients = self._here, torch.is_grad_enabled()
        before = here.depth
        try:
            here.depth = before + 1
            if self.blocks and not before:
                for block in self.blocks:
                    block.masters.refuse_thawed()
                self._on_forward()
            return call()
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise
        finally:
            here.depth = before

    @contextlib.contextmanager
    def held(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Keep those of *parameters* that are read meanwhile on the device until the end."""
        here = self._here
        before = here.to_hold, here.held
        wanted = {id(each) for one in parameters if (each := self.weight_of(one)) is not None}
        try:
            here.held = dict(here.held)
            here.to_hold = here.to_hold | wanted
            yield
        finally:
            written = [
                v for key, v in here.held.items() if key not in before[1] and v.was_written()
            ]
            here.to_hold, here.held = before
            if written:
                raise lost_write(written[0].weight.name)

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``function(*args, **kwargs)``, where arguments are :class:`HostWeight`.

        Raises:
            ConflictError: it writes into a weight, whose copy on the host would not change.
        """
        if function is F.embedding and kwargs.get("max_norm") is None:
            ids, weight = _arguments_of_embedding(args, kwargs)
            if isinstance(weight, HostWeight) and not isinstance(ids, HostWeight):
                return self._embed(ids, weight.weight)
        if function == _GET_DATA:
            return args[0]
        if function == _SET_DATA:
            raise lost_write(args[0].weight.name)
        given: list[DeviceWeight] = []

        def on_device(stand_in: HostWeight) -> torch.Tensor:
            view = self._whole(stand_in.weight)
            if function is F.linear and (dtype := self._autocast_dtype(view)) is not None:
                cast = self._cast(view, dtype)
                keys[cast.untyped_storage()._cdata] = stand_in.weight, dtype
                return cast
            keys[view.untyped_storage()._cdata] = stand_in.weight, None
            given.append(view)
            return view

        keys: dict[int, tuple[Weight, torch.dtype | None]] = {}
        with self._kept_from_graph(keys):
            args, kwargs = tree_map_only(HostWeight, on_device, (args, kwargs))
            result = function(*args, **kwargs)
        if any(view.was_written() for view in given):
            raise lost_write(given[0].weight.name)
        return result

    def stop(self) -> None:
        """Let go of what is on the device. Graphs that hold handles upload their weights again."""
        self._staging.release()

    def figures(self) -> OnDemandFigures:
        """Return what was uploaded. Copies that still run are counted, and not yet timed."""
        self._transport.collect(self.counts, self._times)
        return self.counts

    # ---- rows ----------------------------------------------------------------------------------

    def _embed(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        with self._lock, unrecorded():
            rows, places = self._rows(ids, weight)
            return F.embedding(places, rows)

    def _rows(self, ids: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Upload each row that occurs in *ids*; return the rows, and each id's place among them."""
        parameter = weight.ref()
        assert parameter is not None
        distinct, places = torch.unique(ids, return_inverse=True)
        table = parameter.detach()
        distinct = distinct.to(table.device)  # the host waits for the ids
        label = f"rows of {weight.name!r}"
        rows = self._staging.upload_rows(table, distinct, self.device, self._times, label)
        self.counts.num_gathers += bool(rows.nbytes)
        self.counts.gathered_rows += distinct.numel()
        self.counts.gathered_bytes += rows.nbytes
        return rows, places.to(self.device)

    # ---- whole weights -------------------------------------------------------------------------

    def _whole(self, weight: Weight) -> DeviceWeight:
        """Upload *weight*; return it in memory that lives as long as someone holds it."""
        with self._lock, unrecorded():
            there = self._on_device[weight.block]
            try:
                there.fill()
                there.await_fill()
                self.counts.num_uploads += 1
                return DeviceWeight.of(weight, there.storage, self.device)
            finally:
                there.leave()

    def _hold(self, weight: Weight) -> DeviceWeight:
        held = self._here.held
        view = held.get(id(weight))
        if view is None:
            view = held[id(weight)] = self._whole(weight)
        return view

    def _stand_in(self, weight: Weight) -> HostWeight:
        found = self._stand_ins.get(id(weight))
        if found is None:
            with unrecorded():
                found = HostWeight.of(weight, self.device, weakref.proxy(self))
            self._stand_ins[id(weight)] = found
        return found

    def _autocast_dtype(self, tensor: torch.Tensor) -> torch.dtype | None:
        """Return what autocast casts *tensor* to for a product; None if it does not."""
        device_type = self.device.type
        if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
            return None
        return torch.get_autocast_dtype(device_type)

    def _cast(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with unrecorded(), torch.autocast(self.device.type, enabled=False):
            return view.to(dtype)

    # ---- what graphs hold ----------------------------------------------------------------------

    def _kept_from_graph(
        self, keys: dict[int, tuple[Weight, torch.dtype | None]]
    ) -> contextlib.AbstractContextManager[None]:
        """Have graphs hold what gives a weight again, of the weights and casts in *keys*."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        find = functools.partial(self._find, keys)
        return weights_kept_from_graphs(find, "embeddings and head")

    def _find(
        self, keys: dict[int, tuple[Weight, torch.dtype | None]], tensor: torch.Tensor
    ) -> Callable[[], torch.Tensor] | None:
        """Return what gives *tensor* again, if it is a view of a weight or of its cast."""
        known = keys.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None
        if known is None:
            return None
        return functools.partial(
            self._again, *known, self._layouts.of(tensor), SavedWeight(known[0])
        )

    def _again(
        self, weight: Weight, dtype: torch.dtype | None, layout: TensorLayout, saved: SavedWeight
    ) -> torch.Tensor:
        saved.check()
        with unrecorded():
            view: torch.Tensor = self._whole(weight)
            if dtype is not None:
                view = self._cast(view, dtype)
            return layout.view_of(view.untyped_storage(), 0)


def _arguments_of_embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    names = ("input", "weight")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["input"], given["weight"]


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, DeviceWeight) or not has_storage(tensor):
        return False
    return not (tensor.is_conj() or tensor.is_neg())
