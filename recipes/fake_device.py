"""What makes fake tensors of a CPU stand for a GPU's: its choice of operations, and its copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.losses import cross_entropy, gradient_buffer
from hf_pyao.transfer.transport import BlockingTransport


@dataclass(eq=False)
class _LateTicket:
    nbytes: int
    queue: str
    order: int
    compute: None = None


class LateTransport(BlockingTransport):
    """Copies that are done only when something waits for them: the slowest link there could be.

    What the engine allows to be in flight is then always in flight, so that the peak is an upper
    bound for every link.
    """

    name = "late"

    def __init__(self) -> None:
        super().__init__()
        self._orders = itertools.count()
        self._done = {"offload": -1, "reload": -1}

    def offload(self, src: Tensor, dst: Tensor, **_: Any) -> Any:
        """Copy to the host, later."""
        self._copy("offload", src, dst, None)
        return _LateTicket(src.nbytes, "offload", next(self._orders))

    def reload(self, src: Tensor, dst: Tensor, **_: Any) -> Any:
        """Copy to the device, later."""
        self._copy("reload", src, dst, None)
        return _LateTicket(src.nbytes, "reload", next(self._orders))

    def wait(self, ticket: Any) -> None:
        """Finish the copy, and those before it in its queue."""
        self._done[ticket.queue] = max(self._done[ticket.queue], ticket.order)

    def is_done(self, ticket: Any) -> bool:
        """Say whether something has waited for the copy."""
        return bool(ticket.order <= self._done[ticket.queue])


# ---- what CUDA would do --------------------------------------------------------------------------


@contextmanager
def operations_of_cuda() -> Iterator[None]:
    """Let transformers pick, on fake tensors of a CPU, the operations that it picks on CUDA.

    - Attention without a mask is the flash kernel, which takes grouped heads as they are, and saves
      its inputs, its result and a float32 statistic per row; what it drops it draws again.
    - Dropout saves one byte for each element.
    - Products of halves in the head loss have their sums in float32, if torch can trace that.
    - A batch without padding needs no mask. To see that it has none transformers looks at values,
      which fake tensors do not have.
    """
    from transformers import masking_utils

    with ExitStack() as stack:
        for target, name, replacement in (
            (F, "scaled_dot_product_attention", _flash_attention),
            (F, "dropout", _dropout),
            (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
            (masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: True),
        ):
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, replacement))
        if _can_trace_wide_products():
            for module in (cross_entropy, gradient_buffer):
                stack.enter_context(mock.patch.object(module, "has_wide_products", _is_half))
        yield


def _can_trace_wide_products() -> bool:
    half, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)
    try:
        torch.addmm(wide, half, half, out_dtype=torch.float32, out=wide)
        torch.mm(half, half, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize == 2


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        raise RuntimeError("attention got a mask, for which CUDA would take another kernel")
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
