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

from collections.abc import Collection
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Weight
from hf_pyao.engine.weights.device_weight import lost_write
from hf_pyao.engine.weights.host_weight import HostWeight
from hf_pyao.engine.weights.staging import Staging
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeight, TrainedWeights

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Visits(Protocol):
    """What brings the pieces, as far as reads by rows need it."""

    link: LinkContext
    device: torch.device
    lock: Any
    trained: TrainedWeights
    read_later: Collection[int]

    @property
    def sign(self) -> int | None:
        """That of the pass that the calling thread is in."""
        ...

    def hand_over(self) -> None:
        """Let the other pass run up to its next piece."""
        ...

    def on_device(self, weight: Weight) -> torch.Tensor:
        """Return a group of rows, updated, as a view of its slot."""
        ...

    def arrive(self, block: int) -> None:
        """Have *block* on the device, updated."""
        ...

    def wait_for_copies(self, block: int | None = None) -> None:
        """Let the host wait until the copy back of *block* has ended."""
        ...


class ReadsByRows:
    """Computes with the weights that are read by rows; see [Note: By rows].

    Args:
        visits: brings the pieces.
    """

    def __init__(self, visits: Visits) -> None:
        self._visits = visits
        self._staging = Staging(visits.link.tiers.stores[0], visits.link.transport)
        self._times = LinkTimes()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By weight, numbers and content of the rows that were looked up last in this step."""
        self._gathered_rows = 0
        self._gathered_bytes = 0

    def begin(self) -> None:
        """Forget what was looked up: weights may have changed."""
        self._kept.clear()

    def stop(self) -> None:
        """Let go of what is on the device, and of the memory for gathering."""
        self._kept.clear()
        self._staging.release()

    def figures(self) -> dict[str, Any]:
        """Return what was looked up, as plain values."""
        return {"gathered_rows": self._gathered_rows, "gathered_bytes": self._gathered_bytes}

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
            self._visits.hand_over()
        assert result is not None
        return result

    def _whole(self, weight: Weight) -> torch.Tensor:
        whole = torch.empty(weight.size, dtype=weight.dtype, device=self._visits.device)
        for group in weight.groups:
            first, end = _rows_of(group)
            whole[first:end] = self._piece(group)
            self._visits.hand_over()
        return whole

    def _piece(self, group: Weight) -> torch.Tensor:
        """Return some rows of a weight as this pass reads them."""
        visits, sign = self._visits, self._visits.sign
        with visits.lock, torch.no_grad():
            data = visits.on_device(group)
            trained = visits.trained.of(group.ref())
            if trained is None or not sign:
                return data
            first = _rows_of(group)[0] * (trained.num_elements // group.master.size[0])
            return visits.trained.perturbed(trained, data, sign, first)

    # ---- look-ups ------------------------------------------------------------------------------

    def _embed(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return ``F.embedding(ids, weight)``."""
        visits, sign = self._visits, self._visits.sign
        with visits.lock, torch.no_grad():
            parameter = weight.ref()
            trained = visits.trained.of(parameter)
            distinct, places = torch.unique(ids.to(visits.device), return_inverse=True)
            rows = self._rows(distinct, weight, trained)
            if trained is not None:
                if sign:
                    rows = visits.trained.perturbed_rows(trained, distinct, rows, sign)
                self._let_visit(weight, trained)
            return F.embedding(places, rows)

    def _let_visit(self, weight: Weight, trained: TrainedWeight) -> None:
        """Have all rows updated, now or as the head reads them."""
        behind = self._visits.trained.num_steps - min(p.num_applied for p in trained.parts)
        if not behind or (behind == 1 and id(weight.ref()) in self._visits.read_later):
            return
        for group in weight.groups:
            self._visits.arrive(group.block)

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
                self._visits.wait_for_copies(group.block)
        parameter = weight.ref()
        assert parameter is not None
        rows = self._upload(parameter.detach(), numbers)
        if trained is not None:
            parts = trained.parts
            for part, start, end in zip(parts, [0, *splits], splits, strict=False):
                if start != end and self._visits.trained.is_behind(part):
                    state = self._state(part, numbers[start:end], rows.shape[1])
                    self._visits.trained.catch_up_rows(
                        part, distinct[start:end], rows[start:end], state
                    )
        self._kept[id(weight)] = distinct, rows
        return rows

    def _state(self, part: TrainedPart, numbers: torch.Tensor, width: int) -> torch.Tensor | None:
        if part.state is None:
            return None
        return self._upload(part.state.view(-1, width), numbers - part.first // width)

    def _upload(self, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows *numbers* of *table*, which is on the host, on the device."""
        device, transport = self._visits.device, self._visits.link.transport
        size = (numbers.numel(), table.shape[1])
        rows = torch.empty(size, dtype=table.dtype, device=device)
        if not rows.nbytes:
            return rows
        piece = self._staging.lend(rows.nbytes)
        gathered = piece.memory[: rows.nbytes]
        try:
            torch.index_select(table, 0, numbers, out=gathered.view(table.dtype).view(size))
        except BaseException:
            self._staging.give_back(piece, None)
            raise
        try:
            ticket = transport.reload(
                gathered,
                bytes_view(rows.untyped_storage(), device, 0, rows.nbytes),
                label="rows of an embedding",
                times=self._times,
            )
            self._staging.give_back(piece, ticket)
            transport.wait(ticket)
        except BaseException:
            # An interrupt: the copy may be queued, and no one knows. The piece stays lent then.
            transport.retire_all()
            raise
        self._gathered_rows += numbers.numel()
        self._gathered_bytes += rows.nbytes
        return rows


def _rows_of(group: Weight) -> tuple[int, int]:
    assert group.experts is not None
    return group.experts


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]
