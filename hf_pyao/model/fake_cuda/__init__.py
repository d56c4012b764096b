"""Runs tensors of a CPU, fake ones above all, through the operations that CUDA would choose."""
