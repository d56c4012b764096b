"""Puts streamed weights on a model; see ``hf_pyao/engine/weights``."""

from __future__ import annotations

from hf_pyao.errors import ConfigError


def check_streaming(stream_weights: int | str, label: str) -> None:
    """Refuse ``PyAOConfig.stream_weights``, which this version knows by name alone.

    Raises:
        ConfigError: it is not ``"off"``.
    """
    if stream_weights != "off":
        raise ConfigError(
            f"{label} is {stream_weights!r}; weights cannot be streamed yet. Give 'off'."
        )
