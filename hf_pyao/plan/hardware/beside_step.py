"""Memory of a device that is there beside a step's tensors, by name: handles, buckets, optimizer.

A recorded step holds weights, activations, gradients, an optimizer's states, and what kernels
allocate inside. This is the rest that torch's allocator hands out: what libraries keep for good,
what ranks reduce gradients in, and what the optimizer's step takes for a while when activations are
gone. What the driver takes for the context is not torch's, and is in no figure here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_pyao.plan.hardware.kernel_settings import KernelSettings

KIB = 2**10
MIB = 2**20

NUM_BLAS_HANDLES = 2
"""One for the thread that runs forward, one for autograd's thread of the device, each with its
current stream."""

HOPPER_OR_NEWER = 90

DETERMINISTIC_CONFIG = ":4096:8"
"""``CUBLAS_WORKSPACE_CONFIG`` that is assumed in deterministic mode, which asks for it or
``:16:8``."""

ZERO_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's ``reduce_bucket_size``."""

FOREACH, FUSED, FOR_LOOP = "foreach", "fused", "for-loop"
IMPLEMENTATIONS = (FUSED, FOREACH, FOR_LOOP)
"""How an optimizer of torch goes over parameters."""


class Beside(NamedTuple):
    """Memory that is there beside a step."""

    name: str
    nbytes: int


def blas_workspace_bytes(settings: KernelSettings, config: str | None = None) -> int:
    """Return the bytes of one cuBLAS workspace.

    torch allocates one for each pair of a handle and a stream, and keeps it; cuBLASLt shares it.
    8,519,680 bytes (``:4096:2:16:8``) up to Ada, 32 MiB from Hopper on.

    Source: pytorch/pytorch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``,
    ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle``; torch 2.13,
    ``torch.backends.cuda.cublas_workspace_size``. Releases differ in what Blackwell gets, and newer
    sources free workspaces after each call: the larger is counted.

    Args:
        settings: the device and the process.
        config: as ``CUBLAS_WORKSPACE_CONFIG``; None: that of this process's environment for a
            deterministic run, if it has one, else the default.
    """
    if config is None and settings.is_deterministic:
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_CONFIG)
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    if settings.capability >= HOPPER_OR_NEWER:
        return 32 * MIB
    return 4096 * KIB * 2 + 16 * KIB * 8


def blas_workspaces(settings: KernelSettings) -> Beside:
    """Return what cuBLAS takes in training."""
    return Beside("cuBLAS workspaces", NUM_BLAS_HANDLES * blas_workspace_bytes(settings))


def ddp_buckets(gradient_bytes: int, *, is_view: bool) -> Beside:
    """Return the buckets of ``DistributedDataParallel``: as much as all gradients.

    With ``gradient_as_bucket_view`` the gradients lie in the buckets. ``bucket_cap_mb`` says how
    many buckets there are, not how large they are in all.

    Source: ``torch/nn/parallel/distributed.py``, *gradient_as_bucket_view*; pytorch/pytorch,
    ``torch/csrc/distributed/c10d/reducer.cpp``, ``Reducer::initialize_buckets``.
    """
    return Beside("DDP's buckets", 0 if is_view else gradient_bytes)


def zero_bucket(
    itemsize: int = 2, num_elements: int = ZERO_BUCKET_ELEMENTS, *, overlaps: bool = False
) -> Beside:
    """Return the bucket in which DeepSpeed's ZeRO-1 and 2 reduce gradients in backward.

    ``overlap_comm`` takes two.

    Source: deepspeedai/DeepSpeed, ``deepspeed/runtime/zero/stage_1_and_2.py``, ``ipg_buffer``; the
    size is ``reduce_bucket_size`` of its configuration.
    """
    return Beside("ZeRO's bucket", itemsize * num_elements * (2 if overlaps else 1))


def implementation_of(optimizer: Any) -> str:
    """Return how a live optimizer goes over its parameters on CUDA: foreach by torch's default.

    Of what is not torch's nothing is known: fused, which allocates nothing.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return FUSED
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return FUSED
    return FOR_LOOP if group.get("foreach") is False else FOREACH


def optimizer_requests(
    gradient_sizes: Sequence[int],
    implementation: str = FUSED,
    *,
    has_moments: bool = True,
    decays_gradients: bool = False,
) -> tuple[int, ...]:
    """Return what one step of torch's AdamW, Adam or SGD allocates beside its states, and frees.

    In order: the bytes of an allocation, or ``~number`` where the one of that number is freed.

    - Adam's square root of the second moment: of all parameters at once with foreach; with a
      for-loop of one, and its quotient; in registers where it is fused.
    - Gradients with weight decay added (SGD and Adam, not AdamW): of all with foreach, of one with
      a for-loop.

    Source: ``torch/optim/adam.py``, ``_multi_tensor_adam`` (``exp_avg_sq_sqrt``,
    ``device_grads``), ``_single_tensor_adam`` (``denom``), ``_fused_adam``; ``torch/optim/sgd.py``,
    ``_multi_tensor_sgd``, ``_single_tensor_sgd``; torch 2.13. transformers 5 takes
    ``adamw_torch_fused`` by default, ``torch.optim.AdamW`` by itself foreach.

    Args:
        gradient_sizes: bytes of each trained parameter's gradient, which are those of a moment.
        implementation: one of :data:`IMPLEMENTATIONS`.
        has_moments: whether it is an Adam.
        decays_gradients: whether weight decay is added to gradients.
    """
    groups: list[list[int]] = []
    """Of sizes that are there at once."""
    if implementation == FOREACH:  # decayed gradients are freed before the root is made
        groups = [list(gradient_sizes)] * (decays_gradients + has_moments)
    elif implementation == FOR_LOOP:
        num_each = 2 * has_moments + decays_gradients
        groups = [[nbytes] * num_each for nbytes in sorted(set(gradient_sizes))]
    events: list[int] = []
    num_made = 0
    for group in groups:
        events += [*group, *(~(num_made + number) for number in range(len(group)))]
        num_made += len(group)
    return tuple(events)
