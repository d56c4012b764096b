"""Engines and settings of the compatibility page, and what comes of each pair of them.

Each pair trains a tiny Llama for some steps, with hf_pyao and without, under the same engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.errors import PyAOError
from hf_pyao.training_engines import local_part
from tests.helpers import tiny_batch, tiny_model

NUM_LAYERS = 4
NUM_STEPS = 5
BACKEND = "aot_eager"

WORKS, GOES_ON, REFUSED = "works", "goes on", "refused"


# ---- engines -----------------------------------------------------------------------------------


def _plain(model: Any) -> nn.Module:
    return model


def _compiled(model: Any) -> nn.Module:
    whole: Any = torch.compile(model, backend=BACKEND)
    return whole


def _compiled_layers(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def _ddp(model: Any) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
    return model


def _fsdp1(model: Any) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )


Wrap = Callable[[Any], nn.Module]

ON_ONE_PROCESS: dict[str, Wrap] = {
    "one process": _plain,
    "`torch.compile` of the model": _compiled,
    "`torch.compile` of each layer": _compiled_layers,
}
"""By name: what makes of a model one that trains under the engine."""

ON_TWO_RANKS: dict[str, Wrap] = {
    "DistributedDataParallel": _ddp,
    "FSDP2 (`fully_shard`)": _fsdp2,
    "FSDP1": _fsdp1,
}
"""The same for engines that need a process group."""


# ---- settings ----------------------------------------------------------------------------------


def _metric(name: str) -> Callable[[Offloader], bool]:
    """Whether a figure of the engine, or of what is put on the model, is above 0."""

    def has_effect(offloader: Offloader) -> bool:
        figures = dict(offloader.metrics())
        for part in (offloader.head_loss, offloader.mlp_tiles, offloader.attention_groups):
            figures |= {} if part is None else part.metrics()
        return figures.get(name, 0.0) > 0

    return has_effect


def _is_predicted(offloader: Offloader) -> bool:
    """Whether the plan is of a recorded step."""
    plan = offloader.plan
    return plan is not None and plan.facts.kept_bound_bytes is None


def _runs_segments(offloader: Offloader) -> bool:
    """Whether segments of two layers ran again in backward."""
    lifecycle: Any = offloader._lifecycle
    return bool(getattr(lifecycle, "length", 0) == 2 and lifecycle.filled.num_runs > 0)


@dataclass(frozen=True)
class Setting:
    """One setting, and how to see that it does what it says."""

    fields: dict[str, Any]
    has_effect: Callable[[Offloader], bool]
    about: str
    """Stands in the lines of the log that are about it."""
    is_exact: bool = True
    """Whether the bits are those without hf_pyao."""
    is_frozen: bool = False
    """Whether the layers are frozen, embeddings and head trained."""


_MOVED = _metric("offloaded_bytes")

SETTINGS: dict[str, Setting] = {
    "`all`": Setting({"policy": "all"}, _MOVED, "offload"),
    "`modules`": Setting({"policy": "modules", "modules": ("mlp",)}, _MOVED, "modules"),
    "`budget`": Setting({"policy": "budget", "budget": 4}, _MOVED, "budget"),
    "`pyao`": Setting({"policy": "pyao"}, _MOVED, "pyao"),
    "`auto`": Setting({"policy": "auto", "device_memory_gib": 3.9e-4}, _is_predicted, "policy"),
    "`recompute_modules`": Setting(
        {"policy": "all", "recompute_modules": ("mlp_act",)}, _metric("recomputed_bytes"), "ecomput"
    ),
    "`checkpoint_every=2`": Setting(
        {"policy": "all", "checkpoint_every": 2}, _runs_segments, "again"
    ),
    "`head_loss`": Setting(
        {"policy": "all", "head_loss": "chunked"},
        _metric("head_loss_num_chunked"),
        "loss",
        is_exact=False,
    ),
    "`mlp_tiles=2`": Setting(
        {"policy": "all", "mlp_tiles": 2}, _metric("mlp_tiles_num_tiled"), "MLP", is_exact=False
    ),
    "`attention_groups=2`": Setting(
        {"policy": "all", "attention_groups": 2},
        _metric("attention_groups_num_groups"),
        "attention",
        is_exact=False,
    ),
    "`codec=int8`": Setting(
        {"policy": "all", "codec": "int8", "allow_lossy": True}, _MOVED, "codec", is_exact=False
    ),
    "`stream_weights=2`": Setting(
        {"policy": "all", "stream_weights": 2},
        lambda offloader: "stream" in offloader.describe(),
        "stream",
        is_frozen=True,
    ),
}
"""By name: the policies, then ``all`` with one more setting."""


# ---- what comes of them ------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of one setting under one engine."""

    engine: str
    setting: str
    answer: str
    """:data:`WORKS`, :data:`GOES_ON` or :data:`REFUSED`."""
    message: str
    """What the user is told; empty where it works."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(engine: str, wrap: Wrap, name: str, rank: int = 0) -> Outcome:
    """Train under *engine* with the setting *name*, and without hf_pyao.

    Raises:
        AssertionError: loss or gradients are not those without.
    """
    setting = SETTINGS[name]
    log, lines = logging.getLogger("hf_pyao"), _Lines()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        found, why_not = _train(wrap, setting, rank)
    except PyAOError as error:
        return Outcome(engine, name, REFUSED, str(error))
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
    expected, _ = _train(wrap, setting, rank, with_pyao=False)
    for index, (mine, own) in enumerate(zip(found, expected, strict=True)):
        is_same = torch.equal(mine, own) if setting.is_exact else _is_close(mine, own)
        assert is_same, f"{engine}, {name}: tensor {index} differs"
    if not why_not:
        return Outcome(engine, name, WORKS, "")
    told = " ".join(_about(setting, lines.lines))
    return Outcome(engine, name, GOES_ON, told or why_not)


def _is_close(mine: Tensor, own: Tensor) -> bool:
    """Whether *mine* is a gradient as a lossy codec of 8 bits would give it, or better."""
    return bool((mine - own).norm() <= 0.05 * own.norm() + 1e-6)


def _about(setting: Setting, lines: list[str]) -> list[str]:
    """Return the lines that are about *setting*, each once, without the first one of all."""
    found = dict.fromkeys(line for line in lines if setting.about in line)
    return [line for line in found if not line.startswith("hf_pyao offloads")]


def _train(
    wrap: Wrap, setting: Setting, rank: int, *, with_pyao: bool = True
) -> tuple[list[Tensor], str]:
    """Return the last loss and gradients, and how hf_pyao describes itself without the effect."""
    torch._dynamo.reset()
    model = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
    if setting.is_frozen:
        layers: Any = model.model.layers  # type: ignore[union-attr]
        layers.requires_grad_(False)
    wrapped = wrap(model)
    if not with_pyao:
        return _steps(wrapped, rank), ""
    config = PyAOConfig(min_bytes=0, host_memory_gib=0.1, profile_steps=2, **setting.fields)
    offloader: Offloader
    with attach(wrapped, config) as offloader:
        found = _steps(wrapped, rank)
        if setting.has_effect(offloader):
            return found, ""
        _, _, what = offloader.describe().partition("): ")
        return found, what.partition(", codec")[0]


def _steps(model: nn.Module, rank: int) -> list[Tensor]:
    for step in range(NUM_STEPS):
        model.zero_grad()
        torch.manual_seed(step)
        loss = model(**tiny_batch(rank), use_cache=False).loss
        loss.backward()
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    return [loss.detach().clone(), *(gradient.clone() for gradient in gradients)]
