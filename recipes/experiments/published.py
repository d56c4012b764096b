"""What the papers' texts say, in numbers; what stands in a figure alone is not here.

PyAO: "PyAO", MDPI Sensors 26 (2026) 2269. NeuroCache: "NeuroCache: Budget-Constrained Activation
Offloading for Low-VRAM Transformer Training". Megatron-Core: "Fine-Grained Activation Offloading:
Cutting Memory Use While Preserving LLM Throughput". The guide: "Activation checkpointing and memory
offloading", section "How to run it in production".
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_NODES = 5
LINK_GBIT_PER_S = 1.0
SEQUENCE_LENGTH = 512
TARGET = 256

DEVICE_PEAKS_GB = {
    ("opt", "ZeRO-2", 4): 8.7,
    ("gpt2", "ZeRO-2", 4): 10.5,
    ("opt", "PyAO, int8", 8): 8.0,
    ("gpt2", "PyAO, int8", 4): 5.4,
}
"""Section 6.2. (model, system, micro-batch) -> peak; the paper's PyAO compresses."""

OUT_OF_MEMORY = {("opt", 8), ("gpt2", 8), ("llama", 4), ("llama", 8)}
"""Section 6.2: (model, micro-batch) that the baseline cannot run."""

MICRO_BATCHES = {"opt": (4, 10), "gpt2": (3, 10), "llama": (2, 5)}
"""Section 6.2: the largest micro-batch of ZeRO-2, and of PyAO."""

SPEEDUPS = {"opt": 2.0, "gpt2": 3.63, "llama": 2.24}
"""Section 6.4: time to 256 cumulative micro-batches, ZeRO-2's over PyAO's."""

ACTIVATION_SHARE = 0.59
"""Section 1: activations' share of memory, at most (Figure 1)."""

HOST_PEAK_GB, HOST_PEAK_AT = 28.66, ("opt", "PyAO, int8", 8)
"""Section 8.1: PyAO's."""
HOST_RATIO = 1.32
"""Section 6.3: PyAO's host peak over the baseline's, the largest of all: GPT-2 at 4."""

OFFLOAD_ALL_SLOWER = 0.07
"""Section 8.3: offloading every layer, over offloading with selective recomputation."""
TWO_STREAMS_FASTER = 0.19
"""Section 8.4: how much less a step takes with a copy stream."""


@dataclass(frozen=True)
class NeuroCacheRow:
    """A row of NeuroCache's Table 1, or of its section 4.3."""

    name: str
    peak_mb: float
    tokens_per_s: float


NEUROCACHE_TABLE_1 = (
    NeuroCacheRow("baseline", 6355.6, 532.6),
    NeuroCacheRow("checkpointing", 2895.8, 1890.0),
    NeuroCacheRow("checkpointing, 16-bit moments", 2545.6, 1891.8),
    NeuroCacheRow("NeuroCache, k = 5", 2455.6, 1885.0),
)
NEUROCACHE_20_STEPS = (
    NeuroCacheRow("checkpointing", 2894.5, 1890.2),
    NeuroCacheRow("NeuroCache, k = 5", 2456.4, 1887.6),
)
NEUROCACHE_TABLE_2 = {
    0: (2545.6, 1898.2, None),
    1: (2527.6, 1888.1, 22.0),
    2: (2509.6, 1860.4, 1077.0),
    3: (2491.6, 1888.5, 2040.0),
    4: (2473.6, 1866.3, 3122.0),
    5: (2455.6, 1878.6, 4203.0),
    6: (2437.6, 1866.0, 5118.0),
    8: (2401.6, 1872.1, 7080.0),
    10: (2365.6, 1885.4, 9060.0),
}
"""k -> peak in MB, tokens/s, pack time in ms."""

MEGATRON_MEMORY_CUT = (0.10, 0.35)
MEGATRON_SLOWDOWN = (0.01, 0.02)
MEGATRON_WITH_RECOMPUTE = (0.07, 0.10)
"""Its "Key findings": ranges over its four experiments, on other models."""

GUIDE_SHARD_BYTES = 2 * 2**30
GUIDE_COMPUTE_MS = 20.0
GUIDE_LINKS_GIB_PER_S = {"PCIe 4.0": 25.0, "NVLink-C2C": 900.0}
GUIDE_TRANSFER_MS = {"PCIe 4.0": 80.0, "NVLink-C2C": 2.2}
GUIDE_BREAK_EVEN_GIB_PER_S = 100.0
