"""The engines that train a model, one row each: how each is recognised, and what works under it.

An engine distributes a model, shards it, or compiles it: DDP, FSDP, DeepSpeed, tensor parallelism,
``torch.compile``. None of them is imported here. A row says

- how it is recognised: by the classes of modules, by an attribute of parameters, by what a Trainer
  says of itself. No other file of the package knows these names;
- what it does with weights and with a micro-batch, as far as that matters to hf_pyao;
- which features of hf_pyao do not work under it as they do without: what is done instead, and the
  reason that the user is given.

The table of engines in LIMITS.md is written from the rows by ``python tests/engine_table.py``.

To add an engine, add a row to :data:`ENGINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import nn


class Feature(Enum):
    """What hf_pyao can do; its value is what the table in LIMITS.md calls it."""

    OFFLOADING = "offloading"
    PLANNING = '`policy="auto"`'
    RECOMPUTATION = "`recompute_modules`"
    SEGMENTS = "`checkpoint_every`"
    HEAD_LOSS = "`head_loss`"
    MLP_TILES = "`mlp_tiles`"
    STREAMED_WEIGHTS = "`stream_weights`"
    MICRO_BATCH = "`auto_micro_batch`"
    RUN_AGAIN = "a second try after out-of-memory"


class Answer(Enum):
    """What becomes of a feature under an engine; its value is the table's column."""

    WORKS = "works"
    FALLS_BACK = "falls back"
    REFUSED = "refused"


class Sharded(IntEnum):
    """What ranks divide among themselves; each includes those before."""

    NOTHING = 0
    OPTIMIZER = 1
    """The optimizer's states, and gradients where the engine can."""
    WEIGHTS = 2


@dataclass(frozen=True)
class Outcome:
    """What happens to one feature under one engine, where it does not simply work."""

    answer: Answer
    instead: str
    """What is done instead, in the words of the table."""
    reason: str = ""
    """Why, as a part of the message that the user gets."""


@dataclass(frozen=True, eq=False)
class TrainingEngine:
    """One engine."""

    name: str
    """As the table has it."""
    family: str = ""
    """As messages have it."""

    # ---- how it is recognised ------------------------------------------------------------------

    classes: Mapping[str, str] = field(default_factory=dict)
    """Name of a module's class, or of a base class of it -> package that it is from."""
    parameter_attribute: str = ""
    """What its parameters have, and no others."""
    trainer_attribute: str = ""
    """What is true of a Trainer that uses it."""
    zero_stages: frozenset[int] = frozenset()
    """ZeRO stages of Accelerate's DeepSpeed plugin that mean this engine."""
    source_path: str = ""
    """Part of the path of its source files, in tracebacks."""

    # ---- what it does --------------------------------------------------------------------------

    inner_attribute: str = ""
    """Attribute of its wrapper module that holds what is wrapped; empty if it wraps nothing."""
    class_prefix: str = ""
    """What it puts before the names of classes that it changes in place."""
    shards: Sharded = Sharded.NOTHING
    gathers_per_layer: bool = False
    """Whether weights are whole only while their own layer runs, forward or backward."""
    has_half_way_state: bool = False
    """Whether it keeps a state from forward to backward, so that a failed micro-batch cannot begin
    anew."""
    reduces_in_backward: bool = False
    """Whether a failed micro-batch cannot begin anew once gradients are being reduced."""
    outcomes: Mapping[Feature, Outcome] = field(default_factory=dict)
    """Features that do not simply work."""
    untried: frozenset[Feature] = frozenset()
    """Features that nobody has tried under it: no test covers them."""

    def wraps(self, module: nn.Module) -> bool:
        """Say whether *module* is of one of this engine's classes."""
        for cls in type(module).__mro__:
            package = self.classes.get(cls.__name__)
            if package is not None and package == package_of(cls):
                return True
        return False

    def has(self, parameter: torch.Tensor) -> bool:
        """Say whether *parameter* is one of this engine's."""
        return bool(self.parameter_attribute) and hasattr(parameter, self.parameter_attribute)

    def trains(self, trainer: Any) -> bool:
        """Say whether a transformers Trainer uses this engine."""
        if self.trainer_attribute and getattr(trainer, self.trainer_attribute, False):
            return True
        return bool(self.zero_stages) and zero_stage(trainer) in self.zero_stages

    def reason(self, part: Feature) -> str:
        """Return why *part* does not work under it as it does without; empty if it works."""
        outcome = self.outcomes.get(part)
        return "" if outcome is None else outcome.reason

    def refusal(self, part: Feature) -> str:
        """Return why *part* is refused under it; empty if it is not."""
        outcome = self.outcomes.get(part)
        return outcome.reason if outcome and outcome.answer is Answer.REFUSED else ""


# ---- the rows ----------------------------------------------------------------------------------


def _instead(part: Feature, instead: str, reason: str = "") -> dict[Feature, Outcome]:
    return {part: Outcome(Answer.FALLS_BACK, instead, reason)}


def _refused(part: Feature, instead: str, reason: str = "") -> dict[Feature, Outcome]:
    return {part: Outcome(Answer.REFUSED, instead, reason)}


_ALL = "keeps what fits by measured sizes, offloads the rest"
_ENDS = "the run ends with a message on all ranks"
_EACH_LAYER = "every layer's input is saved, as with 1"


def _divided_by(family: str) -> dict[Feature, Outcome]:
    instead = "its weights are divided among devices"
    return _refused(Feature.MICRO_BATCH, instead, f"{family} divides its weights")


def _half_way(family: str) -> dict[Feature, Outcome]:
    return _refused(
        Feature.RUN_AGAIN, _ENDS, f"{family} is half-way through it, and cannot begin anew"
    )


_STREAMS_NOTHING = _refused(
    Feature.STREAMED_WEIGHTS,
    "use DDP or one process, where each process has all weights",
    "the engine holds the weights itself",
)

PLAIN = TrainingEngine(name="none: one device, no wrapper")

DDP = TrainingEngine(
    name="DistributedDataParallel",
    family="DistributedDataParallel",
    classes={"DistributedDataParallel": "torch"},
    inner_attribute="module",
    reduces_in_backward=True,
    outcomes=_instead(
        Feature.RUN_AGAIN,
        "until gradients are reduced; then the run ends with a message on all ranks",
        "DistributedDataParallel has begun to reduce its gradients",
    ),
)

DATA_PARALLEL = TrainingEngine(
    name="`nn.DataParallel`",
    family="nn.DataParallel",
    classes={"DataParallel": "torch"},
    outcomes=_refused(
        Feature.OFFLOADING,
        "start one process per GPU",
        "the model is wrapped in nn.DataParallel, whose replicas share one set of hooks "
        "across threads and hold copies of the weights: offloading cannot be right there. "
        "Make one device visible (CUDA_VISIBLE_DEVICES=0), or start one process per "
        "device with `accelerate launch`.",
    ),
)

_FSDP_OUTCOMES = {
    **_instead(
        Feature.SEGMENTS,
        _EACH_LAYER,
        "FSDP gathers parameters for the backward of one layer at a time",
    ),
    **_instead(Feature.MLP_TILES, "MLPs that are units of their own are left alone"),
    **_STREAMS_NOTHING,
    **_divided_by("FSDP"),
    **_half_way("FSDP"),
}

FSDP1 = TrainingEngine(
    name="FSDP1 (`FullyShardedDataParallel`)",
    family="FSDP",
    classes={"FullyShardedDataParallel": "torch"},
    parameter_attribute="_fsdp_flattened",
    trainer_attribute="is_fsdp_enabled",
    inner_attribute="_fsdp_wrapped_module",
    shards=Sharded.WEIGHTS,
    gathers_per_layer=True,
    has_half_way_state=True,
    outcomes={
        **_FSDP_OUTCOMES,
        **_instead(
            Feature.PLANNING,
            _ALL,
            "FSDP1 holds the parameters of a unit in one flat tensor, of which no fake copy can be "
            "made; under FSDP2 (fully_shard; fsdp_version 2 in Accelerate) steps are recorded",
        ),
        **_instead(
            Feature.MLP_TILES,
            "MLPs that are units of their own are left alone; all, with `use_orig_params`",
            "FSDP1 has only a part of its weights on this rank (use_orig_params); use FSDP2",
        ),
    },
)

FSDP2 = TrainingEngine(
    name="FSDP2 (`fully_shard`)",
    family="FSDP",
    classes={"FSDPModule": "torch"},
    trainer_attribute="is_fsdp_enabled",
    class_prefix="FSDP",
    shards=Sharded.WEIGHTS,
    gathers_per_layer=True,
    has_half_way_state=True,
    outcomes=_FSDP_OUTCOMES,
)

DEEPSPEED = TrainingEngine(
    name="DeepSpeed without ZeRO",
    family="DeepSpeed",
    classes={"DeepSpeedEngine": "deepspeed"},
    zero_stages=frozenset({0}),
    inner_attribute="module",
    has_half_way_state=True,
    outcomes={**_STREAMS_NOTHING, **_half_way("DeepSpeed")},
)
"""The row of DeepSpeed's wrapper module too, which is of the same class with every ZeRO stage."""

ZERO_1_2 = TrainingEngine(
    name="DeepSpeed ZeRO-1 and ZeRO-2",
    family="DeepSpeed's ZeRO-1 or 2",
    zero_stages=frozenset({1, 2}),
    shards=Sharded.OPTIMIZER,
    has_half_way_state=True,
    outcomes={**_STREAMS_NOTHING, **_half_way("DeepSpeed")},
)

ZERO_3 = TrainingEngine(
    name="DeepSpeed ZeRO-3",
    family="DeepSpeed's ZeRO-3",
    parameter_attribute="ds_id",
    zero_stages=frozenset({3}),
    shards=Sharded.WEIGHTS,
    gathers_per_layer=True,
    has_half_way_state=True,
    outcomes={
        **_instead(
            Feature.RECOMPUTATION, "what it names is offloaded", "parameters gathered by ZeRO-3"
        ),
        **_instead(
            Feature.SEGMENTS, _EACH_LAYER, "ZeRO-3 gathers parameters for one layer at a time"
        ),
        **_instead(
            Feature.MLP_TILES,
            "MLPs are left alone",
            "ZeRO-3 gathers its weights for each call of each module inside",
        ),
        **_STREAMS_NOTHING,
        **_divided_by("DeepSpeed's ZeRO-3"),
        **_half_way("DeepSpeed"),
    },
)

DTENSOR = TrainingEngine(
    name="tensor parallelism (`DTensor` weights)",
    family="tensor parallelism",
    parameter_attribute="full_tensor",
    shards=Sharded.WEIGHTS,
    untried=frozenset(
        {Feature.RECOMPUTATION, Feature.SEGMENTS, Feature.MICRO_BATCH, Feature.RUN_AGAIN}
    ),
    outcomes={
        **_STREAMS_NOTHING,
        **_instead(Feature.PLANNING, _ALL),
        **_instead(Feature.HEAD_LOSS, "with a parallel head, the model's own loss"),
        **_instead(
            Feature.MLP_TILES,
            "MLPs are left alone",
            "its weights are sharded one by one (DTensor); shard whole layers",
        ),
    },
)

PIPELINE = TrainingEngine(
    name="pipeline stages (`torch.distributed.pipelining`)",
    family="a pipeline",
    source_path="/distributed/pipelining/",
    untried=frozenset(Feature) - {Feature.OFFLOADING, Feature.RUN_AGAIN},
    outcomes=_refused(
        Feature.RUN_AGAIN, _ENDS, "other ranks have had results of it, or wait for them"
    ),
)

DEVICE_MAP = TrainingEngine(
    name="a device map (Accelerate's hooks)",
    family="a device map of several devices",
    trainer_attribute="is_model_parallel",
    untried=frozenset(Feature) - {Feature.MLP_TILES, Feature.MICRO_BATCH},
    outcomes={
        **_instead(Feature.MLP_TILES, "MLPs whose weights Accelerate moves are left alone"),
        **_divided_by("a device map of several devices"),
    },
)

COMPILED = TrainingEngine(
    name="`torch.compile`",
    family="torch.compile",
    classes={"OptimizedModule": "torch"},
    inner_attribute="_orig_mod",
    untried=frozenset({Feature.MICRO_BATCH, Feature.RUN_AGAIN}),
    outcomes={
        **_instead(
            Feature.PLANNING,
            "layers that are compiled one by one are planned; else it " + _ALL,
        ),
        **_instead(Feature.RECOMPUTATION, "what it names is offloaded"),
        **_instead(Feature.SEGMENTS, "compiled layers run once and are offloaded"),
        **_instead(Feature.HEAD_LOSS, "with a model compiled as a whole, the model's own loss"),
        **_instead(Feature.MLP_TILES, "only MLPs that are compiled by themselves are tiled"),
        **_refused(
            Feature.STREAMED_WEIGHTS,
            "leave the model uncompiled, or its weights on the device",
            "compiled code holds the weights that it was compiled with",
        ),
    },
)

ENGINES = (
    *(PLAIN, DDP, FSDP2, FSDP1, DEEPSPEED, ZERO_1_2, ZERO_3),
    *(DTENSOR, PIPELINE, DEVICE_MAP, COMPILED, DATA_PARALLEL),
)
"""All rows, in the order of the table in LIMITS.md."""

_BY_CLASS = {name: engine for engine in ENGINES for name in engine.classes}


# ---- which row it is ---------------------------------------------------------------------------


def engine_of_module(module: nn.Module) -> TrainingEngine:
    """Return the engine that *module* is a wrapper or a unit of; :data:`PLAIN` if of none."""
    for cls in type(module).__mro__:
        engine = _BY_CLASS.get(cls.__name__)
        if engine is not None and engine.classes[cls.__name__] == package_of(cls):
            return engine
    return PLAIN


def engine_of_trainer(trainer: Any) -> TrainingEngine:
    """Return the engine that a transformers Trainer says it uses; :data:`PLAIN` if none.

    A Trainer says nothing of DDP, which needs no choice of its own here.
    """
    return next((engine for engine in ENGINES if engine.trains(trainer)), PLAIN)


def engine_of_arguments(args: object) -> TrainingEngine:
    """Return the engine that training arguments ask for; :data:`PLAIN` if they tell of none.

    Of FSDP they may not tell the version, whose rows shard alike.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None:
        return _engine_of_stage(int(plugin.zero_stage))
    return FSDP2 if getattr(args, "fsdp", None) else PLAIN


def _engine_of_stage(stage: int) -> TrainingEngine:
    return next((engine for engine in ENGINES if stage in engine.zero_stages), PLAIN)


def deepspeed_plugin(trainer: Any) -> Any:
    """Return Accelerate's plugin for DeepSpeed; None without it."""
    return getattr(trainer.accelerator.state, "deepspeed_plugin", None)


def zero_stage(trainer: Any) -> int | None:
    """Return the stage of ZeRO that a Trainer uses; None without DeepSpeed."""
    plugin = deepspeed_plugin(trainer)
    return None if plugin is None else int(plugin.zero_stage)


def package_of(cls: type) -> str:
    """Return the top-level package that *cls* is from."""
    return cls.__module__.partition(".")[0]


# ---- weights and modules under an engine -------------------------------------------------------


def whole_shape(weight: torch.Tensor) -> torch.Size | None:
    """Return the shape that a sharded *weight* has when it is whole; None if it is not sharded."""
    if DTENSOR.has(weight):
        return weight.shape
    return getattr(weight, "ds_shape", None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of *tensor*: its shard, or all of what is not sharded.

    A copy of what FSDP2 has sharded has its shard where ZeRO-3 has it.
    """
    part: torch.Tensor | None = getattr(tensor, "ds_tensor", None)
    if part is not None:
        return part
    if not DTENSOR.has(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def stays_whole(parameter: torch.Tensor) -> bool:
    """Say whether ZeRO-3 has all of *parameter* on each rank, beside the shards."""
    return ZERO_3.has(parameter) and bool(getattr(parameter, "ds_persist", False))


def compiled_inner(module: nn.Module) -> nn.Module | None:
    """Return what ``torch.compile(module)`` has wrapped; None if *module* is no such wrapper."""
    inner = getattr(module, COMPILED.inner_attribute, None)
    return inner if isinstance(inner, nn.Module) else None


def is_compiled_in_place(module: nn.Module) -> bool:
    """Say whether ``module.compile()`` was called, or ``module.forward`` is a compiled function."""
    attributes = module.__dict__
    if attributes.get("_compiled_call_impl") is not None:
        return True
    forward = attributes.get("forward")
    if forward is None or COMPILED.inner_attribute in module._modules:  # torch.compile's wrapper
        return False
    # torch.compiler.disable leaves the first attribute too.
    is_wrapped = hasattr(forward, "_torchdynamo_orig_callable")
    return is_wrapped and not getattr(forward, "_torchdynamo_disable", False)


def is_compiled(module: nn.Module) -> bool:
    """Say whether *module* was compiled, in place or in a wrapper."""
    return hasattr(module, COMPILED.inner_attribute) or is_compiled_in_place(module)


def compiled_part(model: nn.Module) -> nn.Module | None:
    """Return a part of *model* that was compiled, or the model; None if nothing was.

    It is asked before each forward, hence written out: a millisecond for some thousand modules.
    """
    waiting = [model]
    while waiting:
        module = waiting.pop()
        children = module._modules
        if is_compiled_in_place(module) or COMPILED.inner_attribute in children:
            return module
        waiting.extend(child for child in children.values() if child is not None)
    return None


def is_moved_by_accelerate(module: nn.Module) -> bool:
    """Say whether Accelerate's hooks are on *module*, which move its weights for each call."""
    return hasattr(module, "_hf_hook")
