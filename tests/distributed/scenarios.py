"""What the two ranks run: every way to shard and to train, each with and without hf_pyao."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

WORLD_SIZE = 2
NUM_LAYERS = 3

LAYER_CLASSES = {"opt": "OPTDecoderLayer", "llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}
"""Model -> class of its decoder layers."""

LAYER_PATHS = {"opt": "model.decoder.layers", "llama": "model.layers", "gpt2": "transformer.h"}
"""Model -> path of the list of its decoder layers."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One comparison of a run with hf_pyao against the same run without it."""

    wrapper: str
    """``fsdp2``, ``fsdp1``, ``fsdp1_flat`` (torch's own), ``accelerate_ddp``, ``accelerate_fsdp2``
    or ``trainer``."""
    model: str = "opt"
    precision: str = "fp32"
    """``fp32``; ``policy``: the wrapper's mixed precision in bf16; ``autocast``: to bf16."""
    tuning: str = "full"
    """``full``; ``lora`` (peft); ``frozen_below``: the lower half does not train, so that nothing
    is saved there; ``frozen_inside``: a layer in the middle does not train, whose weights are saved
    all the same, since gradients pass through it."""
    option: str = ""
    """``resident`` (no resharding after forward), ``accumulate`` (two micro-batches a step),
    ``two_forwards`` (both before one backward), ``recompute`` (beside offloading),
    ``checkpointing`` (by the model), ``checkpoint_wrapper`` (modules that Accelerate puts around
    each layer, or into it), or ``checkpoint_every`` (segments of two layers, where parameters are
    not gathered layer by layer)."""
    attach: str = "after"
    """``before`` or ``after`` wrapping."""
    keep_last_layers: int = 1
    window: str | int = "layer"

    @property
    def reference(self) -> Scenario:
        """What is the same for all scenarios that compare with one plain run."""
        return replace(self, attach="after", keep_last_layers=1, window="layer")

    @property
    def name(self) -> str:
        """Test id; unique."""
        parts = [self.wrapper, self.model, self.precision, self.tuning, self.option, self.attach]
        return "-".join([*filter(None, parts), f"keep{self.keep_last_layers}"])

    @property
    def offloaded_layers(self) -> list[str]:
        """Layers that must offload: those that save anything, but for the last ones."""
        # FSDP1's root unit trains, and so, for autograd, do the frozen embeddings within it.
        saves_nothing = self.tuning == "frozen_below" and not self.wrapper.startswith("fsdp1")
        first = NUM_FROZEN_LAYERS if saves_nothing else 0
        indices = range(first, NUM_LAYERS - self.keep_last_layers)
        if self.option == "checkpoint_every":
            is_gathered = self.wrapper.endswith(("fsdp2", "fsdp1", "fsdp1_flat"))
            last = indices.stop - indices.stop % 2 if self.keep_last_layers else indices.stop
            indices = range(first, last, 1 if is_gathered else 2)
        # Peft puts the model inside two of its own; names are those of the model inside.
        return [f"{LAYER_PATHS[self.model]}.{index}" for index in indices]


NUM_FROZEN_LAYERS = 1
"""The lower half, rounded down so that a layer is left to offload when the last one is kept."""


ATTACHMENTS: list[dict[str, Any]] = [
    {"attach": "before", "keep_last_layers": 1, "window": 4096},
    {"attach": "after", "keep_last_layers": 0},
    {"attach": "before", "keep_last_layers": 0},
    {"attach": "after", "keep_last_layers": 1, "window": 4096},
]
"""Before and after wrapping, with the last layer kept or not, with both kinds of window."""


def crossed(scenario: Scenario) -> list[Scenario]:
    """Attach in all four ways."""
    return [replace(scenario, **attachment) for attachment in ATTACHMENTS]


def in_turn(*scenarios: Scenario) -> list[Scenario]:
    """Attach in one of the four ways each, taking turns."""
    return [
        replace(scenario, **ATTACHMENTS[index % len(ATTACHMENTS)])
        for index, scenario in enumerate(scenarios)
    ]


FSDP2_MATRIX = [
    Scenario(wrapper="fsdp2", model=model, precision=precision, tuning=tuning)
    for model in LAYER_CLASSES
    for precision in ("fp32", "policy", "autocast")
    for tuning in ("full", "lora", "frozen_below")
]
"""Every model with every precision and every way to tune."""

FSDP2 = [
    *crossed(FSDP2_MATRIX[0]),
    *in_turn(
        *FSDP2_MATRIX[1:],
        Scenario(wrapper="fsdp2", model="opt", precision="autocast", tuning="frozen_inside"),
        Scenario(wrapper="fsdp2", model="llama", precision="policy", tuning="frozen_inside"),
        Scenario(wrapper="fsdp2", model="llama", option="resident"),
        Scenario(wrapper="fsdp2", model="opt", precision="policy", option="accumulate"),
        Scenario(wrapper="fsdp2", model="llama", precision="autocast", option="two_forwards"),
        Scenario(wrapper="fsdp2", model="opt", option="checkpointing"),
        Scenario(wrapper="fsdp2", model="llama", precision="policy", option="checkpointing"),
        Scenario(wrapper="accelerate_fsdp2", model="opt"),
        Scenario(wrapper="accelerate_fsdp2", model="llama", precision="policy", tuning="lora"),
        Scenario(wrapper="fsdp2", model="llama", precision="policy", option="recompute"),
        Scenario(wrapper="fsdp2", model="opt", option="checkpoint_every"),
        Scenario(wrapper="fsdp2", model="llama", precision="policy", option="checkpoint_every"),
        Scenario(wrapper="accelerate_fsdp2", model="llama", option="checkpoint_every"),
    ),
    *crossed(Scenario(wrapper="accelerate_fsdp2", model="llama", option="checkpoint_wrapper"))[:2],
]

FSDP1 = [
    *in_turn(
        Scenario(wrapper="fsdp1", model="opt"),
        Scenario(wrapper="fsdp1", model="llama", precision="policy"),
        Scenario(wrapper="fsdp1", model="gpt2", precision="autocast", tuning="lora"),
        Scenario(wrapper="fsdp1", model="llama", precision="policy", tuning="frozen_below"),
        Scenario(wrapper="fsdp1_flat", model="opt", precision="autocast"),
        Scenario(wrapper="fsdp1_flat", model="gpt2", precision="policy"),
        Scenario(wrapper="fsdp1", model="llama", precision="policy", option="checkpoint_every"),
        Scenario(wrapper="fsdp1_flat", model="opt", option="checkpoint_every"),
    ),
    # Frozen and cast in a unit of its own: nothing but its shape tells such a weight.
    *crossed(Scenario(wrapper="fsdp1", precision="autocast", tuning="frozen_inside"))[:2],
    *crossed(
        Scenario(wrapper="fsdp1_flat", model="llama", precision="autocast", tuning="frozen_inside")
    )[:2],
]

DDP = in_turn(
    Scenario(wrapper="accelerate_ddp", model="opt"),
    Scenario(wrapper="accelerate_ddp", model="gpt2", precision="autocast", tuning="lora"),
    Scenario(wrapper="accelerate_ddp", model="llama", option="accumulate"),
    Scenario(wrapper="accelerate_ddp", model="llama", precision="autocast"),
    Scenario(wrapper="accelerate_ddp", model="opt", precision="autocast", tuning="frozen_below"),
    Scenario(wrapper="accelerate_ddp", model="gpt2", precision="autocast", tuning="frozen_inside"),
    Scenario(wrapper="accelerate_ddp", model="opt", option="checkpoint_every"),
    Scenario(
        wrapper="accelerate_ddp",
        model="llama",
        precision="autocast",
        tuning="lora",
        option="checkpoint_every",
    ),
)

TRAINER = [
    Scenario(wrapper="trainer", model="opt", option="accumulate", keep_last_layers=0),
    Scenario(wrapper="trainer", model="llama", precision="autocast", tuning="lora"),
]

SCENARIOS = [*FSDP2, *FSDP1, *DDP, *TRAINER]


def few(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return one of *scenarios* for each way to share out a model."""
    ways = "accelerate_ddp", "fsdp1", "fsdp2"
    # The later ones differ in more from the defaults.
    return [next(each for each in reversed(scenarios) if each.wrapper == way) for way in ways]


GROUPS = {"default": few(SCENARIOS)}
GROUPS["thorough"] = [scenario for scenario in SCENARIOS if scenario not in GROUPS["default"]]
"""What runs by default, and what CI runs besides."""
