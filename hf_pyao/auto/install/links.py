"""Makes an attachment's link: transport, host memory and window, by configuration and device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from hf_pyao.auto.install.disk_tiers import DiskSettings, disk_tier
from hf_pyao.config import GIB, EffectiveConfig
from hf_pyao.engine.stores import HostPool, Store
from hf_pyao.engine.stores.host_share import HostShare
from hf_pyao.engine.stores.numa import node_of_pci_device
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import ConfigError
from hf_pyao.text import Labels


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How much is in flight and on the host."""

    window_bytes: int | None
    """Bound on bytes in flight; None: compute and copies meet at each layer's end."""
    label: str
    """How messages call the window."""
    host_memory_gib: float | None
    """Most memory of the host, in GiB; None: its share of what is available."""
    disk: DiskSettings
    """The tier below the host's memory."""

    @classmethod
    def of(cls, config: EffectiveConfig, labels: Labels) -> LinkSettings:
        """Return what *config* says; messages call its fields by *labels*."""
        window = config.window
        return cls(
            window_bytes=None if isinstance(window, str) else window,
            label=labels["window"],
            host_memory_gib=config.host_memory_gib,
            disk=DiskSettings.of(config, labels),
        )


def link_for(
    device: torch.device,
    transport: Transport | None,
    host_pool: Store | None,
    shared: LinkContext | None,
    settings: LinkSettings,
) -> LinkContext:
    """Return the link that is *shared* with other models, or a new one.

    Args:
        device: where the model is.
        transport: None picks by device.
        host_pool: where bytes go; None makes a pool of host memory.
        shared: what :func:`~hf_pyao.attach` was given as ``link``.
        settings: the window, and how much of the host.

    Raises:
        ConfigError: the link is given together with its parts, or has another window; or the
            disk's directory cannot be used.
        DiskError: no file can be made on the disk.
    """
    if shared is None:
        transport = transport or transport_for(device)
        store = host_pool or pool_for(settings.host_memory_gib, transport, device)
        disk = disk_tier(settings.disk, transport, _numa_node_of(device))
        further = () if disk is None else (disk,)
        return LinkContext(transport, store, settings.window_bytes, further)
    if transport is not None or host_pool is not None:
        raise ConfigError(
            "link is given together with transport or host_pool, which are a part of it. Pass "
            "either link, or the other two.",
            key="settings-contradict",
        )
    if shared.window_bytes != settings.window_bytes:
        given, expected = (
            "layer" if limit is None else limit
            for limit in (settings.window_bytes, shared.window_bytes)
        )
        raise ConfigError(
            f"{settings.label} is {given!r}; expected the window of the link that is shared, "
            f"{expected!r}. Give both models the same window.",
            key="shared-link",
        )
    return shared


def device_of(model: nn.Module) -> torch.device:
    """Return the device of *model*'s parameters; that of the first that is not on a CPU."""
    for tensor in model.parameters():
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def pool_for(host_memory_gib: float | None, transport: Transport, device: torch.device) -> HostPool:
    """Return a pool of *host_memory_gib*; None: of this process's share of the host.

    Args:
        host_memory_gib: its capacity.
        transport: copies between its buffers and the device.
        device: what the memory should be near to.
    """
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
