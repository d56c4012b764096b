"""What the engines of several models may share: one link, one host memory, one window."""

from __future__ import annotations

from hf_pyao.errors import ConfigError
from hf_pyao.stores import HostPool
from hf_pyao.transfer.compute_streams import ComputeStreams
from hf_pyao.transfer.transport import Transport
from hf_pyao.transfer.window import OffloadWindow


class LinkContext:
    """A transport, host memory, and how much may wait to leave at a time.

    Engines that share one, such as those of a pipeline's stages on one device, share what there is
    one of: the link, the host memory, and the bound on bytes in flight. What each of them moved,
    and how long its copies took, each counts for itself.

    Args:
        transport: copies bytes.
        pool: host memory.
        window_bytes: bound on bytes in flight in each direction; None is the paper's rule, to meet
            at the end of each layer (PyAO paper, section 4.2).
    """

    def __init__(self, transport: Transport, pool: HostPool, window_bytes: int | None) -> None:
        self.transport = transport
        self.pool = pool
        self.window_bytes = window_bytes
        self.streams = ComputeStreams()
        self.offloads = OffloadWindow(transport, window_bytes, self.streams)

    def set_window(self, window_bytes: int) -> None:
        """Bound the bytes in flight anew, from the next copy on.

        Raises:
            ConfigError: compute and copies meet at each layer's end, which cannot change later.
        """
        if self.window_bytes is None:
            raise ConfigError("the window is 'layer'; a number of bytes cannot take its place.")
        self.window_bytes = window_bytes
        self.offloads.set_limit(window_bytes)
