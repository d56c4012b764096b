"""``Profile``: what the steps of a training take and save, part by part: measured, or predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A time over layers and steps, in ms."""

    mean_ms: float
    least_ms: float
    most_ms: float


@dataclass(frozen=True, kw_only=True)
class ProfiledModule:
    """A part of the layers: equal layers are one."""

    path: str
    """The sub-module in its layer; empty for the layer itself."""
    forward: Spread | None = None
    """From its start to its end, what runs inside of it included; None: it was not called."""
    backward: Spread | None = None
    """From when a gradient reaches its result to when one reaches what it got."""
    saved_bytes: int = 0
    """What it saves first in a layer, each storage once."""
    num_packs: float = 0.0
    """Tensors that it saves in a layer, those that were saved before included."""
    packed_bytes: int = 0
    """Their bytes."""
    throughput_gib_per_s: float | None = None
    """Bytes over the time between packs, averaged over packs (PyAO paper, section 5.5)."""


@dataclass(frozen=True, kw_only=True)
class ProfiledSlot:
    """A slot: the same in all layers that have it."""

    name: str
    nbytes: int
    """The largest."""
    dtype: str = ""
    """Empty if that is not known."""
    num_layers: int
    """Layers that save it."""
    stays: str | None = None
    """Why it stays in any case; None if it can leave."""


@dataclass(frozen=True, kw_only=True)
class ProfiledSpan:
    """Something that ran in the last micro-batch that was measured."""

    lane: str
    """``"forward"``, ``"backward"``, ``"offload"``, ``"reload"``, or a part of the overhead."""
    label: str
    """The layer and sub-module, or the slot."""
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Profile(JsonDocument):
    """What some micro-batches of a training take and save."""

    called: ClassVar[str] = "the profile"
    schema_version: int = 2
    kind: str = "profile"
    title: str
    is_measured: bool = True
    """False: computed from fake tensors and a card's speeds."""
    model: dict[str, Any]
    """What tells the model: kinds and number of its layers, a digest of their structure."""
    shapes: list[str] = field(default_factory=list)
    """What its forward was called with; empty if that is not known."""
    device: str
    num_micro_batches: int
    num_ranks: int = 1
    """Processes whose times are in the means."""
    layer_names: list[str]
    compiled_layers: bool = False
    """True if some are compiled: those are measured whole."""
    layer_forward: Spread | None = None
    """A layer's forward."""
    layer_backward: Spread | None = None
    """A layer's backward."""
    head: Spread | None = None
    """From the end of the last layer's forward to the start of its backward: head and loss."""
    modules: list[ProfiledModule]
    """By the time of their forward, the longest first."""
    slots: list[ProfiledSlot]
    """In the order of packing."""
    link: dict[str, float | None]
    """``d2h_gib_per_s`` and ``h2d_gib_per_s``, as far as copies told; None: nothing was copied.
    With several ranks their mean, and ``least_d2h_gib_per_s``, ``least_h2d_gib_per_s``."""
    collective_gib_per_s: float | None = None
    """What this process received of collectives, as long as they ran, the waits for other processes
    in them included; None: none were seen. With several ranks their mean."""
    host: dict[str, float] = field(default_factory=dict)
    """Host memory in bytes: ``capacity_bytes``, ``peak_bytes``, ``pinned_bytes``. And
    ``layer_forward_ms``, the least that the first layer's forward took the host, where that is not
    the device."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the micro-batches that were measured."""
    peak_allocated_bytes: int | None = None
    """Most on the device over them, as torch counts it; None where it does not."""
    grown_bytes: dict[str, int] = field(default_factory=dict)
    """Most that tensors on the device take in ``"forward"``, ``"head"`` and ``"backward"``, above
    what was there when the first layer began; empty where torch does not count. Of several ranks
    the most."""
    grown_beyond_bytes: dict[str, int] = field(default_factory=dict)
    """By how much that is above what the first of several ranks takes."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it ran with: ``policy``, ``window``, ``min_bytes``, ``keep_last_layers``, ``codec``,
    ``recompute_modules``, ``transport``, the name of what copied, and what changes the step itself:
    ``head_loss``, ``mlp_tiles``, ``checkpoint_every``, ``checkpoint_nested``, ``save_attention``,
    ``attention_groups``.
    Of a predicted one the last five."""
    speeds: dict[str, float] | None = None
    """What a predicted profile assumes of the device: ``tflop_per_s``, ``memory_gib_per_s``,
    ``launch_us``."""
    program: dict[str, Any] | None = None
    """The step on fake tensors, operation by operation, see
    :class:`hf_pyao.plan.step.recorded_step.RecordedStep`."""
    why_no_program: str = ""
    """Why there is none."""
    timeline: list[ProfiledSpan] = field(default_factory=list)
    """The last micro-batch."""
    provenance: Provenance

    @property
    def link_gib_per_s(self) -> float | None:
        """Mean speed of the link over the directions that are known."""
        directions = ("d2h_gib_per_s", "h2d_gib_per_s")
        known = [speed for each in directions if (speed := self.link.get(each))]
        return sum(known) / len(known) if known else None
