"""Makes an attachment's link: transport, host memory and window, by configuration and device."""

from __future__ import annotations

import os

import torch

from hf_pyao.config import GIB
from hf_pyao.engine.stores import HostPool, Store
from hf_pyao.engine.stores.host_share import HostShare
from hf_pyao.engine.stores.numa import node_of_pci_device
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport


def make_link(
    device: torch.device,
    transport: Transport | None,
    host_pool: Store | None,
    *,
    window_bytes: int | None,
    host_memory_gib: float | None,
) -> LinkContext:
    """Return a link for *device*.

    Args:
        device: where the model is.
        transport: None picks by device.
        host_pool: where bytes go; None makes a pool of host memory.
        window_bytes: bound on bytes in flight; None: compute and copies meet at each layer's end.
        host_memory_gib: ``PyAOConfig.host_memory_gib``, for host memory that is made.
    """
    transport = transport or transport_for(device)
    pool = host_pool or _make_pool(host_memory_gib, transport, device)
    return LinkContext(transport, pool, window_bytes)


def _make_pool(
    host_memory_gib: float | None, transport: Transport, device: torch.device
) -> HostPool:
    if host_memory_gib is None:
        share = HostShare.of_this_process(os.environ)
        capacity = share.capacity_bytes
    else:
        share = None
        capacity = int(host_memory_gib * GIB)
    return HostPool(
        capacity,
        pin=transport.needs_pinned_memory,
        numa_node=_numa_node_of(device),
        share=share,
        on_release=transport.host_released,
    )


def _numa_node_of(device: torch.device) -> int | None:
    """Return the host's NUMA node that *device* hangs on, where torch and the system tell."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, slot = parts
    return node_of_pci_device(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
