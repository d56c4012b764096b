"""Weights that come to the device by rows: those of embeddings and of the output head.

[Note: By rows]
The weight of an embedding or of a head may be larger than a layer. So it visits in pieces, each of
some rows, which are blocks of the ring like those of layers and no larger than the largest of
these. A module's attribute gives a ``HostWeight``, and what is done with that decides:

- A look-up (``F.embedding``) gathers the rows that occur on the host and uploads them. They are
  updated and perturbed there, element by element as the whole weight would be. Then all pieces
  visit once, to be updated, unless the head reads the same weight later in the forward.
- A product (``F.linear``) goes through the pieces: each makes some columns of the result. Both
  passes of a step take turns at each piece, so that it is uploaded once.
- Anything else gets the whole weight, put together on the device.

The host reads the ids of a look-up, which waits for the device. What one pass has looked up is kept
for the other one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from hf_pyao.engine.weights.blocks import Weight
from hf_pyao.engine.weights.device_weight import lost_write
from hf_pyao.engine.weights.host_weight import HostWeight
from hf_pyao.engine.weights.staging import Staging
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeight
from hf_pyao.engine.zeroth_order.visits import WeightVisits

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class VisitsByRows(WeightVisits):
    """Visits, with weights among them that are read by rows; see [Note: By rows].

    Args:
        blocks: as for the base class; and so is *given*.
        given: further arguments of the base class.
        read_later: by ``id``, embeddings' weights that the head reads at the end of the forward.
    """

    def __init__(
        self,
        blocks: Sequence[VisitBlock],
        *given: Any,
        read_later: Collection[int] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(blocks, *given, **options)
        self._read_later = read_later
        self._staging = Staging(self.link.tiers.stores[0], self._transport)
        self._stand_ins: dict[int, HostWeight] = {}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By weight, numbers and content of the rows that were looked up last in this step."""
        self._gathered_rows = 0
        self._gathered_bytes = 0

    def begin_step(self) -> None:
        """Begin a forward, or both forwards of a step: weights may have changed."""
        self._kept.clear()
        super().begin_step()

    def stop(self) -> None:
        """Let go of what is on the device, and of the memory for gathering."""
        super().stop()
        self._kept.clear()
        self._staging.release()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        rows = {"gathered_rows": self._gathered_rows, "gathered_bytes": self._gathered_bytes}
        return super().figures() | rows

    def read(self, parameter: Any) -> Any:
        """Return what the base class does; of a weight that is read by rows, what stands for it."""
        streamed = None if self.sign is None else self.weight_of(parameter)
        if streamed is None or not streamed.groups:
            return super().read(parameter)
        found = self._stand_ins.get(id(streamed))
        if found is None:
            with torch.no_grad():
                found = HostWeight.of(streamed, self.device, weakref.proxy(self))
            self._stand_ins[id(streamed)] = found
        return found

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``function(*args, **kwargs)``, where arguments are :class:`HostWeight`.

        Raises:
            ConflictError: it writes into a weight, whose copy on the host would not change.
        """
        if function is F.embedding and kwargs.get("max_norm") is None:
            ids, weight = _named(("input", "weight"), args, kwargs)
            if isinstance(weight, HostWeight) and not isinstance(ids, HostWeight):
                return self._embed(ids, weight.weight)
        if function is F.linear:
            given = _named(("input", "weight", "bias"), args, kwargs)
            if [isinstance(each, HostWeight) for each in given] == [False, True, False]:
                return self._project(given[0], given[1].weight, given[2])
        if function == _GET_DATA:
            return args[0]
        if function == _SET_DATA:
            raise lost_write(args[0].weight.name)
        wholes = {
            id(each): self._whole(each.weight)
            for each in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(each, HostWeight)
        }
        versions = {key: whole._version for key, whole in wholes.items()}
        found: list[str] = []

        def on_device(stand_in: HostWeight) -> torch.Tensor:
            found.append(stand_in.weight.name)
            return wholes[id(stand_in)]

        args, kwargs = tree_map_only(HostWeight, on_device, (args, kwargs))
        result = function(*args, **kwargs)
        if any(whole._version != versions[key] for key, whole in wholes.items()):
            raise lost_write(found[0])
        return result

    # ---- products ------------------------------------------------------------------------------

    def _project(
        self, values: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``F.linear(values, weight, bias)``, by pieces of the rows of *weight*."""
        result: torch.Tensor | None = None
        for group in weight.groups:
            first, end = _rows_of(group)
            part = F.linear(values, self._piece(group), None if bias is None else bias[first:end])
            if len(weight.groups) == 1:
                result = part
            else:
                if result is None:
                    result = part.new_empty(*part.shape[:-1], weight.size[0])
                result[..., first:end] = part
            del part
            self.hand_over()
        assert result is not None
        return result

    def _whole(self, weight: Weight) -> torch.Tensor:
        whole = torch.empty(weight.size, dtype=weight.dtype, device=self.device)
        for group in weight.groups:
            first, end = _rows_of(group)
            whole[first:end] = self._piece(group)
            self.hand_over()
        return whole

    def _piece(self, group: Weight) -> torch.Tensor:
        """Return some rows of a weight as this pass reads them."""
        sign = self.sign
        with self.lock, torch.no_grad():
            data = self.on_device(group)
            trained = self.trained.of(group.ref())
            if trained is None or not sign:
                return data
            first = _rows_of(group)[0] * (trained.num_elements // group.master.size[0])
            return self.trained.perturbed(trained, data, sign, first)

    # ---- look-ups ------------------------------------------------------------------------------

    def _embed(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return ``F.embedding(ids, weight)``."""
        sign = self.sign
        with self.lock, torch.no_grad():
            parameter = weight.ref()
            trained = self.trained.of(parameter)
            distinct, places = torch.unique(ids.to(self.device), return_inverse=True)
            rows = self._rows(distinct, weight, trained)
            if trained is not None:
                if sign:
                    rows = self.trained.perturbed_rows(trained, distinct, rows, sign)
                self._let_visit(weight, trained)
            return F.embedding(places, rows)

    def _let_visit(self, weight: Weight, trained: TrainedWeight) -> None:
        """Have all rows updated, now or as the head reads them."""
        behind = self.trained.num_steps - min(p.num_applied for p in trained.parts)
        if not behind or (behind == 1 and id(weight.ref()) in self._read_later):
            return
        for group in weight.groups:
            self.arrive(group.block)

    def _rows(
        self, distinct: torch.Tensor, weight: Weight, trained: TrainedWeight | None
    ) -> torch.Tensor:
        """Return the rows *distinct* of *weight*, updated and not perturbed, on the device."""
        kept = self._kept.get(id(weight))
        if kept is not None and torch.equal(kept[0], distinct):
            return kept[1]
        numbers = distinct.cpu()  # the host waits for the ids
        bounds = [_rows_of(group) for group in weight.groups]
        splits = torch.searchsorted(numbers, torch.tensor([end for _, end in bounds])).tolist()
        for group, start, end in zip(weight.groups, [0, *splits], splits, strict=False):
            if start != end:
                self.wait_for_copies(group.block)
        parameter = weight.ref()
        assert parameter is not None
        rows = self._upload_rows(parameter.detach(), numbers)
        if trained is not None:
            parts = trained.parts
            for part, start, end in zip(parts, [0, *splits], splits, strict=False):
                if start != end and self.trained.is_behind(part):
                    state = self._state(part, numbers[start:end], rows.shape[1])
                    self.trained.catch_up_rows(part, distinct[start:end], rows[start:end], state)
        self._kept[id(weight)] = distinct, rows
        return rows

    def _state(self, part: TrainedPart, numbers: torch.Tensor, width: int) -> torch.Tensor | None:
        if part.state is None:
            return None
        return self._upload_rows(part.state.view(-1, width), numbers - part.first // width)

    def _upload_rows(self, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows *numbers* of *table*, which is on the host, on the device."""
        rows = self._staging.upload_rows(
            table, numbers, self.device, self._times, "rows of an embedding"
        )
        self._gathered_rows += numbers.numel()
        self._gathered_bytes += rows.nbytes
        return rows


def _rows_of(group: Weight) -> tuple[int, int]:
    assert group.experts is not None
    return group.experts


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]
