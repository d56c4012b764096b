"""Codecs as ways to leave the device: fewer bytes on the link, for some compute on either side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hf_pyao.engine.codecs.grid import MAX_KERNEL_GROUP
from hf_pyao.engine.codecs.int4 import Int4Codec
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.step.prediction import Coded
from hf_pyao.plan.step.step_program import ROW_STATISTIC, SlotUse, StepProgram

IDENTITY = "identity"
LOSSY = "int8"
"""The codec that is taken where lossy ones are allowed: the most exact of them."""

BITS = {"identity": 0, "int8": 8, "fp8": 8, "int4": 4}
"""Bits of each element on the host; 0: as it is."""

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Of what lossy codecs take."""

SCALE_BYTES = 4
"""Of the scale of each group of values."""

LEAST_ROW = 64
"""Values that a scale is taken to be for where that is not known: the fewest that are usual."""

LARGE = 0.25
"""Share of the largest operation's traffic from which on an operation tells the memory's speed."""

USUAL_GIB_PER_S = 400.0
"""Memory's speed where no operation tells it."""


@dataclass(frozen=True)
class Coding:
    """How slots are written where they leave.

    Coding is one kernel each way: a pass over memory, as fast as the step's other passes are.
    """

    dtypes: Mapping[str, str]
    """By slot."""
    codec: str = IDENTITY
    """The configuration's."""
    allow_lossy: bool = False
    memory_gib_per_s: float = USUAL_GIB_PER_S
    launch_ms: float = 0.0
    """What a kernel takes beside its traffic."""

    @classmethod
    def of(
        cls,
        program: StepProgram,
        times_ms: Sequence[float],
        dtypes: Mapping[str, str],
        *,
        codec: str,
        allow_lossy: bool,
    ) -> Coding:
        """Return how a step's slots are written."""
        passes = [
            (operation.traffic_bytes, elapsed_ms)
            for operation, elapsed_ms in zip(program.operations, times_ms, strict=True)
            if elapsed_ms > 0 and operation.num_runs == 1 and not operation.flops
        ]
        launch_ms = min((elapsed_ms for _, elapsed_ms in passes), default=0.0)
        most_bytes = max((nbytes for nbytes, _ in passes), default=0)
        rates = [
            nbytes / GIB / (elapsed_ms - launch_ms) * 1e3
            for nbytes, elapsed_ms in passes
            if elapsed_ms > launch_ms and nbytes >= LARGE * most_bytes
        ]
        gib_per_s = median(rates) if rates else USUAL_GIB_PER_S
        return cls(dtypes, codec, allow_lossy, gib_per_s, launch_ms)

    def coded(self, slot: SlotUse, codec: str | None) -> Coded | None:
        """Return *slot* as it is written in *codec*, or in the configuration's if that is None.

        None if the codec leaves it as it is.
        """
        name = codec or self.codec
        bits = BITS.get(name, 0)
        element_bytes = ELEMENT_BYTES.get(self.dtypes.get(slot.name, ""), 0)
        if not bits or not element_bytes or slot.row_values == ROW_STATISTIC:
            return None
        num_values = slot.link_bytes // element_bytes
        group = slot.row_values or LEAST_ROW
        group = Int4Codec.num_per_group if name == "int4" else min(group, MAX_KERNEL_GROUP)
        codes_bytes = -(-num_values * bits // 8)
        scales_bytes = SCALE_BYTES * -(-num_values // group)
        if codes_bytes + scales_bytes >= slot.link_bytes:
            return None
        traffic_bytes = slot.link_bytes + codes_bytes + scales_bytes
        coding_ms = self.launch_ms + traffic_bytes / GIB / self.memory_gib_per_s * 1e3
        return Coded(codes_bytes, scales_bytes, coding_ms)
