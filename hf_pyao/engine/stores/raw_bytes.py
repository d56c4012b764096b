"""A tensor's memory for system calls, without numpy."""

from __future__ import annotations

import ctypes

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 *tensor* on the host, writable.

    The caller keeps the tensor for as long as it uses the view.
    """
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr() or 1)
    return memoryview(memory).cast("B")
