"""Codecs as ways to leave the device: fewer bytes on the link, for some compute on either side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_pyao.hardware.speeds import GIB, LinkModel
from hf_pyao.planning.plan_problem import Way, way_of
from hf_pyao.planning.step_program import SlotUse, StepProgram

IDENTITY = "identity"
LOSSY = "int8"
"""The codec that is taken where lossy ones are allowed: the most exact of them."""

BITS = {"identity": 0, "int8": 8, "fp8": 8, "int4": 4}
"""Bits of each element on the host; 0: as it is."""

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Of what lossy codecs take."""

PASSES = 1.5
"""Bytes that coding reads and writes, by the bytes of what is coded."""


@dataclass(frozen=True)
class CodedWays:
    """How slots may leave.

    Coding is a pass over memory, at the speed of the fastest operation of the step.
    """

    dtypes: Mapping[str, str]
    """By slot."""
    codec: str = IDENTITY
    """The configuration's."""
    allow_lossy: bool = False
    memory_gib_per_s: float = 400.0

    @classmethod
    def of(
        cls,
        program: StepProgram,
        times_ms: Sequence[float],
        dtypes: Mapping[str, str],
        *,
        codec: str,
        allow_lossy: bool,
    ) -> CodedWays:
        """Return the ways of a step's slots."""
        rates = [
            operation.traffic_bytes / GIB / (elapsed_ms / 1e3)
            for operation, elapsed_ms in zip(program.operations, times_ms, strict=True)
            if elapsed_ms > 0.01 and not operation.flops
        ]
        return cls(dtypes, codec, allow_lossy, max(rates, default=400.0))

    def without_loss(self) -> CodedWays:
        """Return the same with the configuration's codec alone."""
        return replace(self, allow_lossy=False)

    def ways(self, slot: SlotUse, link: LinkModel) -> tuple[Way, ...]:
        """Return how *slot* may leave over *link*."""
        found = [self._way(slot, link, self.codec, None)]
        if self.allow_lossy and self.codec == IDENTITY and self.link_bytes(slot, LOSSY):
            found.append(self._way(slot, link, LOSSY, LOSSY))
        return tuple(found)

    def link_bytes(self, slot: SlotUse, codec: str | None) -> int:
        """Return what crosses the link for *slot*; 0 if the codec leaves it as it is."""
        bits = BITS.get(codec or self.codec, 0)
        element_bytes = ELEMENT_BYTES.get(self.dtypes.get(slot.name, ""), 0)
        if not bits or not element_bytes:
            return 0
        return slot.link_bytes * bits // (8 * element_bytes)

    def coding_ms(self, slot: SlotUse) -> float:
        """Return what coding takes, on either side."""
        return slot.link_bytes * PASSES / GIB / self.memory_gib_per_s * 1e3

    def _way(self, slot: SlotUse, link: LinkModel, codec: str, named: str | None) -> Way:
        nbytes = self.link_bytes(slot, codec)
        if not nbytes:
            return way_of(slot.link_bytes, link, named)
        coding_ms = self.coding_ms(slot)
        return Way(
            codec=named,
            offload_ms=link.copy_ms("offload", nbytes),
            reload_ms=link.copy_ms("reload", nbytes),
            host_bytes=nbytes,
            forward_ms=coding_ms,
            backward_ms=coding_ms,
        )
