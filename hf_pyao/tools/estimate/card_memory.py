"""What of a card's memory may be reserved for a step, and what the rest is for, by name."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.plan.hardware.beside_step import Beside, blas_workspaces
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import GIB


@dataclass(frozen=True)
class CardMemory:
    """A card's memory, divided."""

    total_bytes: int
    beside: tuple[Beside, ...]
    """What is there beside a step throughout."""

    @property
    def limit_bytes(self) -> int:
        """Most that may be reserved: weights, states, activations, gradients, workspaces, and what
        fragmentation takes of it, see ``plan/predict/allocator_replay.py``."""
        return max(0, self.total_bytes - sum(each.nbytes for each in self.beside))

    def __str__(self) -> str:
        """Say it in one line."""
        parts = ", ".join(f"{each.nbytes / 1e9:.2f} GB {each.name}" for each in self.beside)
        return (
            f"of {self.total_bytes / 1e9:.2f} GB of the card {self.limit_bytes / 1e9:.2f} GB may "
            f"be reserved for a step; set aside: {parts}"
        )


def card_memory(hardware: Hardware, kernels: KernelSettings | None = None) -> CardMemory:
    """Return how the memory of *hardware* is divided.

    Args:
        hardware: the card.
        kernels: the settings of the process on it; None: those of the card alone.
    """
    total_bytes = int(hardware.memory_gib * GIB)
    context = Beside("for the driver and the CUDA context", int(hardware.context_gib * GIB))
    return CardMemory(total_bytes, (context, blas_workspaces(kernels or hardware.kernels)))
