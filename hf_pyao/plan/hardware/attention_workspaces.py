"""Device memory that kernels of attention allocate for themselves and free before they return.

Bytes, by the name that the source gives the tensor, as functions of shapes. Sources, read for torch
2.13 (file paths are those of pytorch/pytorch unless another repository is named):

- FlashAttention-2: ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, functions
  ``mha_fwd``, ``set_params_splitkv``, ``num_splits_heuristic``, ``mha_bwd`` and ``mha_varlen_bwd``
  (commit 03b7c19d); the copies of gradient and output:
  ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, ``_flash_attention_backward``
  (commit 00afd8f2). Dao-AILab/flash-attention, ``csrc/flash_attn/flash_api.cpp``, allocates the
  same.
- FlashAttention-3: Dao-AILab/flash-attention, ``hopper/flash_api.cpp``, ``mha_bwd`` (commit
  0251105a). FlashAttention-4 is taken for the same; its source was not read.
- Memory-efficient attention: ``attention_backward.cu``, ``_efficient_attention_backward``, and the
  kernels' ``workspace_size`` in torch 2.13's own headers,
  ``ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h``, with the kernels of
  ``kernels/cutlassB.h`` and ``cutlassF.h``.
- cuDNN: NVIDIA/cudnn-frontend, ``include/cudnn_frontend/node/``
  ``scaled_dot_product_flash_attention.h``, ``get_fe_workspace_size_node`` of the backward node
  (commit 3929da2e, v1.23). What cuDNN's own plan takes beside that is not published:
  :data:`CUDNN_MARGIN` is assumed, and with grouped heads the gradients of keys and values for all
  heads, which the frontend leaves to the plan.

The math path is made of operations that are seen one by one, and allocates nothing unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

from hf_pyao.plan.hardware.kernel_settings import KernelSettings

Parts = dict[str, int]
"""Bytes by name."""

FLOAT_BYTES = 4

CUDNN_MARGIN = 32 * 2**20
"""Bytes assumed for what cuDNN's plan takes beside what its frontend asks for; not published."""


class AttentionShape(NamedTuple):
    """Sizes of one call of an attention kernel."""

    batch: int
    """Sequences; those that lie behind one another in one row count too."""
    heads: int
    key_heads: int
    """Heads of keys and values; fewer than :attr:`heads` where they are grouped."""
    queries: int
    """Tokens of each sequence; of all together where sequences lie behind one another."""
    keys: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of an element."""
    copied_bytes: int = 0
    """Copies of inputs that the call makes since they are not contiguous."""
    has_dropout: int = 0
    is_packed: int = 0
    """1 if sequences of different lengths lie behind one another (``cu_seqlens``)."""

    @property
    def is_half(self) -> bool:
        """Whether elements have 16 bits."""
        return self.itemsize == 2


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _kept(parts: Parts) -> Parts:
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


# ---- FlashAttention ----------------------------------------------------------------------------


def _flash_width(head_dim: int) -> int:
    width = _up(head_dim, 8)
    return _up(width, 32 if width <= 128 else 64)


def flash_forward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what FlashAttention-2's forward allocates inside.

    Nothing, unless there are too few blocks of queries for the device: then keys are split, each
    split with a float32 output of its own.
    """
    if shape.has_dropout or shape.is_packed or settings.flash_version != 2:
        return {}
    splits = _flash_key_splits(shape, settings.multiprocessors)
    if splits <= 1:
        return {}
    rows = splits * shape.batch * shape.heads * shape.queries
    return {
        "softmax_lse_accum": FLOAT_BYTES * rows,
        "out_accum": FLOAT_BYTES * rows * _flash_width(shape.head_dim),
    }


def _flash_key_splits(shape: AttentionShape, multiprocessors: int) -> int:
    """Return into how many parts keys are split (``num_splits_heuristic``)."""
    key_block = 256 if shape.head_dim <= 64 else 128 if shape.head_dim <= 128 else 64
    key_blocks = _blocks(shape.keys, key_block)
    query_blocks = shape.batch * shape.heads * _blocks(shape.queries, 64)
    slots = 2 * multiprocessors
    if query_blocks >= 0.8 * slots:
        return 1
    efficiencies: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits > 1 and _blocks(key_blocks, splits) == _blocks(key_blocks, splits - 1):
            continue
        waves = query_blocks * splits / slots
        efficiencies[splits] = waves / ceil(waves)
    best = max(efficiencies.values(), default=0.0)
    return next((n for n, share in efficiencies.items() if share >= 0.85 * best), 1)


def flash_backward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what FlashAttention-2's backward allocates inside.

    In deterministic mode each of the blocks of keys that run at once has a sum of its own.
    """
    if settings.flash_version != 2:
        return flash_3_backward(shape, settings)
    rows = shape.batch * _up(shape.queries, 128)
    if shape.is_packed:
        rows = shape.queries + 128 * shape.batch
    splits = 1
    if settings.is_deterministic:
        splits = _blocks(settings.multiprocessors, shape.batch * shape.heads)
    sums = FLOAT_BYTES * rows * shape.heads * _flash_width(shape.head_dim)
    return _kept(
        {
            "dq_accum": splits * sums,
            "softmax_d": FLOAT_BYTES * rows * shape.heads,
            "dk_expanded": _of_all_heads(shape, _up(shape.head_dim, 8)),
            "dv_expanded": _of_all_heads(shape, _up(shape.head_dim, 8)),
            "contiguous copies": shape.copied_bytes,
        }
    )


def _of_all_heads(shape: AttentionShape, width: int) -> int:
    """Return the bytes of a gradient of keys or values with as many heads as queries have."""
    if shape.key_heads == shape.heads:
        return 0
    sequences = 1 if shape.is_packed else shape.batch
    return shape.itemsize * sequences * shape.keys * shape.heads * width


def flash_3_backward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what FlashAttention-3's backward allocates inside; its deterministic mode adds locks.

    The semaphores are a few kilobytes, and counted.
    """
    width = next((n for n in (64, 96, 128, 192, 256) if shape.head_dim <= n), shape.head_dim)
    # Blocks of Hopper. Of 128 wide heads they are 64 queries with a causal mask and 80 without.
    query_blocks = (128,) if width <= 64 else (64, 80) if width == 128 else (64,)
    query_block = max(query_blocks)
    key_block = 128 if width <= 128 else 96 if width <= 192 else 80
    rows = shape.batch * max(_up(shape.queries, block) for block in query_blocks)
    all_keys = shape.batch * _up(shape.keys, key_block)
    if shape.is_packed:
        rows = _up(shape.queries + shape.batch * query_block, query_block)
        all_keys = _up(shape.keys + shape.batch * key_block, key_block)
    is_grouped = shape.key_heads != shape.heads
    key_sums = FLOAT_BYTES * all_keys * shape.key_heads * width if is_grouped else 0
    locks = FLOAT_BYTES * _blocks(shape.queries, 64) * shape.batch * shape.heads
    if is_grouped and settings.is_deterministic:
        locks += 2 * FLOAT_BYTES * _blocks(shape.keys, key_block) * shape.batch * shape.key_heads
    return _kept(
        {
            "dq_accum": FLOAT_BYTES * rows * shape.heads * width,
            "softmax_d": FLOAT_BYTES * rows * shape.heads,
            "softmax_lse_log2": FLOAT_BYTES * rows * shape.heads,
            "dk_accum": key_sums,
            "dv_accum": key_sums,
            "semaphores": locks,
            "contiguous copies": shape.copied_bytes,
        }
    )


# ---- memory-efficient attention ----------------------------------------------------------------


def efficient_forward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what memory-efficient attention's forward allocates inside.

    A float32 output, where a row of values of 16 bits does not fit the registers: from 128 on.
    """
    if not shape.is_half or shape.value_dim <= 128:
        return {}
    rows = shape.batch * shape.heads * shape.queries
    return {"output_accum": FLOAT_BYTES * rows * shape.value_dim}


class _Block(NamedTuple):
    """A kernel of ``cutlassB.h``."""

    queries: int
    keys: int
    in_registers: bool
    """It keeps the gradients of keys and values in registers."""


def efficient_backward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what memory-efficient attention's backward allocates inside.

    Which of its kernels runs follows from the shared memory of the device, too; the one that takes
    most is assumed.
    """
    rows = shape.batch * shape.heads * shape.queries
    workspace = max(_efficient_workspace(shape, settings, b) for b in _efficient_blocks(shape))
    delta = FLOAT_BYTES * rows
    parts = {
        "workspace": workspace,
        "delta": delta,
        "contiguous copies": shape.copied_bytes,
    }
    if not shape.is_half:
        # Delta is summed by operations of torch: their product and their sum, in another order,
        # are freed before the workspace is allocated.
        parts["workspace"] = max(workspace, FLOAT_BYTES * rows * shape.value_dim + delta)
    return _kept(parts)


def _efficient_blocks(shape: AttentionShape) -> list[_Block]:
    width = max(shape.head_dim, shape.value_dim)
    if width <= 64:
        return [_Block(64, 64, shape.is_half)]
    if width <= 128 and shape.is_half:
        narrow = [_Block(128, 64, True)] if width <= 96 else []
        return [*narrow, _Block(128, 128, True), _Block(64, 64, False)]
    return [_Block(128, 64, False), _Block(64, 64, False)]


def _efficient_workspace(shape: AttentionShape, settings: KernelSettings, block: _Block) -> int:
    """Return ``Params::workspace_size`` of one kernel."""
    tiles = _blocks(shape.queries, block.queries) * _blocks(shape.head_dim, block.keys)
    elements = tiles * (4 + block.queries * block.keys)  # a lock and a counter, padded to 128 bits
    if shape.is_half and not block.in_registers:
        splits = 1
        if not settings.is_deterministic:
            splits = min(_blocks(shape.keys, block.keys), 200 // (shape.batch * shape.heads))
        widths = _up(shape.head_dim, block.queries) + _up(shape.value_dim, block.queries)
        elements += max(splits, 1) * block.keys * widths
    return FLOAT_BYTES * shape.batch * shape.heads * _up(elements, 4)


# ---- cuDNN -------------------------------------------------------------------------------------


def cudnn_forward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what is assumed of cuDNN's forward: the margin alone."""
    return {"plan (assumed)": CUDNN_MARGIN}


def cudnn_backward(shape: AttentionShape, settings: KernelSettings) -> Parts:
    """Return what cuDNN's frontend asks for in backward, and what is assumed of its plan."""
    rows = shape.batch * shape.heads * shape.queries
    return _kept(
        {
            "dQ_accum": FLOAT_BYTES * rows * shape.head_dim,
            "softmax_sum": FLOAT_BYTES * rows,
            "dK of all heads (assumed)": _of_all_heads(shape, shape.head_dim),
            "dV of all heads (assumed)": _of_all_heads(shape, shape.value_dim),
            "plan (assumed)": CUDNN_MARGIN,
            "contiguous copies": shape.copied_bytes,
        }
    )


Formula = Callable[[AttentionShape, KernelSettings], Parts]

ATTENTION: Mapping[str, Formula] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention": flash_forward,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "_efficient_attention_forward": efficient_forward,
        "_efficient_attention_backward": efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_cudnn_attention_forward": cudnn_forward,
        "_cudnn_attention_backward": cudnn_backward,
    }
)
"""By the name of torch's operator."""
