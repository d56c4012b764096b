"""What is measured: the model, its shapes, and the limits. Plain frozen values, sent to workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError, unknown_name

DTYPES = ("float32", "bfloat16", "float16")
GRADIENT_MODES = ("keep", "release")
MAX_MICRO_BATCH = 512
"""Where the search for the largest micro-batch ends."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A causal language model with random weights."""

    name: str
    """As tables show it."""
    model_type: str | None = None
    """transformers' name of the architecture; None if :attr:`path` says it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the architecture's config class."""
    path: str | None = None
    """A folder with a ``config.json``, or a model on the hub; its configuration alone is read."""


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """What all methods of one benchmark have in common.

    Raises:
        ConfigError: a value is out of range.
    """

    model: ModelSpec
    sequence_length: int = 512
    dtype: str = "bfloat16"
    """Of the weights, and of the arithmetic unless ``autocast`` says otherwise."""
    autocast: str | None = None
    """Run the forward under autocast to this dtype."""
    attention: str | None = None
    """transformers' ``attn_implementation``; None: its choice."""
    device: str = "auto"
    """``auto`` (the accelerator if there is one), ``cpu``, ``cuda``, ..."""
    seed: int = 0
    num_warmup: int = 3
    num_steps: int = 10
    gradients: str = "keep"
    """``keep``: until the step ends, as a Trainer does. ``release``: each is dropped as soon as it
    is complete, as when ZeRO-2 moves it to the host."""
    memory_cap_gib: float | None = None
    """Most device memory that the allocator may hold, in GiB (2**30 bytes)."""
    ballast_gib: float = 0.0
    """Device memory set aside for what this harness does not run, such as a gradient bucket."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("dtype", "autocast"):
            value = getattr(self, name)
            if value not in DTYPES and not (name == "autocast" and value is None):
                raise unknown_name(name, value, DTYPES)
        if self.gradients not in GRADIENT_MODES:
            raise unknown_name("gradients mode", self.gradients, GRADIENT_MODES)
        for name, least in (("sequence_length", 2), ("num_warmup", 0), ("num_steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {least} or more.")
        if self.memory_cap_gib is not None and not self.memory_cap_gib > 0:
            raise ConfigError(f"memory_cap_gib is {self.memory_cap_gib}; expected more than 0 GiB.")
        if not self.ballast_gib >= 0:
            raise ConfigError(f"ballast_gib is {self.ballast_gib}; expected 0 GiB or more.")

    def describe(self, micro_batch: int | None) -> str:
        """Return a heading: model, shapes, dtype, cap."""
        shape = f"{self.sequence_length} tokens"
        if micro_batch is not None:
            shape = f"micro-batch {micro_batch} x {shape}"
        dtype = self.dtype if self.autocast is None else f"{self.dtype}, autocast {self.autocast}"
        cap = "" if self.memory_cap_gib is None else f", at most {self.memory_cap_gib:g} GiB"
        return f"{self.model.name}, {shape}, {dtype}{cap}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One row to measure."""

    method: str
    micro_batch: int
    """What to measure at; in a search, the largest to try."""
    is_search: bool = False
    """Look for the largest micro-batch that fits, and measure there."""

    def __post_init__(self) -> None:
        """Check the micro-batch.

        Raises:
            ConfigError: it is not positive.
        """
        if self.micro_batch < 1:
            raise ConfigError(f"the micro-batch is {self.micro_batch}; expected 1 or more.")


SizeTable = Mapping[str, Mapping[str, Any]]
"""Architecture -> name of a size -> object with ``settings`` (config arguments)."""


def parse_model(text: str, sizes: SizeTable | None = None) -> ModelSpec:
    """Return the model that *text* names.

    Args:
        text: ``ARCH:key=value,...`` (any causal LM of transformers, sized by its config's
            arguments, values as JSON or text), ``ARCH:SIZE`` where *sizes* knows it, or a folder
            or hub name whose ``config.json`` is read.
        sizes: known sizes by architecture.

    Raises:
        ConfigError: the size or the form is unknown.
    """
    architecture, colon, rest = text.partition(":")
    if not colon:
        path = Path(text)
        return ModelSpec(name=path.name if path.is_dir() else text, path=text)
    if "=" not in rest:
        known = (sizes or {}).get(architecture, {})
        if rest.lower() not in known:
            if known:
                raise unknown_name(f"size of {architecture}", rest, known)
            raise ConfigError(
                f"model {text!r}: no sizes of {architecture!r} are known by name here. Write "
                f"{architecture}:hidden_size=2048,num_hidden_layers=24,... (arguments of its "
                "config class), or give a folder with a config.json."
            )
        settings = dict(known[rest.lower()].settings)
        return ModelSpec(name=f"{architecture} {rest}", model_type=architecture, settings=settings)
    settings = {}
    for pair in rest.split(","):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"model {text!r}: {pair!r} is no key=value pair.")
        settings[key.strip()] = parse_value(value)
    return ModelSpec(
        name=f"{architecture} of its own shape", model_type=architecture, settings=settings
    )


def parse_value(text: str) -> Any:
    """Return *text* as JSON if it is some, else as it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
