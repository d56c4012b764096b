"""When effects are looked for: at attachment, after the first micro-batches, and at the end."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_pyao.auto.effects.expectations import NUM_FIRST, Seen, compare
from hf_pyao.auto.effects.surroundings import adapters_without_gradients, inside_of_checkpoints
from hf_pyao.auto.install.installed_parts import InstalledParts
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.no_effect import EffectLedger


def watch_effects(
    effects: EffectLedger, config: PyAOConfig, model: nn.Module, compare: Callable[[], object]
) -> None:
    """Note what *model* leaves without effect; call *compare* after the first micro-batches."""
    facts = [*adapters_without_gradients(model)]
    if config.policy != "off":
        facts += inside_of_checkpoints(model)
    for fact in facts:
        effects.note(fact)
    effects.compare_after(NUM_FIRST, compare)


def compare_effects(
    config: PyAOConfig, model: nn.Module, lifecycle: Lifecycle, installed: InstalledParts
) -> None:
    """Note each setting that has shown no effect so far."""
    notes = {"checkpoint_every": lifecycle.refused}
    figures: dict[str, float] = {}
    for part in installed.of_levers():
        figures |= part.metrics()
    if installed.head_loss is not None:
        notes["head_loss"] = "; ".join(installed.head_loss.said)
    seen = Seen(
        config=config,
        found=find_layers(model, config.layers),
        stats=lifecycle.engine.figures.last or MicroBatchStats(),
        saved_in=lifecycle.saved_in(),
        figures=figures,
        notes=notes,
    )
    for fact in compare(seen):
        lifecycle.engine.effects.note(fact, is_said=fact.reason in notes.values())
