"""Chooses between the fused kernels and plain torch."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

_TRITON_DEVICE_TYPES = frozenset({"cuda", "xpu"})
"""Device types that Triton has a backend for (ROCm's is ``cuda``)."""


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """Return :mod:`hf_pyao.engine.codecs.kernels` if it can run on *tensor*, else None.

    None stands for plain torch, which gives the same bits: on a CPU, on fake tensors, and where
    Triton is missing or cannot build.
    """
    if tensor.device.type not in _TRITON_DEVICE_TYPES or type(tensor) is not torch.Tensor:
        return None
    return _working_kernels(tensor.device.type)


@functools.cache
def _working_kernels(device_type: str) -> ModuleType | None:
    """Import the kernels and build one, once per process and device type."""
    try:
        kernels = importlib.import_module("hf_pyao.engine.codecs.kernels")
        kernels.pack_bits(torch.zeros(1, dtype=torch.uint8, device=device_type))
    except Exception as error:  # whatever a missing compiler or a strange driver may raise
        warn(
            logger,
            "codec-without-triton",
            "Codecs run as plain torch on %s, with the same results but in several passes over "
            "the data: Triton could not build their kernels (%s: %s).",
            device_type,
            type(error).__name__,
            error,
        )
        return None
    return kernels
