"""``attach()``: the only place where the parts are wired together."""

from __future__ import annotations

import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_pyao.auto.deciding import Deciding, followed_levers
from hf_pyao.auto.install.conflicts import check_model, check_other_checkpointing
from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.install.links import make_link
from hf_pyao.auto.install.run_record import RunRecord
from hf_pyao.auto.install.wiring import (
    make_lifecycle,
    put_on_attention_groups,
    put_on_head_loss,
    put_on_mlp_tiles,
)
from hf_pyao.auto.parts import Parts, parts_of
from hf_pyao.auto.policy import AutoPolicy
from hf_pyao.auto.profiling import ProfileWriter
from hf_pyao.auto.pyao_rule import PyAORule
from hf_pyao.auto.retry.memory_failure import explain_uncaught
from hf_pyao.auto.retry.out_of_memory import MicroBatchRunner
from hf_pyao.auto.retry.second_run_guard import SecondRunGuard
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.recompute.dispatch_modes import stop_left_behind
from hf_pyao.engine.recompute.verification import (
    REBUILT,
    SEGMENT,
    TILES,
    Sampler,
    SecondRunCheck,
    Wrong,
)
from hf_pyao.engine.runtime.backward_order import BackwardOrder
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.stores import Store
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import pop_left_behind
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.levers import Levers
from hf_pyao.model.map.module_map import (
    FoundLayers,
    check_roles,
    find_layers,
)
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.run import check_report_path, outcome_of

if TYPE_CHECKING:
    from hf_pyao.model.attention.attention_groups import AttentionGroups
    from hf_pyao.model.head.head_loss import HeadLoss
    from hf_pyao.model.tiles.mlp_tiles import MLPTiles

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def attach(
    model: nn.Module,
    config: PyAOConfig | None = None,
    *,
    transport: Transport | None = None,
    host_pool: Store | None = None,
    link: LinkContext | None = None,
    backward_order: BackwardOrder | None = None,
) -> Offloader:
    """Offload what *model*'s decoder layers save for backward, from its next forward on.

    The model may be wrapped (DDP, FSDP, DeepSpeed, PEFT, ``torch.compile``). Attaching again with
    an equal configuration returns the same offloader.

    Args:
        model: a causal LM, a sequence-to-sequence model, or one registered with
            :func:`~hf_pyao.register_module_map`.
        config: what to offload and how; the defaults if None.
        transport: how bytes move; None picks by device. Tests pass a SimulatedTransport.
        host_pool: where bytes go that leave the device: host memory to share with another
            model's offloader (its ``host_pool``), or another :class:`~hf_pyao.engine.stores.Store`.
        link: transport, host memory and window to share with another model's offloader (its
            ``link``); each reports its own figures. In place of *transport* and *host_pool*.
        backward_order: in which order the forwards that wait have their backward, where that is not
            the newest first; :class:`~hf_pyao.engine.runtime.backward_order.OldestFirst` for
            pipelines.

    Returns:
        The offloader, usable as a context manager that detaches at its end.

    Raises:
        ConfigError: a role or module name in *config* is unknown to this model.
        ConflictError: something else moves or recomputes the same tensors, or the model is attached
            with another configuration.
        NoLayersFoundError: no layers were found.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {model!r}; expected a torch.nn.Module.")
    config = config or PyAOConfig()
    if not isinstance(config, PyAOConfig):
        raise ConfigError(f"config is {config!r}; expected a PyAOConfig or None.")
    parts = parts_of(config)
    found = find_layers(model, parts.layers.names, field=parts.layers.label)
    pop_left_behind()
    stop_left_behind()
    check_model(model)
    levers = followed_levers(parts.policy, parts.levers)
    if levers.checkpoint_every:
        check_other_checkpointing(model, levers.checkpoint_every)
    check_report_path(parts.report.path, parts.report.label)
    check_report_path(parts.profile.path, parts.profile.label)
    attached = offloader_of(model)
    if attached is not None and not attached.is_attached:
        attached.detach()  # it was interrupted as it was made, or as it was detached
        attached = None
    if attached is not None:
        if attached.config == config and attached.is_of(found):
            return attached
        raise ConflictError(
            "the model, or a part of it, is attached already, with another configuration or other "
            "layers. Detach it first (offloader.detach()), or pass the same model and "
            "configuration."
        )
    if link is not None and (transport is not None or host_pool is not None):
        raise ConfigError(
            "link is given together with transport or host_pool, which are a part of it. Pass "
            "either link, or the other two."
        )
    if link is not None and link.window_bytes != parts.link.window_bytes:
        shared = "layer" if link.window_bytes is None else link.window_bytes
        raise ConfigError(
            f"{parts.link.label} is {parts.link.window!r}; expected the window of the link that "
            f"is shared, {shared!r}. Give both models the same window."
        )
    link = link or make_link(
        device_of(model),
        transport,
        host_pool,
        window_bytes=parts.link.window_bytes,
        host_memory_gib=parts.link.host_memory_gib,
    )
    offloader = Offloader(model, found, config, parts, levers, link, backward_order)
    try:
        logger.info("%s", offloader.describe())
        if offloader.record.keeps_all_layers and len(offloader.layer_names) > 1:
            offloader.engine.idle_warnings.all_layers_kept(
                f"{config.label('keep_last_layers')}={parts.keep_last_layers}",
                len(offloader.layer_names),
            )
        return offloader
    except BaseException:
        offloader.detach()
        raise


def offloader_of(model: nn.Module) -> Offloader | None:
    """Return the offloader that *model*, or a part of it, is attached to, if there is one."""
    for module in model.modules():
        hooks: Iterable[object] = module._forward_pre_hooks.values()
        for hook in hooks:
            if isinstance(hook, ModelHook):
                owner: Offloader | None = hook.lifecycle.owner
                return owner
    return None


class Offloader:
    """An engine attached to a model. Made by :func:`attach`.

    It holds the model weakly: deleting the model takes engine and buffers with it.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundLayers,
        config: PyAOConfig,
        parts: Parts,
        levers: Levers,
        link: LinkContext,
        backward_order: BackwardOrder | None,
    ) -> None:
        self.config = config
        """What was given. What is followed is :attr:`levers` and :attr:`plan`."""
        self.device = device_of(model)
        self.link = link
        self.transport = self.link.transport
        self.host_pool = self.link.tiers.stores[0]
        """The nearest of the stores that bytes go to; all of them are in ``link.tiers``."""
        self._remedies = parts.remedies
        self._model = weakref.ref(model)
        self._num_packs_seen = 0
        check_roles(found)
        check = SecondRunCheck(parts.verify_recompute)
        sampler = Sampler(check, SEGMENT)
        self._deciding = Deciding(
            model,
            found,
            parts,
            levers,
            link,
            self.device,
            backward_order,
            sampler=Sampler(check, REBUILT),
        )
        self.engine = self._deciding.engine
        self._is_attached = False
        self.head_loss: HeadLoss | None = None
        self.mlp_tiles: MLPTiles | None = None
        self.attention_groups: AttentionGroups | None = None
        self.record = record = RunRecord(
            config,
            self.engine,
            self.transport,
            self.device,
            layer_names=tuple(fqn for fqn, _ in found.layers),
            how_found=found.how,
            auto_summary=_summary_of(weakref.ref(self._deciding)),
            levers=_levers_of(self._deciding.switch),
        )
        self._layers = tuple(weakref.ref(layer) for _, layer in found.layers)
        self._error_at_start = id(sys.exc_info()[1])
        self._finalizer: weakref.finalize[..., Offloader] | None = None
        # The model's hooks own the lifecycle, which owns this object as its `owner`. A strong
        # reference back would leave host memory to Python's cyclic collector.
        may_come = parts.levers.free if self.auto is not None else frozenset()
        lifecycle = make_lifecycle(
            self.engine,
            found,
            levers,
            segments_may_come="checkpoint_every" in may_come,
            owner=self,
            sampler=sampler,
        )
        self._driver: weakref.ref[Lifecycle] | None = weakref.ref(lifecycle)
        self._guard = SecondRunGuard(check, _without_second_runs(weakref.ref(self._deciding)))
        self.micro_batches = MicroBatchRunner(
            model,
            lifecycle,
            parts.remedies,
            self.device,
            self._deciding.tightening,
            _noting(record, self._deciding),
            self._guard,
        )
        """What runs micro-batches again that do not fit; its ``tightening`` may be exchanged."""
        _forget_compiled_code()
        # After everything that may refuse: a failed attach leaves the model as it was.
        try:
            self.head_loss = put_on_head_loss(model, levers.head_loss)
            self.mlp_tiles = put_on_mlp_tiles(model, found, levers.mlp_tiles, Sampler(check, TILES))
            self.attention_groups = put_on_attention_groups(
                model, found, levers.attention_groups, may_come="attention_groups" in may_come
            )
            self._deciding.switch.bind(lifecycle, self.mlp_tiles, self.attention_groups)
            for part in (self.head_loss, self.mlp_tiles, self.attention_groups):
                if part is not None:
                    record.describe_further(part.describe())
            lifecycle.install()
            self._deciding.start(model, self)
            self._guard.start()
            if parts.report.path is not None:
                # It holds the engine, which therefore goes a collection later than its cycle with
                # us: only where there is something to write.
                self._finalizer = weakref.finalize(self, record.end_unseen)
            self._is_attached = True
        except BaseException:
            self.detach()
            raise

    @property
    def levers(self) -> Levers:
        """With what the model runs from its next forward on: as configured, or as a plan has it."""
        return self._deciding.switch.levers

    @property
    def plan(self) -> Plan | None:
        """What is followed, with policies that follow a plan; None with others, or before it."""
        return self._deciding.plan

    @property
    def auto(self) -> AutoPolicy | None:
        """What plans, with policy ``auto``; None with others."""
        return self._deciding.auto

    @property
    def pyao_rule(self) -> PyAORule | None:
        """What decides, with policy ``pyao``; None with others, or where a plan was kept."""
        return self._deciding.pyao_rule

    @property
    def profile_writer(self) -> ProfileWriter | None:
        """What measures, for a profile that is asked for or for policy ``auto``; None else."""
        return self._deciding.measuring.writer

    @property
    def _lifecycle(self) -> Lifecycle | None:
        """What drives the engine; None once detached, or once the model is gone."""
        return None if self._driver is None else self._driver()

    @property
    def is_attached(self) -> bool:
        """False before all is installed, and from the moment on in which it is detached."""
        return self._is_attached

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Qualified names of the layers, in forward order."""
        return self.record.layer_names

    @property
    def report_extra(self) -> dict[str, Any]:
        """Plain values that the report is to hold beside the figures: losses, a run's name."""
        return self.record.report_extra

    def is_of(self, found: FoundLayers) -> bool:
        """Say whether *found* are the layers that are offloaded."""
        ours = [ref() for ref in self._layers]
        theirs = [layer for _, layer in found.layers]
        return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

    def start_profile(self, path: str | os.PathLike[str], num_micro_batches: int) -> None:
        """Measure the next micro-batches and write their profile, as ``PyAOConfig.profile`` does.

        Args:
            path: the JSON file to write.
            num_micro_batches: how many are measured.

        Raises:
            ConflictError: a profile is being made already, or this is detached.
            ReportError: there is a file already that is no profile of this model.
        """
        model = self._model()
        if self._deciding.is_measuring or model is None or not self._is_attached:
            raise ConflictError(
                "no profile can be begun: one is being made already (`profile` in the "
                "configuration), or the model is not attached any more."
            )
        found = find_layers(model, self.config.layers)
        self._deciding.measuring.measure(model, found, self, path, num_micro_batches)

    def run_micro_batch(
        self, function: Callable[[], Result], *, writes_only_this_model: bool = False
    ) -> Result:
        """Run *function*, the forward and backward of one micro-batch; return what it returns.

        Where it runs out of device memory, it runs again, under a tighter plan that stays for the
        rest of the run, from the random numbers, gradients and buffers that it began with: the
        parameters come out as if it had fitted. ``Trainer`` needs none of this, where the mixin is
        used.

        ```python
        def forward_and_backward():
            loss = model(**batch).loss
            accelerator.backward(loss)
            return loss.detach()


        loss = offloader.run_micro_batch(forward_and_backward)
        optimizer.step()
        ```

        Args:
            function: may be called several times, and must then do the same. No optimizer step
                and no ``zero_grad()`` belong in it.
            writes_only_this_model: it writes gradients of no parameters but this model's. If that
                is not known, a gradient of another tensor ends the run where it might have been
                written twice.

        Raises:
            OutOfDeviceMemoryError: it did not fit, and nothing tighter is left; or what it had
                done could not be undone; or other ranks were beyond it.
        """
        if not self._is_attached:
            return function()
        return self.micro_batches.run(function, writes_only_this_model=writes_only_this_model)

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last finished micro-batch; empty before the first.

        Keys are those of :meth:`hf_pyao.metrics.MicroBatchStats.as_dict`.
        """
        return self.record.metrics()

    def totals(self) -> dict[str, float]:
        """Return sums (sizes held at once: peaks) over all micro-batches since attaching."""
        return self.record.totals()

    def describe(self) -> str:
        """Say in one line what is offloaded, how, and within which limits."""
        return self.record.describe()

    def __repr__(self) -> str:
        """Say in short what is attached and what it came to; touches no device."""
        record = self.__dict__.get("record")
        if record is None:
            return "<Offloader, being made>"
        model = self._model()
        of = "a model that is gone" if model is None else class_name(model)
        is_attached = self.__dict__.get("_driver") is not None
        state = "attached" if is_attached else "detached"
        return f"<Offloader of {of}, {state}, {record.describe_shortly()}>"

    def warn_if_idle(self) -> None:
        """Warn once if nothing was packed since the last call: call it after each step.

        Without it, only a forward that follows an idle one notices.
        """
        num_packs = self.engine.num_packs
        if num_packs == self._num_packs_seen:
            self.engine.warn_idle()
        self._num_packs_seen = num_packs

    def detach(self, outcome: str | None = None) -> None:
        """Remove everything that was installed; the model is as before. Twice is fine.

        Graphs that were built before keep their saved tensors and may still be run backward. The
        report that the configuration asks for is written, with *outcome* as
        :attr:`~hf_pyao.plan.documents.run.RunReport.outcome`; None: by the error, if any, that
        this is called in the handling of (``except``, ``finally``). Where detaching is forgotten,
        the report is written when the model goes or the process ends.

        An interrupt is raised when all is removed; should another one come, call it again.
        """
        error = sys.exc_info()[1]
        error = None if id(error) == self._error_at_start else error
        outcome = outcome_of(error) if outcome is None else outcome
        has_run = self._is_attached
        if has_run and (advice := self._advice_on(error)):
            logger.error("%s", advice)
        self._is_attached = False
        try:
            self._take_down()
        except BaseException as interrupt:
            self._take_down()  # from where it was interrupted
            if has_run:
                self._end_record(outcome_of(interrupt))
            raise
        if has_run:
            self._end_record(outcome)

    def _advice_on(self, error: BaseException | None) -> str:
        return explain_uncaught(error, self.engine, self.device, self._remedies)

    def _take_down(self) -> None:
        """Remove what is installed still. It may be called again, also where it was interrupted."""
        try:
            if self._driver is not None:
                self.micro_batches.stop()
                self._guard.end()
            self._deciding.end()
        finally:
            self._take_down_hooks()

    def _take_down_hooks(self) -> None:
        try:
            if self.head_loss is not None:
                self.head_loss.uninstall()
            if self.mlp_tiles is not None:
                self.mlp_tiles.uninstall()
            if self.attention_groups is not None:
                self.attention_groups.uninstall()
        finally:
            if self._driver is not None:
                lifecycle = self._lifecycle
                if lifecycle is not None:
                    lifecycle.leave_all()
                self.engine.end()
                if lifecycle is not None:
                    lifecycle.remove()
                self._driver = None

    def _end_record(self, outcome: str) -> None:
        self.record.report_extra.update(self._deciding.report())
        if self._finalizer is not None:
            self._finalizer.detach()
        self.record.end(outcome)

    def __enter__(self) -> Offloader:
        """Return the offloader, attached already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach, also after an error."""
        self.detach(outcome_of(error))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of what holds an offloader has none."""
        return None


def _summary_of(deciding: weakref.ref[Deciding]) -> Callable[[], str]:
    """Return what asks for a summary, and holds nothing: a record outlives its offloader."""

    def summary() -> str:
        found = deciding()
        return "" if found is None else found.summary()

    return summary


def _without_second_runs(deciding: weakref.ref[Deciding]) -> Callable[[Sequence[Wrong]], str]:
    """Return what has layers run once; it does not hold the offloader."""

    def stop(wrong: Sequence[Wrong]) -> str:
        found = deciding()
        return "nothing is offloaded" if found is None else found.without_second_runs(wrong)

    return stop


def _levers_of(switch: LeverSwitch) -> Callable[[], Levers]:
    """Return what asks for the levers; a switch holds nothing."""
    return lambda: switch.levers


def _noting(record: RunRecord, deciding: Deciding) -> Callable[[str], None]:
    """Return a function that records a tighter plan; it does not hold the offloader."""

    def note(sentence: str) -> None:
        deciding.made_room()
        record.report_extra.setdefault("out_of_memory", []).append(sentence)

    return note


def device_of(model: nn.Module) -> torch.device:
    for tensor in model.parameters():
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def _forget_compiled_code() -> None:
    """Drop code that torch.compile made before hooks were there: it would go on without them.

    Compiled modules do not check for new hooks by default, not even on another instance of the
    same class.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
