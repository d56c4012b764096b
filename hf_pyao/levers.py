"""What changes the step itself, before any policy decides on what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_pyao.config import PyAOConfig


@dataclass(frozen=True, kw_only=True)
class Levers:
    """Fields of :class:`~hf_pyao.PyAOConfig` without which a step is another one.

    A recording of a step with these shows what there is to decide on with them.
    """

    head_loss: str = "off"
    mlp_tiles: int | str = "off"
    checkpoint_every: int = 0
    save_attention: bool = False

    @classmethod
    def of(cls, config: PyAOConfig) -> Levers:
        """Return those of *config*."""
        return cls(
            head_loss=config.head_loss,
            mlp_tiles=config.mlp_tiles,
            checkpoint_every=config.checkpoint_every,
            save_attention=config.save_attention,
        )

    def settings(self) -> dict[str, Any]:
        """Return them as :meth:`PyAOConfig.from_dict` takes them."""
        return dict(vars(self))


NO_LEVERS = Levers()
"""The step as the model runs it by itself."""
