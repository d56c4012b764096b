"""After the first micro-batches: which of the settings that were given did what they should have.

One function a setting, in :data:`EXPECTATIONS`. It gets what was seen (:class:`Seen`), and yields a
:class:`~hf_pyao.no_effect.NoEffect` if there is nothing that shows the setting's effect. Values
that were left open are not compared: nobody asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hf_pyao.config import PyAOConfig
from hf_pyao.metrics import MicroBatchStats, format_bytes
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_roles import resolve_selections
from hf_pyao.no_effect import NoEffect

NUM_FIRST = 2
"""Micro-batches after which the comparison is made: which layers run several times in a forward is
known from the second one on."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of an attachment after its first micro-batches."""

    config: PyAOConfig
    found: FoundLayers
    stats: MicroBatchStats
    """Figures of the last micro-batch."""
    saved_in: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By layer, the sub-modules in which autograd saved something."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the head loss, of tiles and of attention groups, as far as they are installed."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """By setting, what its part says of itself, such as why it stands back."""

    def name(self, setting: str) -> str:
        """Return a setting and its value, as the user gave it."""
        return f"{self.config.label(setting)}={getattr(self.config, setting)!r}"


Expectation = Callable[[Seen], Iterator[NoEffect]]


def modules_that_save(seen: Seen) -> Iterator[NoEffect]:
    """Each name in ``modules`` selects a sub-module in which autograd saves something."""
    label = seen.config.label("modules")
    for name in seen.config.modules if seen.config.policy == "modules" else ():
        selected = resolve_selections((name,), seen.found, field=label)
        if any(
            seen.saved_in.get(layer, frozenset()) & {*paths} for layer, paths in selected.items()
        ):
            continue
        saving = sorted({path for paths in seen.saved_in.values() for path in paths if path})
        yield NoEffect(
            setting=f"{name!r} in {label}",
            expected="what this part of a layer saves leaves the device",
            seen=f"it selects {sum(map(len, selected.values()))} modules, none of which saves a "
            "tensor",
            reason="its operations save nothing, or save what another module saved before",
            remedy=f"name modules that save, such as {', '.join(saving[:4]) or 'mlp_act'}",
        )


def recomputed_modules(seen: Seen) -> Iterator[NoEffect]:
    """Something of ``recompute_modules`` is recomputed."""
    stats = seen.stats
    if not seen.config.recompute_modules or stats.recomputed_bytes:
        return
    refused = "; ".join(
        f"{format_bytes(nbytes)} {reason!r}"
        for reason, nbytes in stats.not_recomputed_bytes.items()
    )
    yield NoEffect(
        setting=seen.name("recompute_modules"),
        expected="what these modules save is dropped and computed again in backward",
        seen="no tensor was recomputed",
        reason=refused or "autograd saves nothing in these modules that is not kept anyway",
        remedy="name other modules, such as 'pointwise', or drop the setting",
    )


def window(seen: Seen) -> Iterator[NoEffect]:
    """A window that is given bounds what is in flight: it is smaller than what moves in all."""
    window_bytes, moved_bytes = seen.config.window, seen.stats.offloaded_bytes
    if not isinstance(window_bytes, int) or not 0 < moved_bytes <= window_bytes:
        return
    yield NoEffect(
        setting=seen.name("window"),
        expected=f"no more than {format_bytes(window_bytes)} is in flight at once",
        seen=f"a micro-batch moves {format_bytes(moved_bytes)} in all",
        reason="the window is larger than everything, so that backward may bring all of it back "
        "before it needs it, and the device may hold it at once",
        remedy=f"give a window well below {format_bytes(moved_bytes)}, or 'layer'",
    )


def codec(seen: Seen) -> Iterator[NoEffect]:
    """A codec makes fewer bytes cross the link."""
    stats, given = seen.stats, seen.config.codec
    name = given if isinstance(given, str) else given.name
    moved_bytes = stats.offloaded_bytes + stats.reloaded_bytes
    if name == "identity" or not stats.offloaded_bytes or stats.link_bytes < moved_bytes:
        return
    yield NoEffect(
        setting=f"{seen.config.label('codec')}={name!r}",
        expected="fewer bytes cross the link than leave the device",
        seen=f"{format_bytes(stats.link_bytes)} crossed it for {format_bytes(moved_bytes)} moved",
        reason="the codec takes none of the tensors that move, and they were written as they are",
        remedy="drop it, or choose one for the tensors that move ('int8' takes floating ones)",
    )


def head_loss(seen: Seen) -> Iterator[NoEffect]:
    """The loss is computed without the logits."""
    mode = seen.config.head_loss
    is_idle = not seen.figures.get("head_loss_num_chunked", 1)
    if mode != "chunked" or not is_idle:
        return
    yield NoEffect(
        setting=seen.name("head_loss"),
        expected="the loss is computed without ever holding all logits",
        seen="no loss was computed in this way",
        reason=seen.notes.get("head_loss")
        or "the model's forward did not call its head, or got no labels: another library may have "
        "replaced it (use_liger_kernel does), or the loss is computed outside of the model",
        remedy="drop the setting, or what replaces the forward or computes the loss elsewhere",
    )


def attention_groups(seen: Seen) -> Iterator[NoEffect]:
    """Attention runs in groups, if a number of them is given."""
    groups = seen.config.attention_groups
    is_given = isinstance(groups, int) and groups > 1
    if not is_given or seen.figures.get("attention_groups_num_groups", 2) > 1:
        return
    yield NoEffect(
        setting=seen.name("attention_groups"),
        expected="flash attention runs for one group of samples and heads after the other",
        seen="no call of attention was divided",
        reason="another kernel than flash attention runs here, or a group would be too small",
        remedy="use attn_implementation='sdpa' with 16-bit tensors on a GPU, or drop the setting",
    )


def layers_that_run_again(seen: Seen) -> Iterator[NoEffect]:
    """Layers run again, if ``checkpoint_every`` is given."""
    refused = seen.notes.get("checkpoint_every")
    if not seen.config.checkpoint_every or not refused:
        return
    yield NoEffect(
        setting=seen.name("checkpoint_every"),
        expected="of the layers only inputs are saved, and they run again in backward",
        seen="a layer ran once, and what it saved was offloaded",
        reason=refused,
        remedy="change what the reason names, or drop the setting",
    )


EXPECTATIONS: tuple[Expectation, ...] = (
    modules_that_save,
    recomputed_modules,
    window,
    codec,
    head_loss,
    attention_groups,
    layers_that_run_again,
)
"""Settings that have an effect of their own beside offloading; the engine itself says where nothing
is offloaded (``engine/runtime/idle_warnings.py``)."""


def compare(seen: Seen) -> Iterator[NoEffect]:
    """Yield each setting that did not do what it should have."""
    for expectation in EXPECTATIONS:
        yield from expectation(seen)
