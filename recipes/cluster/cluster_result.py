"""What a sweep over micro-batches on several nodes comes to, and the file that holds it.

Imports no torch: figures and models read these files too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from result_file import write_result

KIND = "local_cluster"
SCHEMA_VERSION = 2

ENGINES = ("ddp", "zero1", "zero2")
"""DistributedDataParallel, and DeepSpeed's ZeRO stages 1 and 2."""


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """What all points of a sweep have in common."""

    nodes: int
    """One process on each."""
    engine: str
    """One of :data:`ENGINES`."""
    precision: str
    """``bf16`` or ``fp32``: of the weights under DeepSpeed, of autocast under DDP."""
    rate_mbit: float
    """Rate of each link, each way, in 10**6 bits per second, Ethernet headers included."""
    model_size: str
    """A name of ``hf_pyao/tools/estimate/model_sizes.py``."""
    block_size: int
    """Tokens in a sample."""
    target: int
    """Samples to accumulate: the micro-batches of size 1 that the times are about."""
    target_over: str
    """``all``: counted over all nodes together; ``node``: on each."""
    activation_offload: bool
    """Whether hf_pyao was attached."""
    isolation: str
    """How the namespaces were made: ``user namespace``, ``root`` or ``sudo``."""
    options: list[str]
    """Further options of the training recipe."""
    load_average: float
    """Of the machine over the minute before the start: what else it was doing."""


@dataclass(frozen=True, kw_only=True)
class ClusterPoint:
    """One model at one micro-batch: a whole short training."""

    architecture: str
    """``opt``, ``gpt2`` or ``llama``."""
    run: int
    """Which repetition, from 0."""
    micro_batch: int
    """Samples in one micro-batch of one node."""
    gradient_accumulation: int
    """Micro-steps in one optimizer step."""
    num_parameters: int
    gradient_bytes: int
    """Bytes of one whole gradient as it is sent."""
    rounds: int
    """Optimizer steps to the target."""
    first_step: int
    """Optimizer steps done before the first of these: more than 0 in a resumed run."""
    step_s: list[float]
    """Seconds of each optimizer step, of the first node; the first one has the start in it."""
    target_s: float | None
    """Seconds of the steps to the target; None if fewer were done."""
    compute_step_s: list[float] | None
    """The same steps with the links unshaped, the first one left out; None if not measured."""
    collectives_s: list[float] | None
    """What such a step's collectives take alone, links unshaped; None if not measured."""
    tx_bytes_per_step: list[float]
    """Bytes that each node sent per optimizer step, by its interface's counter; mean without the
    first step."""
    rx_bytes_per_step: list[float]
    """Bytes that each node received, likewise."""
    expected_bytes_per_step: float
    """What the engine's collectives send from one node, headers apart; see
    ``../experiments/communication.py``."""
    losses: list[float]
    """Training loss of each optimizer step, mean over the nodes."""
    losses_by_node: list[list[float]]
    """Training loss of each optimizer step on each node."""

    @property
    def steady_step_s(self) -> float:
        """Median seconds of an optimizer step, the first one left out."""
        return statistics.median(self.step_s[1:] or self.step_s)

    @property
    def compute_s(self) -> float | None:
        """Median seconds of an optimizer step with the links unshaped, but for its collectives."""
        if not self.compute_step_s or not self.collectives_s:
            return None
        collectives_s = statistics.median(self.collectives_s)
        return max(0.0, statistics.median(self.compute_step_s) - collectives_s)


@dataclass(frozen=True, kw_only=True)
class ClusterSweep:
    """A sweep, as it was measured."""

    setup: ClusterSetup
    points: list[ClusterPoint]


def write_sweep(path: Path | str, sweep: ClusterSweep) -> None:
    """Write *sweep* and its provenance to *path*, as JSON; say so."""
    write_result(
        path,
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        is_measured=True,
        setup=sweep.setup,
        points=sweep.points,
    )
