"""The ways to train that figures compare, by the names that all pages and files use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to train on several nodes."""

    name: str
    engine: str = "zero2"
    """A key of ``communication.ENGINES``."""
    checkpointing: bool = False
    is_pyao: bool = False
    """``policy="pyao", window="layer", keep_last_layers=1``."""
    is_selective: bool = True
    """PyAO's rule says what is recomputed; else all layers are offloaded."""
    codec: str = "identity"
    head_loss: str = "off"
    is_auto: bool = False
    """``policy="auto"``: the fastest plan in the memory that there is; a window of its own."""
    is_long_context: bool = False
    """``policy="all", long_context=True``: chunked loss, MLPs in tiles, layers' inputs leave."""
    accumulates: bool = False
    """Gradients stay on the device, summed over micro-batches, until they are reduced once."""

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of ``PyAOConfig``, where hf_pyao is at work."""
        if self.is_auto:
            return {"policy": "auto", "head_loss": self.head_loss}
        if self.is_long_context:
            return {"policy": "all", "window": "layer", "long_context": True}
        if not self.is_pyao:
            return {}
        return {
            "policy": "pyao" if self.is_selective else "all",
            "window": "layer",
            "keep_last_layers": 1,
            "codec": self.codec,
            "head_loss": self.head_loss,
        }


BASELINE = System(name="ZeRO-2")
CHECKPOINTING = System(name="ZeRO-2, checkpointing", checkpointing=True)
PYAO = System(name="PyAO, identity", is_pyao=True)
PYAO_INT8 = System(name="PyAO, int8", is_pyao=True, codec="int8")
PYAO_CHUNKED = System(name="PyAO, identity, chunked loss", is_pyao=True, head_loss="chunked")
CHECKPOINTING_CHUNKED = System(
    name="ZeRO-2, checkpointing, chunked loss", checkpointing=True, head_loss="chunked"
)
AUTO = System(name="auto", is_auto=True)
AUTO_CHUNKED = System(name="auto, chunked loss", is_auto=True, head_loss="chunked")
LONG_CONTEXT = System(name="long context", is_long_context=True, head_loss="chunked")
ACCUMULATION = System(name="ZeRO-1, accumulation", engine="zero1", accumulates=True)

OFFLOAD_ALL = System(name="offload all, identity", is_pyao=True, is_selective=False)
OFFLOAD_ALL_INT8 = System(name="offload all, int8", is_pyao=True, is_selective=False, codec="int8")

SYSTEMS = (
    BASELINE,
    PYAO,
    PYAO_INT8,
    CHECKPOINTING,
    PYAO_CHUNKED,
    CHECKPOINTING_CHUNKED,
    ACCUMULATION,
    AUTO,
    AUTO_CHUNKED,
)
"""In the order of all tables."""

GIVEN = tuple(system for system in SYSTEMS if not system.is_auto)
"""Systems that do the same in whatever memory there is."""

MODELS = {"opt": "OPT-1.3B", "gpt2": "GPT-2 0.8B", "llama": "Llama 1.2B"}
"""Architecture -> the paper's name of its model."""
