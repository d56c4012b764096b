"""Takes off what the user's thread carries, for code that is no part of the user's step.

A recording runs a step on fake tensors wherever a forward of the user's begins: inside of a
checkpoint, of somebody's offloader, of a mode that counts operations, under autocast. None of these
may see what the recording does, or change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao.engine.torch_hooks.saved_tensor_hooks import no_hooks


@contextlib.contextmanager
def bare_thread() -> Iterator[None]:
    """Leave nothing on that the calling thread carries, inside of this context.

    Off are saved-tensor hooks, dispatch modes, function modes, autocast (its cache would take fake
    casts of real weights), ``no_grad`` and inference mode. The default device stays: what a forward
    makes lies there. So do settings of the whole process, such as the default dtype.
    """
    num_modes = torch._C._len_torch_function_stack()
    with torch._C.DisableTorchFunction():  # to name a device is a call that modes see
        device = torch.get_default_device()
    with contextlib.ExitStack() as stack:
        for _ in range(num_modes):
            stack.enter_context(_pop_mode_temporarily())
        if num_modes:
            stack.enter_context(device)
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_hooks())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
