"""Weights outside of the layers that are uploaded when they are read: embeddings and the head.

Their memory on the host is that of streamed layers (``masters.py``). Between two reads they take no
memory of the device.

[Note: Reading on demand]
Modules keep their parameters, on the host. While the model's forward runs, and no layer of it, a
mode of torch's sees each function that gets such a parameter:

- ``F.embedding`` reads a few rows. The ids are read on the host, which waits for the device once.
  Each row that occurs is gathered into page-locked memory and uploaded. The look-up runs on the
  device, over these rows. A frozen embedding saves nothing for backward.
- What needs no element (shape, dtype) is answered by the parameter, and its device is the compute
  device.
- Any other function gets the whole weight, in memory of its own that is let go when the function
  returns. What autograd saves of it becomes a block and a layout, and is uploaded again in
  backward, where it lives as long as the node that reads it. :meth:`WeightsOnDemand.held` keeps it
  over several reads, as those of a loss in chunks.

So code that reads another module's weight (DoRA), or multiplies with an embedding's, is served too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from hf_pyao.engine.stores.store import Store
from hf_pyao.engine.transfer.layout import Layouts
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Block, SavedView, Weight, weights_by_parameter
from hf_pyao.engine.weights.checkpointed import weights_kept_from_graphs
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.device_weight import DeviceWeight, key_of, lost_write
from hf_pyao.engine.weights.figures import OnDemandFigures
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.places import Place
from hf_pyao.engine.weights.staging import Staging
from hf_pyao.engine.weights.unrecorded import unrecorded

_VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Attributes of a tensor that are views of it; others but its device need no element."""
_PLACES = frozenset({"device", "is_cpu", "is_cuda", "is_xpu", "get_device"})
_METADATA = frozenset(
    "__hash__ __len__ __repr__ __set__ dim element_size is_complex is_conj is_contiguous "
    "is_floating_point is_inference is_neg is_signed numel size stride storage_offset".split()
)
"""Functions that need no element."""


Keys = dict[int | None, tuple[Weight, torch.dtype | None]]
"""By storage the weight, and the dtype that it was cast to; None: it was not."""


class WeightsOnDemand(TorchFunctionMode):
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
        super().__init__()
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
        self._layouts = Layouts()
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

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is known of *parameter*; None if it is not read on demand."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    # ---- forwards ------------------------------------------------------------------------------

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what *call* does, which is a forward of the model or of a part of it."""
        if any(each is self for each in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
            return call()
        has_gradients = torch.is_grad_enabled()
        try:
            if self.blocks:
                for block in self.blocks:
                    block.masters.refuse_thawed()
                self._on_forward()
            with self:
                return call()
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise

    def run_layer(self, call: Callable[[], Any]) -> Any:
        """Return what *call* does, which is a forward of a layer: nothing is looked at in it."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not stack or stack[-1] is not self:
            return call()
        with torch.overrides._pop_mode_temporarily():
            return call()

    @contextlib.contextmanager
    def held(self, module: nn.Module) -> Iterator[None]:
        """Have the weight of *module* on the device until the end, if it is read on demand.

        Raises:
            ConflictError: it was written to.
        """
        parameter = module._parameters.get("weight")
        weight = self.weight_of(parameter)
        if weight is None:
            yield
            return
        view = self._whole(weight)
        assert isinstance(view, DeviceWeight)
        place = Place(module, "weight", lambda found: found is parameter, lambda: view)
        try:
            place.put_in()
            yield
        finally:
            place.take_out()
        if view.was_written():
            raise lost_write(weight.name)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return ``function(*args, **kwargs)``, where arguments may be parameters on the host.

        Raises:
            ConflictError: it writes into a weight, whose copy on the host would not change.
        """
        kwargs = kwargs or {}
        if (first := self._first_among((*args, *kwargs.values()))) is None:
            return function(*args, **kwargs)
        if function is F.embedding and kwargs.get("max_norm") is None:
            ids, weight = _arguments_of_embedding(args, kwargs)
            if (known := self.weight_of(weight)) is not None and self.weight_of(ids) is None:
                return self._embed(ids, known)
        name = getattr(function, "__name__", "")
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        if attribute == "data":
            if name == "__set__":
                raise lost_write(first.name)
            return args[0]
        if attribute in _PLACES or name in _PLACES:
            return function(torch.empty(0, device=self.device))
        if name in _METADATA or (name == "__get__" and attribute not in _VIEWS):
            return function(*args, **kwargs)
        return self._compute(function, args, kwargs)

    def _first_among(self, values: Sequence[Any]) -> Weight | None:
        """Return the first of the weights among *values*, or in their lists; None for none."""
        for value in values:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Parameter) and (weight := self.weight_of(each)) is not None:
                    return weight
        return None

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``function(*args, **kwargs)`` of whole weights on the device."""
        given: list[DeviceWeight] = []
        keys: Keys = {}

        def on_device(parameter: Parameter) -> torch.Tensor:
            weight = self.weight_of(parameter)
            if weight is None:
                return parameter
            dtype = self._autocast_dtype(weight) if function is F.linear else None
            view = self._whole(weight, dtype)
            keys[view.untyped_storage()._cdata] = weight, dtype
            if isinstance(view, DeviceWeight):
                given.append(view)
            return view

        with self._kept_from_graph(keys):
            args, kwargs = tree_map_only(Parameter, on_device, (args, kwargs))
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

    def _whole(self, weight: Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Upload *weight*; return it in memory that lives as long as someone holds it.

        Args:
            weight: any.
            dtype: what it is cast to; None: a :class:`DeviceWeight`.
        """
        with self._lock, unrecorded():
            there = self._on_device[weight.block]
            try:
                there.fill()
                there.await_fill()
                self.counts.num_uploads += 1
                view = DeviceWeight.of(weight, there.storage, self.device)
            finally:
                there.leave()
            if dtype is None:
                return view
            with torch.autocast(self.device.type, enabled=False):
                return view.to(dtype)

    def _autocast_dtype(self, weight: Weight) -> torch.dtype | None:
        """Return what autocast casts *weight* to for a product; None if it does not."""
        device_type = self.device.type
        if weight.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
            return None
        return torch.get_autocast_dtype(device_type)

    # ---- what graphs hold ----------------------------------------------------------------------

    def _kept_from_graph(self, keys: Keys) -> contextlib.AbstractContextManager[None]:
        """Have graphs hold what gives a weight again, of the weights and casts in *keys*."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        find = functools.partial(self._find, keys)
        return weights_kept_from_graphs(find, "embeddings and head")

    def _find(self, keys: Keys, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return what gives *tensor* again, if it is a view of a weight or of its cast."""
        key = key_of(tensor)
        if key not in keys:
            return None
        weight, dtype = keys[key]

        def storage() -> torch.UntypedStorage:
            return self._whole(weight, dtype).untyped_storage()

        return SavedView(weight, self._layouts.of(tensor), storage)


def _arguments_of_embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    names = ("input", "weight")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["input"], given["weight"]
