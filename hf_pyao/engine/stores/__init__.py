"""Host memory: how much there is, and the pool that hands it out."""

from hf_pyao.engine.stores.host_memory import available_host_bytes
from hf_pyao.engine.stores.host_pool import HostBuffer, HostPool, HostUse

__all__ = ["HostBuffer", "HostPool", "HostUse", "available_host_bytes"]
