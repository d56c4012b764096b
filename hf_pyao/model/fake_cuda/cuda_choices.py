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
    modules = (cross_entropy, gradient_buffer) if can_trace_wide_products() else ()
    products = [Replacement(module, "has_wide_products", _is_half) for module in modules]
    return (*answers_without_values(has_padding=has_padding), *products)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize == 2


def _rand(own: Any, *size: Any, **options: Any) -> Any:
    """Draw a single number as 1.0, which is below no rate; all else as ever."""
    return 1.0 if size == ([],) else own(*size, **options)


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

    def needs_none(padding_mask: object, query_length: int, kv_length: int, *others: Any) -> bool:
        """Say whether causal attention needs no mask; the last argument is the window."""
        return not has_padding and (others[-1] is None or kv_length < others[-1])

    def needed_none(*_: Any, sliding_window: int | None = None, **__: Any) -> bool:
        """Say the same as older releases ask it; none of those that do has a window."""
        return not has_padding and sliding_window is None

    older: Any = None
    with contextlib.suppress(ImportError):  # OPT's, before transformers 5
        module = importlib.import_module("transformers.modeling_attn_mask_utils")
        older = module.AttentionMaskConverter
    no_packed_sequences = Replacement(masking_utils, _PACKED, lambda *_, **__: None)
    return (
        Replacement(older, "_ignore_causal_mask_sdpa", needed_none),
        *(() if may_lack_mask and _masks_unasked() else (no_packed_sequences,)),
        Replacement(masking_utils, "_ignore_causal_mask_sdpa", needs_none),
        Replacement(torch, "rand", partial(_rand, torch.rand)),
        Replacement(torch, "_check_tensor_all", lambda *_, **__: None),
        Replacement(torch, "_check_tensor_all_with", lambda *_, **__: None),
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
        mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, *args: Any, **more: Any
    ) -> Any:
        is_plain = scale_a is None and scale_b is None and mat_a.dtype == mat_b.dtype
        if not is_plain or mat_a.dtype == torch.bfloat16 or not mat_a.dtype.is_floating_point:
            return own(mat_a, mat_b, scale_a, scale_b, *args, **more)
        offs = args[0] if args else more.get("offs")
        return shape_of(mat_a, mat_b, offs, more.get("out_dtype") or mat_a.dtype)

    return (Replacement(metas, "_meta_grouped_mm_common", grouped_mm),)
