"""Tells when storages are resized, which no dispatch mode sees.

FSDP2 frees a gathered parameter so, and allocates it again: tensors and storage stay, and the
memory goes and comes (``free_storage`` in ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``).
torch's own ``MemTracker`` exchanges the same method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def sees_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call *resized* after each ``UntypedStorage.resize_``, of any thread, until it ends."""
    own = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
        result = own(storage, *args)
        resized(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield
