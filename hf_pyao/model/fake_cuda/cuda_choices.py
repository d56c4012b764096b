"""What transformers and the head loss would choose on CUDA, where they are run on a CPU.

Here and not in ``hf_pyao.tools.simulation``, because that imports torch alone.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import masking_utils

from hf_pyao.model import gradient_buffer
from hf_pyao.model.fake_cuda.cuda_operations import Replacement, can_trace_wide_products
from hf_pyao.model.losses import cross_entropy

_PACKED = "find_packed_sequence_indices"


def choices_of_cuda(*, has_padding: bool = False) -> tuple[Replacement, ...]:
    """Return what :func:`~hf_pyao.model.fake_cuda.cuda_operations.operations_of_cuda` has to
    replace.

    - A batch without padding needs no mask. To see that it has none transformers looks at values,
      which fake tensors do not have.
    - Products of halves in the head loss have their sums in float32, if torch can trace that. Call
      this under the fake mode, then.

    Args:
        has_padding: whether the batch has padding, so that attention needs a mask.
    """
    answers = answers_without_values(has_padding=has_padding)
    if not can_trace_wide_products():
        return answers
    products = [
        Replacement(module, "has_wide_products", _is_half)
        for module in (cross_entropy, gradient_buffer)
    ]
    return (*answers, *products)


def _rand(own: Any, *size: Any, **options: Any) -> Any:
    """Draw a single number as 1.0, which is below no rate; all else as ever."""
    return 1.0 if size == ([],) else own(*size, **options)


def _holds(*_: Any, **__: Any) -> None:
    """Take a condition on values for true."""


def _needs_no_mask(padding_mask: object, query_length: int, kv_length: int, *others: Any) -> bool:
    """Say whether causal attention without padding needs no mask: unless it is within a window."""
    window = others[-1]  # the last argument in all releases
    return window is None or kv_length < window


def _needed_no_mask(*_: Any, sliding_window: int | None = None, **__: Any) -> bool:
    """Say the same as older releases ask it; none of those that do has a window."""
    return sliding_window is None


def _needs_mask(*_: Any, **__: Any) -> bool:
    """Say that a mask is needed: a batch has padding."""
    return False


def answers_without_values(
    *, has_padding: bool = False, may_lack_mask: bool = False
) -> tuple[Replacement, ...]:
    """Return what has to be replaced where transformers asks for values, which fakes have not.

    No layer is dropped (OPT's ``layerdrop``), and what a model checks of its inputs' values
    (as many image tokens as images have features) is taken to hold.

    Args:
        has_padding: whether the batch has padding, so that attention needs a mask.
        may_lack_mask: whether the batch may have no ``attention_mask``, unlike those of data
            collators. transformers 4 then makes a mask in training without a cache.
    """
    needed, needs = (_needs_mask, _needs_mask) if has_padding else (_needed_no_mask, _needs_no_mask)
    older: Any = None
    with contextlib.suppress(ImportError):  # OPT's, before transformers 5
        module = importlib.import_module("transformers.modeling_attn_mask_utils")
        older = module.AttentionMaskConverter
    no_packed_sequences = Replacement(masking_utils, _PACKED, lambda *_, **__: None)
    return (
        Replacement(older, "_ignore_causal_mask_sdpa", needed),
        *(() if may_lack_mask and _masks_unasked() else (no_packed_sequences,)),
        Replacement(masking_utils, "_ignore_causal_mask_sdpa", needs),
        Replacement(torch, "rand", partial(_rand, torch.rand)),
        Replacement(torch, "_check_tensor_all", _holds),
        Replacement(torch, "_check_tensor_all_with", _holds),
    )


def _masks_unasked() -> bool:
    """Say whether transformers looks at no values to find packed samples: it makes a mask then."""
    with unset_fake_temporarily():
        return getattr(masking_utils, _PACKED)(torch.arange(2)[None]) is not None


def grouped_products() -> tuple[Replacement, ...]:
    """Return what has to be replaced for grouped products of any dtype on fake tensors.

    torch's kernels for CPUs multiply groups of every floating dtype (experts of mixtures, in
    transformers 5); its function for fake tensors asks for bfloat16
    (``_meta_grouped_mm_common`` in ``torch/_meta_registrations.py``).
    """
    metas: Any = torch._meta_registrations
    own = getattr(metas, "_meta_grouped_mm_common", None)
    shape_of = getattr(metas, "_create_grouped_mm_output_tensor", None)
    if own is None or shape_of is None:
        return ()

    def grouped_mm(
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: Any,
        scale_b: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        is_plain = scale_a is None and scale_b is None and mat_a.dtype == mat_b.dtype
        if not is_plain or mat_a.dtype == torch.bfloat16 or not mat_a.dtype.is_floating_point:
            return own(mat_a, mat_b, scale_a, scale_b, *args, **more)
        offs = args[0] if args else more.get("offs")
        return shape_of(mat_a, mat_b, offs, more.get("out_dtype") or mat_a.dtype)

    return (Replacement(metas, "_meta_grouped_mm_common", grouped_mm),)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize == 2
