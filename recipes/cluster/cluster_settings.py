"""What the processes of a local cluster are told: plain values that travel as JSON.

Imports no torch: the process that makes the namespaces reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EVENT_PREFIX = "@cluster "
"""Begins the lines of a node's output that are events; the others are its log."""

ADDRESS = "10.77.0.{}"
"""Of a node, by 10 + its index: a private network that ends at the bridge."""

INTERFACE = "eth0"
"""A node's only interface beside its loopback."""

PORT = 29500
"""Of the first node, in a network of its own."""

RECIPE_OPTIONS = (
    *("--block_size", "32", "--vocab_size", "512", "--max_text_mib", "0.5"),
    *("--max_eval_blocks", "1", "--eval_on_start", "false", "--logging_strategy", "no"),
    *("--logging_first_step", "false"),
    *("--warmup_steps", "2", "--disable_tqdm", "true", "--log_level", "error"),
    *("--dataloader_drop_last", "true", "--use_cpu"),
)
"""Options of the training recipe that suit a miniature; those of a user come after and win."""

OFFLOAD_OPTIONS = ("--activation_offload_min_bytes", "1024")
"""So that the miniature's small tensors are moved too; for runs with hf_pyao alone."""


def links_reply(work_dir: str, change: int) -> Path:
    """Return the file that says that the links were changed for the nth time, from 0."""
    return Path(work_dir, f"links_{change}")


@dataclass(frozen=True, kw_only=True)
class PointPlan:
    """One model at one micro-batch, to be trained for a few steps."""

    architecture: str
    run: int
    """Which repetition, from 0."""
    micro_batch: int
    gradient_accumulation: int
    rounds: int
    """Optimizer steps to the target."""
    steps: int
    """Optimizer steps to do: at least the rounds, unless told otherwise."""

    @property
    def name(self) -> str:
        """Short enough for a folder."""
        accumulated = f"x{self.gradient_accumulation}" if self.gradient_accumulation > 1 else ""
        return f"{self.architecture}_{self.micro_batch}{accumulated}_run{self.run}"


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What every node does: the same on all."""

    nodes: int
    engine: str
    precision: str
    rate_mbit: float
    points: list[PointPlan]
    compute_steps: int
    """Steps of each point with the links unshaped, before the others; 0: none."""
    activation_offload: bool
    model_size: str
    options: list[str]
    """Further options of the training recipe."""
    timeout_s: float
    """Longest that one collective may take."""
    work_dir: str
    """Where nodes and supervisor leave each other files."""
    output_dir: str | None
    """Where checkpoints go, a folder for each point; None: none are written."""
    save_steps: int
    """Write one every so many steps; 0: never."""
    resume: bool
    """Go on from the newest whole checkpoint of each point."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one node, to see how the others take it."""

    node: int
    step: int
    """In which optimizer step of the first point."""
    kind: str
    """``kill``: its processes end by SIGKILL; ``unplug``: its link goes down."""


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """What the process that makes the namespaces does."""

    node: NodeSettings
    python: str
    """The interpreter of the nodes."""
    launch_options: list[str]
    """Of ``accelerate launch``, the same on all nodes."""
    start_timeout_s: float
    """Longest from the start of the nodes to the first event of each."""
    fault: Fault | None
