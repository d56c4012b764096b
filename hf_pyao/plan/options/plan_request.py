"""What a planner gets: the step of a profile, and what a configuration binds and leaves free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.policy import POINTWISE
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.hardware.speeds import DiskModel, LinkModel
from hf_pyao.plan.options.chosen_levers import FIXED, LeverRoom
from hf_pyao.plan.options.plan_levers import GivenLevers
from hf_pyao.plan.solve.coding import Coding
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import Planner
from hf_pyao.plan.step.disk_share import DiskShare
from hf_pyao.plan.step.ends_on_host import with_ends_on_host
from hf_pyao.plan.step.step_program import StepProgram


class HostAndDisk(Protocol):
    """The memory below the device in a run, as far as plans ask: ``auto/plans/host_and_disk.py``.

    What it says changes while the run goes on.
    """

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk, for saved tensors or for weights."""
        ...

    @property
    def host_bytes(self) -> int:
        """Host memory that saved tensors and the streamed weights of layers may take together."""
        ...

    @property
    def disk_bytes(self) -> int:
        """Most bytes of saved tensors on disks."""
        ...

    def disk(self) -> DiskModel | None:
        """Return speeds of disks; None while they are not known: nothing is planned to go there."""
        ...

    @property
    def placed_weights(self) -> DiskShare | None:
        """The streamed weights that lie on a disk and stay there; None: none do yet."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What binds the solver. What a configuration leaves open is free."""

    min_bytes: int
    window_bytes: int | None
    keep_last_layers: int
    may_shrink_window: bool
    """The window was left open."""
    may_keep_fewer: bool
    levers: Levers = NO_LEVERS
    """What changes the step itself."""
    room: LeverRoom = FIXED
    """Which of them may be chosen."""
    recompute_modules: tuple[str, ...] = ()
    """Sub-modules of a layer whose slots are recomputed, by path, and ``pointwise``."""
    codec: str = "identity"
    allow_lossy: bool = False
    host_limit_bytes: float = math.inf
    """Most bytes on the host where nothing runs; in a run :attr:`below` says it."""
    allocator: AllocatorSettings | None = None
    """Of the device's caching allocator; None: what is allocated decides what fits."""
    window: LinkContext | None = dataclasses.field(default=None, compare=False)
    """That of the link; other models may join and leave it at any time."""
    below: HostAndDisk | None = dataclasses.field(default=None, compare=False)
    """Host memory, and the disk below it, in a run; None: nothing runs."""
    stream_weights: int | str = "off"
    """As ``PyAOConfig.stream_weights``, where frozen weights can be streamed."""
    ends_on_host: bool = False
    """The frozen weights of embeddings and head are on the host."""

    @property
    def window_now_bytes(self) -> int | None:
        """The window that a plan is made for: where the link is shared, the one that holds."""
        if self.window is not None and self.window.is_shared:
            return self.window.limit_bytes
        return self.window_bytes

    @property
    def may_set_window(self) -> bool:
        """True if a plan may change the window: it is open, and no other model's too."""
        return self.may_shrink_window and not (self.window is not None and self.window.is_shared)

    @property
    def host_limit_now_bytes(self) -> float:
        """Most bytes that a plan may put on the host, and on the disk below it.

        Streamed weights of layers are among them. A disk counts once its speeds are known.
        """
        if self.below is None:
            return self.host_limit_bytes
        disk = self.below.disk()
        takes_saved = disk is not None and disk.takes_saved
        return self.below.host_bytes + (self.below.disk_bytes if takes_saved else 0)

    def on(
        self,
        *,
        recomputed_paths: tuple[str, ...] = (),
        host_limit_bytes: float = math.inf,
        window: LinkContext | None = None,
        below: HostAndDisk | None = None,
        allocator: AllocatorSettings | None = None,
    ) -> PlanRequest:
        """Return the same for one model on one machine.

        Args:
            recomputed_paths: what ``recompute_modules`` stand for in a layer.
            host_limit_bytes: most bytes on the host.
            window: that of the link; None: none that other models share.
            below: as the attribute.
            allocator: settings of the device's caching allocator; None: it has none.
        """
        return dataclasses.replace(
            self,
            recompute_modules=recomputed_paths,
            host_limit_bytes=host_limit_bytes,
            window=window,
            below=below,
            allocator=allocator,
        )

    @classmethod
    def of_config(
        cls,
        config: PyAOConfig,
        *,
        levers: GivenLevers | None = None,
        **more: Any,
    ) -> PlanRequest:
        """Return what *config* binds.

        Args:
            config: the configuration.
            levers: its levers; None: they are read from it.
            more: arguments of :meth:`on`.
        """
        given = GivenLevers.of(config) if levers is None else levers
        effective = config.effective()
        configured = effective.window
        codec = config.codec if isinstance(config.codec, str) else config.codec.name
        bound = cls(
            min_bytes=int(config.min_bytes),
            window_bytes=None if isinstance(configured, str) else configured,
            keep_last_layers=effective.keep_last_layers,
            levers=given.levers,
            room=_room_of(config, given),
            may_shrink_window="window" in config.left_open,
            may_keep_fewer="keep_last_layers" in config.left_open,
            codec=codec,
            allow_lossy=config.allow_lossy,
        )
        return bound.on(**more)

    def planner_of(
        self,
        program: StepProgram,
        times_ms: Sequence[float],
        link: LinkModel,
        dtypes: Mapping[str, str],
        **more: Any,
    ) -> Planner:
        """Return the planner for a step with these times.

        Args:
            program: the step.
            times_ms: of each operation.
            link: its speeds.
            dtypes: by slot, as far as known; codecs take slots of known ones alone.
            more: as for :meth:`conditions`.
        """
        program = self.placed(program)
        return Planner(
            program,
            times_ms,
            self.conditions(program.num_layers, link, **more),
            host_limit_bytes=self.host_limit_now_bytes,
            forced=self._forced(program),
            coding=Coding.of(
                program, times_ms, dtypes, codec=self.codec, allow_lossy=self.allow_lossy
            ),
        )

    def placed(self, program: StepProgram) -> StepProgram:
        """Return *program* with weights of embeddings and head where they are bound to be."""
        if self.ends_on_host:
            return with_ends_on_host(program)
        return program

    def conditions(self, num_layers: int, link: LinkModel, **more: Any) -> Conditions:
        """Return under which a step of *num_layers* is planned over *link*.

        Args:
            num_layers: of the model.
            link: its speeds.
            more: further fields of :class:`~hf_pyao.plan.solve.conditions.Conditions`.
        """
        below = self.below
        if below is not None and below.has_disk:
            link = dataclasses.replace(link, disk=below.disk())
        host: HostCosts | None = more.pop("host", None)
        if host is not None:
            host = dataclasses.replace(host, checkpoints_all=self.levers.checkpoint_every > 0)
        return Conditions(
            host=host,
            link=link,
            window_bytes=self.window_now_bytes,
            min_bytes=self.min_bytes,
            keep_last_layers=self.levers.kept_layers(num_layers, self.keep_last_layers),
            may_shrink_window=self.may_set_window,
            may_keep_fewer=self.may_keep_fewer,
            may_checkpoint=self.room.segments and not self.levers.checkpoint_every,
            allocator=self.allocator,
            placed_weights=None if below is None else below.placed_weights,
            **more,
        )

    def _forced(self, program: StepProgram) -> Callable[[str], bool] | None:
        """Return what says of a slot whether it is to be recomputed."""
        if not self.recompute_modules:
            return None
        made_by: dict[str, tuple[str, str]] = {}
        graph = program.graph
        if graph is not None:
            for operation in graph.operations:
                for value in operation.makes:
                    path = program.operations[operation.number].path
                    made_by.setdefault(graph.values[value].slot, (path, operation.kind))
        modules = set(self.recompute_modules)

        def is_forced(name: str) -> bool:
            path, kind = made_by.get(name, ("", ""))
            if POINTWISE in modules and kind == "cheap":
                return True
            return name.rpartition(":")[0] in modules or (bool(kind) and path in modules)

        return is_forced


def _room_of(config: PyAOConfig, given: GivenLevers) -> LeverRoom:
    """Return which levers policy ``auto`` may choose for *config*, whose levers are *given*."""
    free = given.free if config.policy == "auto" else frozenset()
    may_run_again, why = "checkpoint_every" in free, ""
    if config.recompute_modules:
        why = f"{config.label('recompute_modules')} is given"
    elif config.policy == "auto" and not (may_run_again or given.levers.checkpoint_every):
        why = f"{config.label('checkpoint_every')} is 0"
    return LeverRoom(
        segments=may_run_again,
        nested="checkpoint_nested" in free,
        attention="save_attention" in free,
        tiles="mlp_tiles" in free,
        groups="attention_groups" in free,
        why_no_segments=why,
    )
