"""Every knob of hf_pyao in one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError, unknown_name

SCHEMA_VERSION = 1
"""Version of the JSON written by :meth:`PyAOConfig.to_dict`."""

POLICY_NAMES = ("all", "modules", "off")
"""Names that ``policy`` takes; the implementations are in ``runtime/policy.py``."""

HEAD_LOSS_NAMES = ("auto", "off", "chunked", "liger")
"""Names that ``head_loss`` takes."""

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PyAOConfig:
    """What is offloaded, how, and within which limits.

    All fields have defaults that are safe to start with. Values are checked once, here; names that
    depend on the model (roles and module names) are checked when the model is attached.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or contradicts another.
    """

    policy: Any = "all"
    """Which saved tensors leave the device: ``"all"`` that are large enough, or ``"modules"``
    (only what the roles or module names in ``modules`` save), or ``"off"`` (nothing: what would
    move is only counted, and ``head_loss`` works alone). A Policy instance is taken too."""
    codec: Any = "identity"
    """How tensors are written on the host: a name from ``hf_pyao.codecs.CODECS`` or a Codec.
    ``"identity"`` is exact. Where the link sets the step time, ``"int8"`` (a scale for each row)
    moves half the bytes of 16-bit tensors, with about bf16 autocast's own error in gradients;
    ``"fp8"`` does so for models with ReLU, which int8 does not suit (``codecs/COMPRESSION.md``)."""
    modules: tuple[str, ...] = ()
    """Roles (``core_attn``, ``mlp_act``, ...) or module names inside a layer (``mlp.act_fn``, with
    ``*`` as wildcard); with ``policy="modules"`` only what they save is offloaded."""
    recompute_modules: tuple[str, ...] = ()
    """Roles or module names inside a layer, as in ``modules``: what they save or make is dropped
    and rebuilt in backward, where that needs no matrix product but their own. ``"pointwise"``
    stands for whatever can be rebuilt without a matrix product. The policy decides on the rest."""
    keep_last_layers: int = 1
    """Number of last layers of each forward whose saved tensors stay: backward needs them at once
    (PyAO paper, section 4.2)."""
    min_bytes: int = 64 * 1024
    """Smaller saved tensors stay on the device."""
    window: str | int = 256 * MIB
    """Bound on what is in flight. A number of bytes: copies may run on under later layers as long
    as no more than that many bytes wait to leave, or were brought back ahead of their use.
    ``"layer"``: compute and copies meet at the end of every layer (PyAO paper, section 4.2)."""
    copy_streams: int = 2
    """Streams for copies: 2, one for each direction; 1, both on one; 0, on the compute stream
    without overlap (for comparison: PyAO paper, Table 3)."""
    host_memory_gib: float | None = None
    """Most host memory that saved tensors may take, in GiB (2**30 bytes). None: half of what is
    available when the model is attached, container limits respected. What does not fit stays."""
    head_loss: str = "off"
    """How hidden states become the loss: ``"off"`` leaves the model's own loss alone; ``"chunked"``
    never holds the logits; ``"liger"`` uses Liger's kernel; ``"auto"`` picks."""
    report: str | None = None
    """Write a RunReport (JSON) to this path when training ends."""

    def __post_init__(self) -> None:
        """Check every field; see the class docstring."""
        if isinstance(self.policy, str) and self.policy not in POLICY_NAMES:
            raise unknown_name("policy", self.policy, POLICY_NAMES)
        if isinstance(self.codec, str):
            from hf_pyao.codecs import CODECS

            if self.codec not in CODECS:
                raise unknown_name("codec", self.codec, CODECS)
        _check_names("modules", self.modules)
        _check_names("recompute_modules", self.recompute_modules)
        _check_int("keep_last_layers", self.keep_last_layers, "layers")
        _check_int("min_bytes", self.min_bytes, "bytes")
        if isinstance(self.window, str):
            if self.window != "layer":
                raise ConfigError(
                    f"window is {self.window!r}; expected 'layer' or a number of bytes."
                )
        else:
            _check_int("window", self.window, "bytes, or 'layer'")
        if self.copy_streams not in (0, 1, 2):
            raise ConfigError(f"copy_streams is {self.copy_streams!r}; expected 0, 1 or 2.")
        _check_gib("host_memory_gib", self.host_memory_gib)
        if self.head_loss not in HEAD_LOSS_NAMES:
            raise unknown_name("head_loss", self.head_loss, HEAD_LOSS_NAMES)
        if self.report is not None and not isinstance(self.report, str):
            raise ConfigError(f"report is {self.report!r}; expected a path as a string, or None.")
        if self.policy == "modules" and not self.modules:
            raise ConfigError(
                "policy='modules' offloads only what `modules` names, and `modules` is empty: "
                "name roles such as 'mlp_act', or choose policy='all'."
            )
        if self.modules and self.policy in ("all", "off"):
            raise ConfigError(
                f"modules={list(self.modules)} has no effect with policy={self.policy!r}: "
                "set policy='modules', or drop `modules`."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PyAOConfig:
        """Build a configuration from plain values, as :meth:`to_dict` writes them.

        Raises:
            ConfigError: an unknown key (the nearest known one is named), or a bad value.
        """
        values = dict(values)
        version = values.pop("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"this configuration has schema_version {version!r}; this hf_pyao reads "
                f"{SCHEMA_VERSION}. Write it again with the version you run."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_name("PyAOConfig key", name, known)
        for name in ("modules", "recompute_modules"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    @classmethod
    def from_json_file(cls, path: str | Path) -> PyAOConfig:
        """Read a configuration from a JSON file.

        Raises:
            ConfigError: the file is missing, is no JSON object, or holds a bad key or value.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read the configuration file {str(path)!r}: {error.strerror or error}. "
                "Give the path of a JSON file such as PyAOConfig().to_json_file(path) writes."
            ) from error
        try:
            values = json.loads(content.decode("utf-8"))
        except ValueError as error:  # no text, or no JSON
            raise ConfigError(f"{str(path)!r} is not valid JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{str(path)!r} holds a JSON {type(values).__name__}; expected an object "
                'such as {"policy": "all"}.'
            )
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"in {str(path)!r}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values, with a ``schema_version``.

        Policy and codec instances are written by their ``name``.
        """
        values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("policy", "codec") and not isinstance(value, str):
                value = getattr(value, "name", type(value).__name__)
            values[field.name] = list(value) if isinstance(value, tuple) else value
        return values

    def to_json_file(self, path: str | Path) -> None:
        """Write the configuration to a JSON file that :meth:`from_json_file` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _check_int(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; expected a whole number of {unit}.")
    if value < 0:
        raise ConfigError(f"{name} is {value}; it cannot be negative (unit: {unit}).")


def _check_gib(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; expected a number of GiB (2**30 bytes), or None.")
    if value < 0:
        raise ConfigError(f"{name} is {value}; it cannot be negative (unit: GiB).")


def _check_names(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, tuple):
        raise ConfigError(f"{name} is {value!r}; expected a tuple of names, such as ('mlp_act',).")
    for entry in value:
        if not isinstance(entry, str) or not entry:
            raise ConfigError(f"{name} holds {entry!r}; expected non-empty names.")
