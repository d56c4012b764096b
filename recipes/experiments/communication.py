"""How long an optimizer step takes on nodes that talk over a slow link: pure arithmetic.

    step = compute(micro-batch) + communication(engine, nodes, link) + optimizer

[Note: What an engine sends]
With B the bytes of one full gradient and N nodes, a ring sends c (N - 1) / N x B from each node in
an optimizer step of ``gas`` micro-batches. An all-reduce is 2, an all-gather or a reduce-scatter 1:

========== ============ ===================================================================
engine     c            why
========== ============ ===================================================================
ddp        2            one all-reduce, at the last micro-batch (``no_sync`` before it)
zero1      3            the same, and an all-gather of the updated parameters
zero2      2 gas + 1    DeepSpeed's default: an all-reduce at *every* micro-batch, one all-gather
zero2-rs   gas + 1      the same with a true reduce-scatter, as the paper counts it
zero3      3 gas        two gathers and a reduction at every micro-batch
========== ============ ===================================================================

So accumulation does not amortise what ZeRO-2 and ZeRO-3 send, and a larger micro-batch does; under
DDP and ZeRO-1 plain accumulation sends as little as one large micro-batch.

What the model leaves out: overlap of communication with backward, contention in switches,
trees instead of rings, and packets that are lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType

from hf_pyao.errors import unknown_name

WIRE_EFFICIENCY = 0.941
"""Payload of TCP over Ethernet with frames of 1500 bytes: 1448 of 1538 on the wire."""


@dataclass(frozen=True)
class Engine:
    """How often an engine sends the gradient's bytes; see [Note: What an engine sends]."""

    name: str
    per_micro_step: float
    """Passes over B in each micro-batch."""
    per_step: float
    """Passes over B in each optimizer step."""

    def passes(self, gas: int) -> float:
        """Return c, for *gas* micro-batches an optimizer step."""
        return self.per_micro_step * gas + self.per_step

    @property
    def meets_each_micro_step(self) -> bool:
        """Whether all nodes wait for each other at every micro-batch."""
        return self.per_micro_step > 0


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        engine.name: engine
        for engine in (
            Engine("ddp", 0, 2),
            Engine("zero1", 0, 3),
            Engine("zero2", 2, 1),
            Engine("zero2-rs", 1, 1),
            Engine("zero3", 3, 0),
        )
    }
)
"""By name."""


def find_engine(name: str) -> Engine:
    """Return the engine called *name*.

    Raises:
        ConfigError: there is none; the nearest name and all names are given.
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    return ENGINES[name]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with one device each, and what joins them."""

    num_nodes: int
    link_gbit_per_s: float
    """1e9 bits a second, of each node, each way."""
    efficiency: float = WIRE_EFFICIENCY
    """Share of it that payload gets."""
    latency_us: float = 0.0
    """Of one message between neighbours; a ring of N nodes sends N - 1 of them for each pass."""
    bucket_bytes: float = math.inf
    """Gradients are sent in pieces of so many bytes, each with its own messages."""
    slowest_link: float = 1.0
    """Speed of the slowest node's link over the others': a ring runs at that speed."""
    slowest_device: float = 1.0
    """Speed of the slowest node's device over the others': all wait for it."""
    jitter: float = 0.0
    """Standard deviation of a micro-batch's compute over its mean, drawn anew for each node."""
    host_gb_per_s: float = math.inf
    """Host memory's bandwidth, which activations and gradients share (PyAO paper, section 8.2);
    1e9 bytes a second."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one node does in an optimizer step."""

    gradient_bytes: float
    """B: parameters times the bytes of what is sent, 2 in half precision."""
    compute_s: float
    """Forward and backward of one micro-batch, copies that are waited for included."""
    gas: int = 1
    """Micro-batches of an optimizer step."""
    optimizer_s: float = 0.0
    """Of the rank's own share."""
    host_bytes: float = 0.0
    """What crosses host memory in one micro-batch: activations out and back, gradients."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """An optimizer step, in seconds."""

    compute_s: float
    waiting_s: float
    """For the slowest of the nodes, beyond an average one's compute."""
    communication_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.waiting_s + self.communication_s + self.optimizer_s


def sent_bytes(engine: Engine, num_nodes: int, gradient_bytes: float, gas: int = 1) -> float:
    """Return what each node sends in an optimizer step."""
    return engine.passes(gas) * (num_nodes - 1) / num_nodes * gradient_bytes


def step_time(engine: Engine, cluster: Cluster, work: Work) -> StepTime:
    """Return what a step takes."""
    micro_s = max(work.compute_s, work.host_bytes / (cluster.host_gb_per_s * 1e9))
    compute_s = work.gas * micro_s
    slowest_s = compute_s / cluster.slowest_device + _straggling_s(engine, cluster, work, micro_s)
    return StepTime(
        compute_s=compute_s,
        waiting_s=slowest_s - compute_s,
        communication_s=_wire_s(engine, cluster, work),
        optimizer_s=work.optimizer_s,
    )


def _wire_s(engine: Engine, cluster: Cluster, work: Work) -> float:
    if cluster.num_nodes == 1:
        return 0.0
    num_bytes = sent_bytes(engine, cluster.num_nodes, work.gradient_bytes, work.gas)
    bytes_per_s = cluster.link_gbit_per_s * 1e9 / 8 * cluster.efficiency * cluster.slowest_link
    buckets = 1 if math.isinf(cluster.bucket_bytes) else work.gradient_bytes / cluster.bucket_bytes
    messages = engine.passes(work.gas) * (cluster.num_nodes - 1) * max(1, math.ceil(buckets))
    return num_bytes / bytes_per_s + messages * cluster.latency_us / 1e6


def _straggling_s(engine: Engine, cluster: Cluster, work: Work, micro_s: float) -> float:
    """Return how much longer the slowest of N draws takes than the mean (Blom's formula).

    Where nodes meet at each micro-batch, they wait for its slowest each time; where they meet once
    a step, fast and slow micro-batches of a node even out.
    """
    num_nodes = cluster.num_nodes
    if num_nodes == 1 or cluster.jitter == 0:
        return 0.0
    worst = NormalDist().inv_cdf((num_nodes - 0.375) / (num_nodes + 0.25))
    meetings = work.gas if engine.meets_each_micro_step else math.sqrt(work.gas)
    return worst * cluster.jitter * micro_s * meetings / cluster.slowest_device


# ---- time to a number of samples -----------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """What "256 accumulated micro-batches" may mean."""

    name: str
    counts_all_nodes: bool
    """Samples of all nodes count towards the target; else each node has to reach it."""
    is_one_step: bool
    """All are accumulated into one optimizer step; else each micro-batch is a step."""


COUNTINGS = (
    Counting("each node, a step each", False, False),
    Counting("each node, one step", False, True),
    Counting("all nodes, a step each", True, False),
    Counting("all nodes, one step", True, True),
)


def num_rounds(target: int, micro_batch: int, num_nodes: int, counting: Counting) -> int:
    """Return how many micro-batches each node runs until *target* samples are reached."""
    at_once = micro_batch * (num_nodes if counting.counts_all_nodes else 1)
    return -(-target // at_once)


def time_to(
    target: int,
    micro_batch: int,
    engine: Engine,
    cluster: Cluster,
    work: Work,
    counting: Counting,
) -> float:
    """Return the seconds until *target* samples are accumulated.

    Args:
        target: samples ("micro-batches" in the paper's Figure 6).
        micro_batch: samples of a micro-batch; *work* is for it, and its ``gas`` is not read.
        engine: what is sent.
        cluster: over what.
        work: of one micro-batch.
        counting: what the target counts.
    """
    rounds = num_rounds(target, micro_batch, cluster.num_nodes, counting)
    gas, steps = (rounds, 1) if counting.is_one_step else (1, rounds)
    return steps * step_time(engine, cluster, dataclasses.replace(work, gas=gas)).step_s


def time_of_accumulated(
    samples: int, micro_batch: int, engine: Engine, cluster: Cluster, work: Work
) -> float:
    """Return the seconds of one step that accumulates *samples* on each node."""
    gas = -(-samples // micro_batch)
    return step_time(engine, cluster, dataclasses.replace(work, gas=gas)).step_s
