"""Attention kernels run on one group of samples and heads after the other."""

from hf_pyao.model.attention.grouped import attention_in_groups
from hf_pyao.model.attention.kernels import FlashKernel, Kernel, NoKernel, chosen_kernel
from hf_pyao.plan.options.group_plan import GroupPlan, plan_groups

__all__ = [
    "FlashKernel",
    "GroupPlan",
    "Kernel",
    "NoKernel",
    "attention_in_groups",
    "chosen_kernel",
    "plan_groups",
]
