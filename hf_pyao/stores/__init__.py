"""Where saved tensors wait: host memory now, further tiers behind the same interface."""

from hf_pyao.stores.host_memory import available_host_bytes
from hf_pyao.stores.host_pool import HostBuffer, HostPool

__all__ = ["HostBuffer", "HostPool", "available_host_bytes"]
