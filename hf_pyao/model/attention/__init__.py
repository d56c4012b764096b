"""Attention kernels run on one group of samples and heads after the other."""
