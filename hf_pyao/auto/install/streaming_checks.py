"""Which weights are to be streamed by the configuration, and what is refused of a model then."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.model.weights.places import has_streamed
from hf_pyao.model.weights.streamable import StreamableLayer
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.training_engines import (
    ENGINES,
    Sharded,
    engine_of_module,
    is_compiled,
    is_moved_by_accelerate,
)


@dataclass(frozen=True, kw_only=True)
class StreamingSettings:
    """Whether frozen weights are streamed."""

    value: int | str
    """``"off"``, ``"auto"``, or how many layers stay on the device."""
    label: str
    """How messages call the field."""
    embeddings: str = "off"
    """Whether embeddings and head are on the host: ``"on"``, ``"off"`` or ``"auto"``."""
    disk_path: str | os.PathLike[str] | None = None
    """A folder for the weights for which the host has no room; None: they are refused."""
    disk_label: str = "disk_path"
    """How messages call that field."""

    @classmethod
    def of(cls, config: PyAOConfig) -> StreamingSettings:
        """Return what *config* says."""
        return cls(
            value=config.stream_weights,
            label=config.label("stream_weights"),
            embeddings=config.stream_embeddings,
            disk_path=config.disk_path,
            disk_label=config.label("disk_path"),
        )

    @property
    def need_limit(self) -> bool:
        """True where the memory of the device decides what leaves it."""
        return self.value != "off" and "auto" in (self.value, self.embeddings)

    def as_planned(self, plan: Plan | None) -> StreamingSettings:
        """Return the same with the layers that stay under *plan*, where that was left to it."""
        if self.value != "auto" or plan is None or plan.facts.resident_blocks is None:
            return self
        return dataclasses.replace(self, value=plan.facts.resident_blocks)


def numbers_to_stream(layers: Sequence[StreamableLayer], num_resident: int) -> list[int]:
    """Return which layers are streamed where *num_resident* stay."""
    stay = resident_layers(len(layers), num_resident)
    return [number for number, each in enumerate(layers) if number not in stay and each.tensors]


def nothing_frozen(label: str, value: int | str, layers: Sequence[StreamableLayer]) -> ConfigError:
    """Return the error for *layers* of which nothing can be streamed."""
    left: Counter[str] = Counter()
    for layer in layers:
        left.update(layer.left_bytes)
    found = gib_by_reason(dict(left.most_common()))
    return ConfigError(
        f"{label} is {value}, and no layer has frozen weights that can be streamed. Their "
        f"parameters are: {found or 'none'}. Freeze the base model and train adapters (PEFT), or "
        f"give {label}='off'.",
        key="nothing-to-stream",
    )


def gib_by_reason(nbytes: Mapping[str, int]) -> str:
    """Return the bytes that stay on the device, each with its reason; nothing for none."""
    return ", ".join(f"{each / GIB:.3f} GiB {reason}" for reason, each in nbytes.items())


def no_room(label: str, num_layers: int, nbytes: int, room: int) -> ConfigError:
    """Return the error for *nbytes* of weights where the host has *room*."""
    return ConfigError(
        f"{label}: the weights of {num_layers} layers, embeddings and head that leave the device, "
        f"and what is read ahead of a disk, take {nbytes / GIB:.3f} GiB of host memory, and there "
        f"is room for {max(0, room) / GIB:.3f} GiB. Raise host_memory_gib if the machine has more, "
        "let more layers stay on the device, or give disk_path or stream_embeddings='off'.",
        key="streaming-host-memory",
    )


def check_model(model: nn.Module, label: str) -> None:
    """Refuse a model whose weights someone else moves, shards, compiles, or has not loaded."""
    for name, module in model.named_modules():
        what = ""
        unit_of = engine_of_module(module)
        if unit_of.shards is Sharded.WEIGHTS:
            where = name or type(model).__name__
            raise _not_whole(where, f"is divided among ranks, by {unit_of.name}", label)
        if is_compiled(module):
            what = "is compiled: compiled code reads weights by itself"
        elif is_moved_by_accelerate(module):
            what = "has a device map: Accelerate moves its weights by itself"
        elif has_streamed(module):
            what = "is streamed already, by another offloader"
        if what:
            raise ConflictError(
                f"{label}: {name or type(model).__name__!r} {what}. Load and attach the plain "
                f"model, or give {label}='off'.",
                key="streaming-compiled",
            )
    for name, parameter in model.named_parameters():
        what = ""
        if parameter.is_meta:
            what = "is on the meta device: it has no bytes yet"
        elif engine := next((each for each in ENGINES if each.has(parameter)), None):
            what = f"is divided among ranks, by {engine.name}"
        if what:
            raise _not_whole(name, what, label)


def _not_whole(name: str, what: str, label: str) -> ConflictError:
    return ConflictError(
        f"{label}: {name!r} {what}. Weights are streamed where each process has all of them on its "
        f"host: use DDP or one process, or give {label}='off'.",
        key="streaming-sharded",
    )
