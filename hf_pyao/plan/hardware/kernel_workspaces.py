"""Device memory that kernels allocate for themselves and free before they return.

What autograd and the dispatcher see of an operation are its arguments and results. Some kernels
take more while they run, through torch's allocator: sums in float32, copies, what a sort needs. A
step's peak is at such an operation as often as not. :func:`call_of` notes the sizes of a call,
:func:`workspace_of` returns the bytes; formulas and their sources are in ``attention_workspaces``
and here. Products of bitsandbytes are one operator each, whatever runs inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hf_pyao.plan.hardware.attention_workspaces import ATTENTION, FLOAT_BYTES, AttentionShape, Parts
from hf_pyao.plan.hardware.kernel_settings import KernelSettings

EMBEDDING = "embedding_dense_backward"
FOUR_BIT = "gemm_4bit"
EIGHT_BIT = ("int8_scaled_mm", "int8_mixed_scaled_mm")

HALF_BYTES = 2

FEW_INDICES = 3072
"""Up to so many tokens an embedding's backward sorts nothing."""


class KernelCall(NamedTuple):
    """One call of a kernel that allocates memory inside."""

    kernel: str
    """The name of torch's operator."""
    sizes: tuple[int, ...]
    """An :class:`~hf_pyao.plan.hardware.attention_workspaces.AttentionShape`, an
    :class:`EmbeddingShape`, a :class:`ProductShape`, or the bytes that are reduced. Each grows in
    proportion to batch and length, or does not."""


class EmbeddingShape(NamedTuple):
    """Sizes of the backward of an embedding."""

    num_indices: int
    width: int
    """Elements of a row of the gradient."""
    itemsize: int
    index_bytes: int
    copied_bytes: int = 0
    """A copy of the gradient, if it is not contiguous."""
    scales_by_frequency: int = 0


class ProductShape(NamedTuple):
    """Sizes of a product with a quantised weight."""

    num_outputs: int
    """Elements of the result."""
    num_weights: int
    """Elements of the weight; 0 for 8 bits, where they are not dequantised."""
    itemsize: int
    """Bytes of an element that is dequantised. With 8 bits, of a float16 result that is cast to
    another dtype; 0 for none."""
    num_nested_scales: int = 0
    """Scales that are quantised themselves."""


def four_bit_product(shape: ProductShape) -> Parts:
    """Return what a product with a 4-bit weight allocates inside.

    The weight is dequantised as a whole where there are many rows; bitsandbytes has fused kernels
    for few, which this does not count on.

    Source: bitsandbytes 0.50, ``backends/default/ops.py``, ``_gemm_4bit_default_impl``.
    """
    parts = {"dequantized weight": shape.num_weights * shape.itemsize}
    if shape.num_nested_scales:  # dequantised, and with their offset
        parts["scales"] = 2 * FLOAT_BYTES * shape.num_nested_scales
    return parts


def eight_bit_product(shape: ProductShape) -> Parts:
    """Return what a product of 8-bit integers allocates inside.

    Source: bitsandbytes 0.50, ``backends/default/ops.py`` and ``backends/cuda/ops.py``,
    ``int8_scaled_mm`` and ``int8_mm_dequant``: sums in 32 bits, and a result in float16 before it
    is cast.
    """
    parts = {"int32 sums": FLOAT_BYTES * shape.num_outputs}
    if shape.itemsize:
        parts["float16 result"] = shape.itemsize * shape.num_outputs
    return parts


def embedding_backward(shape: EmbeddingShape) -> Parts:
    """Return what an embedding's backward allocates inside.

    Indices are sorted, and rows of the gradient that belong to one row of the weight are summed in
    float32 in a tensor as large as the gradient.

    Source: pytorch/pytorch, ``aten/src/ATen/native/cuda/Embedding.cu``,
    ``embedding_dense_backward_cuda``; ``EmbeddingBackwardKernel.cu``,
    ``embedding_backward_cuda_kernel`` (commit 01b9dc56).
    """
    copies = {"contiguous copies": shape.copied_bytes} if shape.copied_bytes else {}
    if shape.num_indices <= FEW_INDICES and not shape.scales_by_frequency:
        return copies
    # sorted and original indices, and four tensors of offsets; counts, if they are asked for
    num_indexes = 6 + shape.scales_by_frequency
    return {
        "grad_weight_per_segment": max(FLOAT_BYTES, shape.itemsize)
        * shape.num_indices
        * shape.width,
        "indices and offsets": num_indexes * shape.index_bytes * shape.num_indices,
        **copies,
    }


def parts_of(call: KernelCall, settings: KernelSettings) -> Parts:
    """Return what a call allocates inside, in bytes by the name that the source gives it."""
    if call.kernel == EMBEDDING:
        return embedding_backward(EmbeddingShape(*call.sizes))
    if call.kernel == FOUR_BIT:
        return four_bit_product(ProductShape(*call.sizes))
    if call.kernel in EIGHT_BIT:
        return eight_bit_product(ProductShape(*call.sizes))
    return ATTENTION[call.kernel](AttentionShape(*call.sizes), settings)


def workspace_of(call: KernelCall | None, settings: KernelSettings) -> int:
    """Return the bytes that a call allocates inside; 0 for None."""
    return 0 if call is None else sum(parts_of(call, settings).values())


_NAMES = frozenset({EMBEDDING, FOUR_BIT, *EIGHT_BIT, *ATTENTION})

# ---- calls -------------------------------------------------------------------------------------


def call_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelCall | None:
    """Return the call of a dispatched operator; None if its kernel allocates nothing unseen.

    Args:
        func: the overload that was called.
        args: its arguments, real tensors or fake ones.
        kwargs: its keyword arguments.
    """
    name = func._overloadpacket.__name__
    if name not in _NAMES:
        return None
    is_product = func.namespace == "bitsandbytes" and name in (FOUR_BIT, *EIGHT_BIT)
    is_known = func.namespace == "aten" and (name == EMBEDDING or name in ATTENTION)
    if not is_product and not is_known:
        return None
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if is_product:
        return KernelCall(name, tuple(_product_shape(name, given)))
    shape = _embedding_shape(given) if name == EMBEDDING else _attention_shape(name, given)
    return KernelCall(name, tuple(shape))


def _embedding_shape(given: Mapping[str, Any]) -> EmbeddingShape:
    gradient, indices = given["grad_output"], given["indices"]
    return EmbeddingShape(
        num_indices=indices.numel(),
        width=gradient.shape[-1],
        itemsize=gradient.element_size(),
        index_bytes=indices.element_size(),
        copied_bytes=0 if gradient.is_contiguous() else gradient.nbytes,
        scales_by_frequency=int(given["scale_grad_by_freq"]),
    )


def _product_shape(name: str, given: Mapping[str, Any]) -> ProductShape:
    inputs = given["A"]
    num_rows = inputs.numel() // inputs.shape[-1]
    if name == FOUR_BIT:
        width, depth = given["shapeB"]
        scales = given.get("absmax_8bit")
        num_nested = 0 if scales is None else scales.numel()
        return ProductShape(num_rows * width, width * depth, inputs.element_size(), num_nested)
    weight = given["CB" if "CB" in given else "B"]
    is_plain = name == EIGHT_BIT[0]
    dtype = given.get("dtype") or (torch.float16 if is_plain else inputs.dtype)
    is_cast = dtype != torch.float16
    return ProductShape(num_rows * weight.shape[0], 0, HALF_BYTES if is_cast else 0)


def _attention_shape(name: str, given: Mapping[str, Any]) -> AttentionShape:
    query, key, value = given["query"], given["key"], given["value"]
    heads_first = name.startswith("_scaled_dot_product") or name.startswith("_cudnn")
    starts = given.get("cum_seq_q", given.get("cu_seqlens_q"))
    is_packed = starts is not None and query.dim() == 3
    if is_packed:
        batch, tokens, heads = starts.numel() - 1, 0, 1
    else:
        batch, tokens, heads = query.shape[0], *((2, 1) if heads_first else (1, 2))
    read = [given.get("grad_out", given.get("grad_out_"))]
    if "flash" in name:
        read.append(given.get("out"))
    return AttentionShape(
        batch=batch,
        heads=query.shape[heads],
        key_heads=key.shape[heads],
        queries=query.shape[tokens],
        keys=key.shape[tokens],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        itemsize=query.element_size(),
        copied_bytes=sum(_copied_bytes(each, heads_first) for each in read if each is not None),
        has_dropout=int(given.get("dropout_p", 0.0) > 0),
        is_packed=int(is_packed),
    )


def _copied_bytes(tensor: torch.Tensor, heads_first: bool) -> int:
    """Return the bytes of the copy that a kernel makes where tokens do not come before heads."""
    in_order = tensor.transpose(1, 2) if heads_first and tensor.dim() == 4 else tensor
    return 0 if in_order.is_contiguous() else tensor.nbytes
