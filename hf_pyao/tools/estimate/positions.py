"""How long a sequence a model has positions for."""

from __future__ import annotations

import math
from typing import Any

from hf_pyao.errors import ConfigError


def most_positions(config: Any) -> int | None:
    """Return the positions that a model has a table for; None if any length will do."""
    if getattr(config, "rope_theta", None) or getattr(config, "rope_parameters", None):
        return None
    if getattr(config, "rope_scaling", None):
        return None
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None or not math.isfinite(longest) else int(longest)


def check_sequence_length(config: Any, sequence_length: int) -> None:
    """Refuse a length that the model has no positions for.

    Raises:
        ConfigError: it has not.
    """
    most = most_positions(config)
    if most is not None and sequence_length > most:
        raise ConfigError(
            f"the sequence length is {sequence_length}, and the model has {most} positions. Give a "
            "shorter one."
        )
