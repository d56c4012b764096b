"""What is measured: the model, its shapes, and the limits. Plain frozen values, sent to workers."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.tools.estimate.model_specs import ModelSpec

DTYPES = ("float32", "bfloat16", "float16")
GRADIENT_MODES = ("keep", "release")
MAX_MICRO_BATCH = 512
"""Where the search for the largest micro-batch ends."""


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
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; expected {least} or more.",
                    key="setting-value",
                )
        if self.memory_cap_gib is not None and not self.memory_cap_gib > 0:
            raise ConfigError(
                f"memory_cap_gib is {self.memory_cap_gib}; expected more than 0 GiB.",
                key="setting-value",
            )
        if not self.ballast_gib >= 0:
            raise ConfigError(
                f"ballast_gib is {self.ballast_gib}; expected 0 GiB or more.", key="setting-value"
            )

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
    times_packs: bool = False
    """Time hf_pyao's pack hooks too, as ``pack_ms`` of the row's metrics."""

    def __post_init__(self) -> None:
        """Check the micro-batch.

        Raises:
            ConfigError: it is not positive.
        """
        if self.micro_batch < 1:
            raise ConfigError(
                f"the micro-batch is {self.micro_batch}; expected 1 or more.", key="setting-value"
            )
