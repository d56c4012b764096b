"""Where bytes are kept that left the device: what a store is, and the pool of host memory."""

from hf_pyao.engine.stores.host_memory import available_host_bytes
from hf_pyao.engine.stores.host_pool import HostBuffer, HostPool
from hf_pyao.engine.stores.store import HOST_FULL, Buffer, HostUse, Store

__all__ = [
    "HOST_FULL",
    "Buffer",
    "HostBuffer",
    "HostPool",
    "HostUse",
    "Store",
    "available_host_bytes",
]
