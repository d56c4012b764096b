"""A matrix gradient that is summed in float32 and handed over in the dtype of its parameter.

[Note: Where the wide sum lives] Summing over chunks in bfloat16 or float16 would round once per
chunk, so half-precision gradients are summed in float32. A float32 buffer and the half-precision
result beside it would be three times the bytes of the gradient. Instead the result is allocated
first and its bytes hold the float32 sums of the first half of the rows; a scratch of equal size
holds the others. At the end the sums are narrowed front to back: the n-th result is written to
bytes 2n, never past byte 4n from which the n-th sum was just read. So the peak is twice the
gradient (what a float32 gradient takes), and what is handed over owns no byte too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_pyao.errors import ReleasedTensorError
from hf_pyao.plan.step.loops import slices_of

_BLOCK_ELEMENTS = 2**22
"""Elements of a matrix that are narrowed or widened at a time (16 MiB of float32)."""


class GradientBuffer:
    """Sums of a ``(num_rows, num_cols)`` gradient; see [Note: Where the wide sum lives].

    Takes memory with the first sum, or by :meth:`take_memory`.

    Args:
        num_rows: rows of the gradient.
        num_cols: columns of the gradient.
        dtype: floating dtype of the gradient that :meth:`finish` returns.
        device: where it lives.
        num_valid_rows: rows that are summed; those after it (vocabulary padding) become zeros.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        dtype: torch.dtype,
        device: torch.device,
        num_valid_rows: int | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = (num_rows, num_cols)
        self._device = device
        self.wide_dtype = torch.promote_types(dtype, torch.float32)
        self._num_valid = num_rows if num_valid_rows is None else num_valid_rows
        self._result: Tensor | None = None
        self._is_used_up = False
        self._written = False
        self._pieces: list[tuple[int, Tensor]] = []
        """Cover the valid rows in order: (first row, float32 sums of the rows from there)."""

    @classmethod
    def of(cls, tensor: Tensor) -> GradientBuffer:
        """Return one for the gradient of *tensor*, of any shape."""
        rows = tensor.shape[0] if tensor.dim() == 2 else 1
        return cls(rows, tensor.numel() // max(rows, 1), tensor.dtype, tensor.device)

    def take_memory(self) -> None:
        """Take the memory now: what is allocated among a loop's own tensors fragments it."""
        self._sums()

    def _sums(self) -> list[tuple[int, Tensor]]:
        """Return the pieces, in memory that is taken now if it was not."""
        if self._result is not None:
            return self._pieces
        (num_rows, num_cols), valid = self.shape, self._num_valid
        result = torch.empty(num_rows, num_cols, dtype=self.dtype, device=self._device)
        self._result = result
        if self.wide_dtype == self.dtype:
            self._pieces = [(0, result[:valid])]
            return self._pieces
        shared = min(num_rows * self.dtype.itemsize // self.wide_dtype.itemsize, valid)
        room = result.view(-1)[: shared * num_cols * self._ratio]
        low = room.view(self.wide_dtype).view(shared, num_cols)
        high = torch.empty(valid - shared, num_cols, dtype=self.wide_dtype, device=self._device)
        self._pieces = [(0, low), (shared, high)]
        return self._pieces

    @property
    def _ratio(self) -> int:
        return self.wide_dtype.itemsize // self.dtype.itemsize

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``: (n, num_valid_rows) and (n, num_cols), both of one dtype."""
        if left.dtype != self.wide_dtype and not has_wide_products(left):
            left, right = left.to(self.wide_dtype), right.to(self.wide_dtype)
        beta = 1 if self._written else 0  # 0 ignores what is in the fresh memory, NaN included
        for start, sums in self._sums():
            columns = left[:, start : start + sums.shape[0]].t()
            if left.dtype == self.wide_dtype:
                torch.addmm(sums, columns, right, beta=beta, out=sums)
            else:
                torch.addmm(sums, columns, right, out_dtype=self.wide_dtype, beta=beta, out=sums)
        self._written = True

    def write_rows(self, start: int, values: Tensor) -> None:
        """Overwrite the rows from *start* on. Every valid row must be written once."""
        stop = start + values.shape[0]
        for first, sums in self._sums():
            begin, end = max(start, first), min(stop, first + sums.shape[0])
            if begin < end:
                sums[begin - first : end - first].copy_(values[begin - start : end - start])
        self._written = True

    def add(self, values: Tensor) -> None:
        """Add a whole gradient, (num_valid_rows, num_cols), in any shape."""
        rows = values.reshape(self._num_valid, self.shape[1])
        if not self._written:
            self.write_rows(0, rows)
            return
        for first, sums in self._sums():
            sums += rows[first : first + sums.shape[0]]

    def finish(self, scale: Tensor, *, keep: bool) -> Tensor:
        """Return ``scale * sums`` in ``dtype``, rounded once.

        Args:
            scale: 0-dim, or one factor for each row, (num_rows, 1); on any device.
            keep: leave the sums as they are, at the price of a copy; else they are used up.
        """
        if self._is_used_up:
            raise ReleasedTensorError("the gradient was already handed over", key="backward-twice")
        self._sums()
        assert self._result is not None
        result = torch.empty_like(self._result) if keep else self._result
        if not keep:
            self._is_used_up, self._result = True, None
        if not self._written:
            return result.zero_()
        flat, scale = result.view(-1), scale.to(result.device)
        for start, sums in self._pieces:
            factors = scale if scale.dim() == 0 else scale[start : start + sums.shape[0]]
            _scale_into(flat, start * result.shape[1], sums, factors)
        result[self._num_valid :].zero_()
        if not keep:
            self._pieces = []
        return result

    def total(self, shape: Sequence[int]) -> Tensor | None:
        """Return the sums in ``dtype`` and *shape*, which uses them up; None if there are none."""
        if not self._written:
            return None
        if self.wide_dtype == self.dtype:
            assert self._result is not None
            return self._result.view(shape)
        one = torch.ones((), dtype=self.wide_dtype, device=self._device)
        return self.finish(one, keep=False).view(shape)


def _scale_into(flat: Tensor, offset: int, sums: Tensor, scale: Tensor) -> None:
    """Write ``sums * scale`` to *flat* from *offset* on, a block of rows at a time, front first."""
    rows = sums.reshape(-1, 1) if scale.dim() == 0 else sums
    num_cols = rows.shape[1]
    if sums.dtype == flat.dtype:
        torch.mul(rows, scale, out=flat[offset : offset + rows.numel()].view_as(rows))
        return
    block_rows = max(1, _BLOCK_ELEMENTS // max(num_cols, 1))
    for start, stop in slices_of(rows.shape[0], block_rows):
        factor = scale if scale.dim() == 0 else scale[start:stop]
        room = flat[offset + start * num_cols : offset + stop * num_cols]
        room.view(-1, num_cols).copy_(rows[start:stop] * factor)


def has_wide_products(tensor: Tensor) -> bool:
    """Whether a half-precision product of tensors like *tensor* can have a float32 result.

    cuBLAS does that at full speed (``out_dtype``). Elsewhere the operands are widened, which is
    also faster than half precision on CPUs without units for it. Fake tensors, which estimate
    memory, take the path that every version of torch can trace.
    """
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.is_cuda and torch.version.hip is None and tensor.dtype.itemsize == 2


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in float32 at least.

    Args:
        left: (n, k), in float32 or float64, or in half precision if :func:`has_wide_products`.
        right: (k, m), of the dtype of *left*, or narrower: then widened block by block.
    """
    if has_wide_products(left) and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == right.dtype:
        return torch.mm(left, right)
    total = left.new_zeros(left.shape[0], right.shape[1])
    block_rows = max(1, _BLOCK_ELEMENTS // right.shape[1])
    for start, stop in slices_of(right.shape[0], block_rows):
        total.addmm_(left[:, start:stop], right[start:stop].to(left.dtype))
    return total
