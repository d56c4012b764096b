"""What DeepSpeed's ZeRO does with gradients in backward, on a copy of a model.

ZeRO-2 and 3 copy each gradient into a bucket as soon as it is complete. A full bucket is reduced
over all ranks: this one keeps its part, and the gradients are gone. ZeRO-1 does so when backward
has ended. Nothing is sent here; what would be allocated is, on fake tensors.

Source: deepspeedai/DeepSpeed 0.19, ``deepspeed/runtime/zero/stage_1_and_2.py`` (``setup_buckets``,
``reduce_independent_p_g_buckets_and_remove_grads``, ``average_tensor``, ``reduce_ipg_grads``,
``copy_grads_in_partition``), ``stage3.py`` (the same and ``partition_grads``) and
``deepspeed/runtime/comm/coalesced_collectives.py`` (``reduce_scatter_coalesced``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import Collective


@dataclass(frozen=True)
class BucketSettings:
    """How gradients are reduced."""

    num_elements: int
    """``reduce_bucket_size``."""
    sent_dtype: torch.dtype
    """What gradients are reduced in."""
    is_contiguous: bool
    """``contiguous_gradients``: gradients are copied into a buffer."""
    scatters: bool
    """``reduce_scatter``."""
    overlaps: bool
    """``overlap_comm``: ZeRO-1 and 2 have a second buffer then."""
    is_offloaded: bool
    """Whether this rank's part goes to the host."""
    num_ranks: int
    sums_all: bool = True
    """ZeRO-1 and 2: every rank gets the whole sum; else each the parts that it keeps."""
    num_beside: int = 0
    """How many reductions may run beside compute; 0: compute waits for each."""


class Gradients(Protocol):
    """What becomes of gradients."""

    def install(self) -> None:
        """Hear of each gradient of the copy."""
        ...

    def tell(self, exchanged: Exchanged) -> None:
        """Tell of each reduction from now on."""
        ...

    def end_micro_batch(self) -> None:
        """Do what is done after backward."""
        ...


class _Bucket:
    """Gradients that are complete, and wait for the bucket to be full."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: BucketSettings) -> None:
        self.parameters = [each for each in parameters if each.requires_grad]
        self.settings = settings
        self.waiting: list[nn.Parameter] = []
        self.num_waiting = 0
        self._exchanged: Exchanged | None = None

    def tell(self, exchanged: Exchanged) -> None:
        """Tell of each reduction from now on."""
        self._exchanged = exchanged

    def reduces(self, num_elements: int, *, sums_all: bool) -> None:
        """Tell of a reduction.

        Args:
            num_elements: that are reduced.
            sums_all: every rank gets the whole sum.
        """
        settings = self.settings
        if self._exchanged is not None:
            nbytes = num_elements * settings.sent_dtype.itemsize
            received = (1 + sums_all) * (nbytes - nbytes // settings.num_ranks)
            collective = Collective(received, is_gather=False)
            self._exchanged(collective, num_beside=settings.num_beside)

    def copy_into(self, buffer: Tensor, parameter: nn.Parameter) -> None:
        """Put a gradient behind those in *buffer*."""
        gradient = parameter.grad
        assert gradient is not None
        place = buffer[self.num_waiting : self.num_waiting + gradient.numel()].view_as(gradient)
        place.copy_(gradient)
        gradient.data = place

    def add(self, parameter: nn.Parameter) -> None:
        """Note that a gradient waits."""
        assert parameter.grad is not None
        self.waiting.append(parameter)
        self.num_waiting += parameter.grad.numel()

    def empty(self) -> None:
        """Forget what waited."""
        self.waiting = []
        self.num_waiting = 0


class PartitionedGradients(_Bucket):
    """ZeRO-3's gradients; its bucket is there throughout.

    Args:
        parameters: of the copy.
        settings: of the engine.
        buffer: the bucket; None if gradients are not contiguous.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: BucketSettings,
        buffer: Tensor | None,
    ) -> None:
        super().__init__(parameters, settings)
        self._buffer = buffer

    def install(self) -> None:
        """Hear of each gradient of the copy."""
        for each in self.parameters:
            each.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        size, num_elements = self.settings.num_elements, parameter.grad.numel()
        if self.num_waiting and self.num_waiting + num_elements > size:
            self.end_micro_batch()
        if self._buffer is not None and self.num_waiting + num_elements <= size:
            self.copy_into(self._buffer, parameter)
        self.add(parameter)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Reduce what waits in the bucket."""
        if not self.waiting:
            return
        settings = self.settings
        gradients = [each.grad for each in self.waiting if each.grad is not None]
        fits = self._buffer is not None and self.num_waiting <= settings.num_elements
        if fits and not settings.scatters:
            assert self._buffer is not None
            reduced = self._buffer[: self.num_waiting].to(settings.sent_dtype)
            self.reduces(self.num_waiting, sums_all=True)
        else:
            sent = [each.to(settings.sent_dtype) for each in gradients]
            reduced = _scattered(sent, settings)
            self.reduces(reduced.numel(), sums_all=False)
            del sent
        for gradient in gradients:
            part = reduced[: ceil(gradient.numel() / settings.num_ranks)].to(gradient.dtype)
            if settings.is_offloaded:
                if part.device.type != "cpu":
                    part = torch.empty_like(part)  # the sum on the host, here for a moment
                part.to(torch.float64)  # for its norm
        del gradients
        for parameter in self.waiting:
            parameter.grad = None
        self.empty()


def _scattered(gradients: Sequence[Tensor], settings: BucketSettings) -> Tensor:
    """Return the buffer that is reduced and scattered."""
    num_ranks = settings.num_ranks
    if len(gradients) == 1 and gradients[0].numel() % num_ranks == 0:
        return gradients[0].view(-1)
    padded = [num_ranks * ceil(each.numel() / num_ranks) for each in gradients]
    return gradients[0].new_empty(sum(padded))


class BucketedGradients(_Bucket):
    """The gradients of ZeRO-1 and 2; the bucket is there from the first gradient on.

    Ranks keep different parts. One plan is for all of them, so the one is followed that keeps the
    first gradients that are reduced: it has them for longest.

    Args:
        parameters: of the copy, in the order in which ZeRO-1 reduces them.
        settings: of the engine.
        owners: by the id of a parameter of the copy: the ranks that keep parts of its gradient.
        at_end: reduce when backward has ended, as ZeRO-1 does.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: BucketSettings,
        owners: Mapping[int, frozenset[int]],
        *,
        at_end: bool,
    ) -> None:
        super().__init__(parameters, settings)
        self._owners = owners
        self._rank = -1
        self._at_end = at_end
        self._buffers: list[Tensor] = []
        self._newest = 0
        self._kept: Tensor | None = None
        """A rank's gradients, where they stay on the device."""
        self._num_kept = 0

    def install(self) -> None:
        """Hear of each gradient of the copy."""
        for each in self.parameters:
            each.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _complete(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self.settings.is_contiguous and not self._buffers:
            self._buffers = [
                gradient.new_empty(self.settings.num_elements)
                for _ in range(1 + self.settings.overlaps)
            ]
        if not self._at_end:
            self._take(parameter)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if self._rank < 0:
            first = self._owners[id(parameter)]
            self._rank = min(first) if self._at_end else max(first)
        if self.num_waiting + gradient.numel() > self.settings.num_elements:
            self._reduce()
            if len(self._buffers) > 1:
                self._newest = 1 - self._newest
        if self._buffers and gradient.numel() <= self.settings.num_elements:
            self.copy_into(self._buffers[self._newest], parameter)
        self.add(parameter)

    def _reduce(self) -> None:
        gradients = [each.grad for each in self.waiting if each.grad is not None]
        if not gradients:
            return
        ranks = {rank for each in self.waiting for rank in self._owners[id(each)]}
        # The parts of several ranks are made one tensor again; so are those without a buffer.
        is_copied = not self._buffers or (self.settings.scatters and len(ranks) > 1)
        sent = gradients[0].new_empty(self.num_waiting) if is_copied else gradients[0]
        sent = sent.to(self.settings.sent_dtype)
        self.reduces(self.num_waiting, sums_all=self.settings.sums_all)
        del sent
        for parameter, gradient in zip(self.waiting, gradients, strict=True):
            if self._rank in self._owners[id(parameter)] and self._buffers:
                self._keep(gradient)
            is_kept = self._at_end or self._rank in self._owners[id(parameter)]
            if self.settings.is_offloaded or not is_kept:
                parameter.grad = None
        self.empty()

    def _keep(self, gradient: Tensor) -> None:
        """Take the rank's part of a gradient that was reduced."""
        if self.settings.is_offloaded:
            gradient.to(torch.float64)  # for the norm
            return
        if self._kept is None:
            mine = [each for each in self.parameters if self._rank in self._owners[id(each)]]
            self._kept = gradient.new_empty(sum(each.numel() for each in mine))
        place = self._kept[self._num_kept : self._num_kept + gradient.numel()].view_as(gradient)
        self._num_kept += gradient.numel()
        place.copy_(gradient)
        gradient.data = place

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Reduce what is left, and let go of the bucket."""
        if self._at_end:
            for each in self.parameters:
                self._take(each)
        self._reduce()
        self._buffers = []
        self._kept, self._num_kept = None, 0
