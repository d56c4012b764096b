"""What transformers and the head loss would choose on CUDA, where they are run on a CPU.

Here and not in ``hf_pyao.simulation``, because that imports torch alone.
"""

from __future__ import annotations

import torch
from transformers import masking_utils

from hf_pyao.losses import cross_entropy, gradient_buffer
from hf_pyao.simulation.cuda_operations import Replacement, can_trace_wide_products


def choices_of_cuda() -> tuple[Replacement, ...]:
    """Return what :func:`~hf_pyao.simulation.cuda_operations.operations_of_cuda` has to replace.

    - A batch without padding needs no mask. To see that it has none transformers looks at values,
      which fake tensors do not have.
    - Products of halves in the head loss have their sums in float32, if torch can trace that. Call
      this under the fake mode, then.
    """
    masks = (
        Replacement(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
        Replacement(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: True),
    )
    if not can_trace_wide_products():
        return masks
    products = [
        Replacement(module, "has_wide_products", _is_half)
        for module in (cross_entropy, gradient_buffer)
    ]
    return (*masks, *products)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize == 2
