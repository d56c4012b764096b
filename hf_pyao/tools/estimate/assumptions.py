"""What estimates assume, in words: printed with each."""

from __future__ import annotations

from hf_pyao.plan.hardware.attention_workspaces import CUDNN_MARGIN
from hf_pyao.plan.hardware.kernel_settings import CUDNN_CAPABILITIES, KernelSettings

ASSUMPTIONS = (
    "weights and arithmetic in bfloat16 (--dtype), dropout as the configuration has it, no "
    "padding, eager layers, flash attention",
    "engine 'plain': gradients stay until the step ends. 'zero2': a gradient leaves when it is "
    "complete, through a bucket of 1e9 bytes, and the optimizer is on the host",
    "each operation takes the longer of its arithmetic and its memory traffic, and 3 us; copies "
    "run at the link's speed; the optimizer's step and communication are not in the time",
    "the outputs live on during backward, logits included where there are any; a storage counts "
    "from the end of the operation that makes it until its last tensor is gone",
    "what kernels allocate inside is counted while they run, as their sources have it "
    "(hf_pyao/plan/hardware/attention_workspaces.py and kernel_workspaces.py)",
    "a step fits if PyTorch's caching allocator serves it from the card's memory less the CUDA "
    "context (context_gib): its rules are replayed over three steps, with copies as late as can "
    "be; memory that others take on the same card is not counted",
    "reserved, and whether a step fits, hold for steps of equal length: where lengths vary, the "
    "allocator keeps segments of earlier ones beside, and gives them back when memory ends "
    "(--lengths: the worst case)",
    "rows of `auto` have the plan that it makes when it has measured the speeds above; `pyao plan` "
    "makes a plan from a data sheet, which it chooses for its worst case while speeds are off by "
    "30 %",
    "autograd adds gradients out of place, so that the count is on the high side",
)


def assumptions_for(kernels: KernelSettings) -> list[str]:
    """Return what is assumed where kernels run as *kernels* says."""
    found = list(ASSUMPTIONS)
    if kernels.prefers_cudnn:
        found.append(
            "attention runs cuDNN's kernel where torch would choose it; what its plan takes beside "
            f"its frontend's buffers is not published: {CUDNN_MARGIN / 2**20:.0f} MiB, and the "
            "gradients of grouped keys and values for all heads, are assumed"
        )
    elif kernels.capability in CUDNN_CAPABILITIES:
        found.append(
            "torch prefers cuDNN's attention on this card: "
            "torch.backends.cuda.enable_cudnn_sdp(False) makes it choose flash attention; "
            "--attention cudnn estimates the other"
        )
    if kernels.is_deterministic:
        found.append(
            "kernels are deterministic: flash attention's backward has a sum of its own for each "
            f"of {kernels.multiprocessors} multiprocessors that samples and heads do not fill"
        )
    return found
