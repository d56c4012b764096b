"""Lets several kernels count as one, for modes that keep what kernels of attention return."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _python_dispatch


class KernelWatcher(abc.ABC):
    """Mixed into a dispatch mode that does something at each kernel of attention."""

    @abc.abstractmethod
    def run_as_one(self, run: Callable[..., Any], arguments: Sequence[Any], *, draws: bool) -> Any:
        """Return ``run(*arguments)``, or what stands for it; the kernels inside do not count.

        Args:
            run: runs the kernels.
            arguments: what *run* takes, tensors among it.
            draws: whether it draws random numbers.
        """


def run_as_one_kernel(run: Callable[..., Any], arguments: Sequence[Any], *, draws: bool) -> Any:
    """Return ``run(*arguments)``; the watcher that was entered last takes it for one kernel."""
    for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        if isinstance(mode, KernelWatcher):
            return mode.run_as_one(run, arguments, draws=draws)
    return run(*arguments)
