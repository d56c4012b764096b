"""``Plan``: what becomes of each slot, as a document: computed, or written by hand."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_pyao.config import SETTINGS
from hf_pyao.config_checks import LEAST_LAYERS
from hf_pyao.engine.runtime.slots import ANCHOR, SHARED
from hf_pyao.errors import ConfigError, nearest, unknown_name
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan_facts import NO_FACTS, PlanError, PlanFacts, facts_of_version_1
from hf_pyao.plan.documents.schema import JsonDocument
from hf_pyao.settings.removed import REMOVED_SETTINGS, removed
from hf_pyao.text import echo

SCHEMA_VERSION = 2
"""Version of the JSON of a :class:`Plan`. Version 1, which had the facts among the figures, is read
too; the next release reads version 2 alone."""

KIND = "plan"

KEEP = "keep"
OFFLOAD = "offload"
RECOMPUTE = "recompute"
ACTIONS = (KEEP, OFFLOAD, RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """What becomes of one slot."""

    name: str
    """As :attr:`hf_pyao.engine.runtime.slots.Slot.name`: ``mlp.act_fn:0``."""
    action: str
    """One of :data:`ACTIONS`."""
    layers: list[int] | None = None
    """Positions of the layers that this holds for; None: all."""
    codec: str | None = None
    """How it is written, where it is offloaded; None: as the configuration says."""
    otherwise: str = OFFLOAD
    """What becomes of it where it cannot be recomputed: ``offload`` or ``keep``."""
    rebuilt_from: list[str] = field(default_factory=list)
    """Slots that must be there to recompute it, where that is known."""
    nbytes: int | None = None
    """Its size when the plan was made; a larger one is refused."""
    reason: str = ""
    """Why, in words."""


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """What a step is predicted to come to under a plan that was looked at."""

    name: str
    step_ms: float
    peak_bytes: int
    """On the device, for copies that are always late."""
    offloaded_bytes: int
    rebuild_ms: float
    """What is computed again."""
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class LeverSetting:
    """Settings of what changes the step itself that were looked at, and their best plan."""

    levers: dict[str, Any]
    """As :attr:`Plan.levers`."""
    words: str
    """The same in words."""
    step_ms: float | None = None
    """None: it was not recorded; :attr:`note` says why."""
    peak_bytes: int | None = None
    """On the device."""
    host_bytes: int | None = None
    """Most on the host."""
    fits: bool = False
    is_chosen: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan(JsonDocument):
    """What becomes of what the layers of one model save.

    Raises:
        PlanError: an action or a codec is unknown, a slot is named twice for a layer, slots are
            recomputed from each other.
    """

    called: ClassVar[str] = "the plan"
    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    source: str = "written by hand"
    """Who made it."""
    model: dict[str, Any] = field(default_factory=dict)
    """What tells the model, see :func:`hf_pyao.model.map.model_identity.identity_of`; empty:
    any model."""
    slots: list[PlannedSlot]
    otherwise: str = OFFLOAD
    """What becomes of slots that are not named: ``offload`` or ``keep``."""
    recomputed_modules: list[str] = field(default_factory=list)
    """Sub-modules of which all slots that are not named are recomputed, those that they save and
    those that they make. Their matrix products and attention may run again for that."""
    replayed_modules: list[str] = field(default_factory=list)
    """Further sub-modules whose matrix products and attention may run again, on the way to a slot
    that is recomputed; ``""`` is the layer itself."""
    facts: PlanFacts = NO_FACTS
    """Numbers that steer the run that follows the plan."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further numbers to show: predictions of other plans, corrections, measured times. A run that
    follows the plan reads none of them."""
    front: list[PlanPoint] = field(default_factory=list)
    """What else was looked at: plans that need no solver, and the fastest at other peaks."""
    levers: dict[str, Any] = field(default_factory=dict)
    """What changes the step itself, by field of the configuration (``checkpoint_every``,
    ``save_attention``, ``mlp_tiles``, ``attention_groups``, ``head_loss``); what is absent is as
    configured."""
    num_checkpointed: int | None = None
    """How many of the first layers run again as a whole, where ``checkpoint_every`` is 1; None:
    all. The slots above are those of the others."""
    levers_reason: str = ""
    """Why these, in words."""
    lever_settings: list[LeverSetting] = field(default_factory=list)
    """Which were looked at."""

    def __post_init__(self) -> None:
        """Check that it does not contradict itself; see the class docstring."""
        for action in (self.otherwise, *(slot.otherwise for slot in self.slots)):
            if action not in (OFFLOAD, KEEP):
                raise PlanError(
                    f"otherwise is {echo(action)}; expected 'offload' or 'keep'.",
                    key="plan-invalid",
                )
        self._check_slots()
        self._check_order()
        self._check_levers()

    def _check_levers(self) -> None:
        """Refuse levers that are unknown, or have a value that the configuration would refuse."""
        for name, value in self.levers.items():
            if name in REMOVED_SETTINGS or removed(name, value):
                continue  # of an earlier version: who is to follow it refuses it
            if name not in Levers.names():
                raise PlanError(
                    f"the plan's levers: {unknown_name('lever', name, Levers.names())}",
                    key="plan-invalid",
                )
            try:
                SETTINGS[name].kind.check(f"{name} in the plan's levers", value)
            except ConfigError as error:
                raise PlanError(f"{error}", key="plan-invalid") from error
        every = self.levers.get("checkpoint_every")
        for name, least in LEAST_LAYERS.items():
            if self.levers.get(name) and every is not None and every < least:
                raise PlanError(
                    f"the plan's levers contradict each other: {name} is true, which takes a "
                    f"checkpoint_every of {least} or more, and that is {every}. Make the plan "
                    "anew.",
                    key="plan-invalid",
                )

    def _check_slots(self) -> None:
        """Refuse unknown actions, codecs and forms of names, and slots that are named twice."""
        named: set[tuple[str, int | None]] = set()
        for slot in self.slots:
            if slot.action not in ACTIONS:
                raise PlanError(
                    f"slot {echo(slot.name)}: {unknown_name('action', slot.action, ACTIONS)}",
                    key="plan-invalid",
                )
            if slot.codec is not None:
                try:
                    SETTINGS["codec"].kind.check("its codec", slot.codec)
                except ConfigError as error:
                    raise PlanError(
                        f"slot {echo(slot.name)}: {error}", key="plan-invalid"
                    ) from error
            _, colon, number = slot.name.rpartition(":")
            if not colon or not number.removeprefix(ANCHOR).removeprefix(SHARED).isdigit():
                raise PlanError(
                    f"slot {echo(slot.name)}: expected a sub-module and a number, such as "
                    "'mlp.act_fn:0', as `describe` and reports name them.",
                    key="plan-invalid",
                )
            for layer in slot.layers if slot.layers is not None else [None]:
                if (slot.name, layer) in named:
                    where = "" if layer is None else f" for layer {layer}"
                    raise PlanError(
                        f"slot {echo(slot.name)} is named twice{where}.", key="plan-invalid"
                    )
                named.add((slot.name, layer))

    def _check_order(self) -> None:
        """Refuse slots that are recomputed from each other."""
        named = {layer for slot in self.slots for layer in slot.layers or ()}
        for layer in (None, *sorted(named)):
            of_layer = {slot.name: slot for slot in self.slots if slot.layers is None}
            of_layer |= {s.name: s for s in self.slots if layer in (s.layers or ())}
            recomputed = {
                slot.name: slot.rebuilt_from
                for slot in of_layer.values()
                if slot.action == RECOMPUTE
            }
            try:
                graphlib.TopologicalSorter(recomputed).prepare()
            except graphlib.CycleError as error:
                circle = " <- ".join(map(str, error.args[1]))
                raise PlanError(
                    f"slots are recomputed from each other: {circle}. Offload or keep one of them.",
                    key="plan-invalid",
                ) from error

    @property
    def title(self) -> str:
        """A heading."""
        return f"Plan, {self.source}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the plan") -> Plan:
        """Read plain values.

        Raises:
            ReportError: another schema version, an unknown or missing key, or a value of another
                type, each by name.
            PlanError: it contradicts itself.
        """
        if values.get("kind", KIND) != KIND:
            raise PlanError(
                f"{where} has kind {echo(values.get('kind'))}; expected 'plan'.", key="file-kind"
            )
        try:
            return super().from_dict(_as_version_2(values), where)
        except PlanError as error:
            if where == cls.called:
                raise
            raise PlanError(f"{where}: {error}", key="plan-invalid") from error

    def numbers(self) -> dict[str, float]:
        """Return the facts that are known, then the figures, by name."""
        return {**self.facts.known(), **self.figures}

    def check_model(
        self, identity: Mapping[str, Any], layers: Sequence[tuple[str, Sequence[str]]]
    ) -> None:
        """Refuse a model that the plan was not made for.

        Args:
            identity: what tells the model.
            layers: qualified name and sub-modules' paths of each layer, in forward order.

        Raises:
            PlanError: says what differs, and what to do.
        """
        remedy = "Make a plan for this model, or leave `model` out of a plan that is to fit any."
        for key, expected in self.model.items():
            if key in identity and identity[key] != expected:
                raise PlanError(
                    f"the plan was made for another model: its {key} is {echo(expected)}, and here "
                    f"it is {echo(identity[key])}. {remedy}",
                    key="plan-other-model",
                )
        known = {path for _, paths in layers for path in ("", *paths)}
        for name in [
            *(s.name.rpartition(":")[0] for s in self.slots),
            *self.recomputed_modules,
            *self.replayed_modules,
        ]:
            if name not in known:
                hint = nearest(name, sorted(known)) or "."
                raise PlanError(
                    f"the plan names the sub-module {echo(name)}, which no layer of this model "
                    f"has{hint} {remedy}",
                    key="plan-other-model",
                )
        for slot in self.slots:
            for layer in slot.layers or ():
                if not 0 <= layer < len(layers):
                    raise PlanError(
                        f"the plan names layer {layer} for slot {echo(slot.name)}, and this model "
                        f"has {len(layers)} layers. {remedy}",
                        key="plan-other-model",
                    )


def _as_version_2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document of version 1 as one of version 2; any other as it is."""
    version, figures = values.get("schema_version"), values.get("figures", {})
    if version != 1 or isinstance(version, bool) or "facts" in values:
        return values
    if not isinstance(figures, Mapping):
        return {**values, "schema_version": SCHEMA_VERSION}
    facts, others = facts_of_version_1(figures)
    return {**values, "schema_version": SCHEMA_VERSION, "facts": facts, "figures": others}
