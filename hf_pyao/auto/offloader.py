"""``Offloader``: an engine attached to a model, as users see it."""

from __future__ import annotations

import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from hf_pyao.auto.deciding import Deciding
from hf_pyao.auto.effects.watch import compare_effects, watch_effects
from hf_pyao.auto.install.installed_parts import InstalledParts, forget_compiled_code
from hf_pyao.auto.install.run_record import RunRecord
from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.auto.policy import AutoPolicy
from hf_pyao.auto.profiling import ProfileWriter
from hf_pyao.auto.pyao_rule import PyAORule
from hf_pyao.auto.retry.out_of_memory import MicroBatchRunner
from hf_pyao.auto.retry.second_run_guard import SecondRunGuard
from hf_pyao.config import PyAOConfig, is_switched_off
from hf_pyao.engine.recompute.verification import TILES, SecondRunCheck, SecondRuns
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import ConflictError, warn
from hf_pyao.levers import Levers
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.run import LayerBytes, outcome_of

if TYPE_CHECKING:
    from hf_pyao.model.attention.attention_groups import AttentionGroups
    from hf_pyao.model.head.head_loss import HeadLoss
    from hf_pyao.model.tiles.mlp_tiles import MLPTiles

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Offloader:
    """An engine attached to a model. Made by :func:`attach`.

    It holds the model weakly: deleting the model takes engine and buffers with it.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundLayers,
        config: PyAOConfig,
        deciding: Deciding,
        record: RunRecord,
        micro_batches: MicroBatchRunner,
        guard: SecondRunGuard,
        *,
        explain: Callable[[BaseException | None], str],
    ) -> None:
        self.config = config
        """What was given. What is followed is :attr:`levers` and :attr:`plan`."""
        self.engine = deciding.engine
        self.link = self.engine.link
        self.transport = self.link.transport
        self.host_pool = self.link.tiers.stores[0]
        """The nearest of the stores that bytes go to; all of them are in ``link.tiers``."""
        self.device = record.device
        self.record = record
        self.micro_batches = micro_batches
        """Runs micro-batches again that do not fit; its ``tightening`` may be exchanged."""
        self._deciding = deciding
        self._guard = guard
        self._explain = explain
        self._installed = InstalledParts()
        self._model = weakref.ref(model)
        self._layers = tuple(weakref.ref(layer) for _, layer in found.layers)
        self._num_packs_seen = 0
        self._is_attached = False
        self._error_at_start = id(sys.exc_info()[1])
        self._finalizer: weakref.finalize[..., Offloader] | None = None

    def install(
        self,
        model: nn.Module,
        found: FoundLayers,
        lifecycle: Lifecycle,
        levers: Levers,
        check: SecondRunCheck,
        streaming: StreamedLayers | None = None,
    ) -> None:
        """Put everything on *model*; nothing with ``PYAO=off``. If it raises, nothing is there.

        The model's hooks own *lifecycle*, which owns this object. A strong reference back would
        leave host memory to Python's cyclic collector.
        """
        if is_switched_off():
            return
        forget_compiled_code(model, found)
        try:
            self._installed.put_on(
                model,
                found,
                lifecycle,
                levers,
                second_runs=SecondRuns(check, TILES),
                may_come=self._deciding.may_come,
                streaming=streaming,
            )
            self._deciding.switch.bind(lifecycle, self.mlp_tiles, self.attention_groups)
            for sentence in self._installed.describe():
                self.record.describe_further(sentence)
            lifecycle.install(self)
            self._deciding.start(model, self)
            self._guard.start()
            compare = weakly(self.compare_effects, None)
            watch_effects(self.engine.effects, self.config, model, compare)
            self.record.watch_layers(weakly(self._streamed_bytes, {}))
            if self.record.report_path is not None:
                # It holds the engine, which therefore goes a collection later than its cycle with
                # us: only where there is something to write.
                self._finalizer = weakref.finalize(self, self.record.end_unseen)
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
    def head_loss(self) -> HeadLoss | None:
        """The loss without whole logits on the model's head; None without it."""
        return self._installed.head_loss

    @property
    def mlp_tiles(self) -> MLPTiles | None:
        """Runs MLPs over tiles of tokens; None without it."""
        return self._installed.mlp_tiles

    @property
    def weights(self) -> StreamedLayers | None:
        """Streams the frozen weights of layers; None: all are on the device."""
        return self._installed.weights

    @property
    def attention_groups(self) -> AttentionGroups | None:
        """Runs attention over groups of heads; None without it."""
        return self._installed.attention_groups

    @property
    def _lifecycle(self) -> Lifecycle | None:
        """What drives the engine; None once detached, or once the model is gone."""
        return self._installed.lifecycle

    @property
    def is_attached(self) -> bool:
        """False before all is installed, and from the moment on in which it is detached."""
        return self._is_attached

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Qualified names of the layers, in forward order."""
        return self.record.layer_names

    @property
    def layer_bytes(self) -> list[LayerBytes]:
        """What became of each layer's saved tensors; empty where no report was asked for."""
        return self.record.layer_bytes

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
                "configuration), or the model is not attached any more.",
                key="profile-running",
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
        if "_finalizer" not in vars(self):
            return "<Offloader, being made>"
        model = self._model()
        of = "a model that is gone" if model is None else class_name(model)
        state = "attached" if self._installed.is_on else "detached"
        return f"<Offloader of {of}, {state}, {self.record.describe_shortly()}>"

    def warn_if_idle(self) -> None:
        """Warn once if nothing was packed since the last call: call it after each step.

        Without it, only a forward that follows an idle one notices.
        """
        num_packs = self.engine.num_packs
        if self._is_attached and num_packs == self._num_packs_seen:
            self.engine.warn_idle()
        self._num_packs_seen = num_packs

    def warn_if_bypassed(self) -> None:
        """Warn once if the model has gradients, and nothing was ever packed.

        To be called after a backward pass, which may be that of another model.
        """
        model = None if self.engine.num_packs else self._model()
        if model is not None and any(each.grad is not None for each in model.parameters()):
            self.engine.warn_idle()

    def compare_effects(self) -> None:
        """Note in ``engine.effects`` which settings have shown no effect so far."""
        model, lifecycle = self._model(), self._lifecycle
        if model is not None and lifecycle is not None:
            compare_effects(self.config, model, lifecycle, self._installed)

    def detach(self, outcome: str | None = None) -> None:
        """Remove everything that was installed; the model is as before. Twice is fine.

        Graphs that were built before keep their saved tensors and may still be run backward. The
        report that the configuration asks for is written, with *outcome* as
        :attr:`~hf_pyao.plan.documents.run.RunReport.outcome`; None: by the error, if any, that
        this is called in the handling of (``except``, ``finally``). Where detaching is forgotten,
        the report is written when the model goes or the process ends.

        An interrupt is raised when all is removed; should another one come, call it again.

        Raises:
            RecomputationError: when all is removed: gradients were wrong that no step has read yet.
        """
        error = sys.exc_info()[1]
        error = None if id(error) == self._error_at_start else error
        outcome = outcome_of(error) if outcome is None else outcome
        has_run = self._is_attached
        if has_run and (advice := self._explain(error)):
            warn(logger, "out-of-memory-advice", "%s", advice, level=logging.ERROR)
        if has_run and error is None and self.engine.num_forwards:
            self.engine.effects.compare_now()
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
        if error is None:
            self._guard.raise_if_wrong()

    def _take_down(self) -> None:
        """Remove what is installed still. It may be called again, also where it was interrupted."""
        try:
            if self._installed.is_on:
                self._guard.end()
            self._deciding.end()
        finally:
            self._installed.take_off(self.engine)

    def _streamed_bytes(self) -> dict[str, int]:
        return {} if self.weights is None else self.weights.streamed_bytes()

    def _end_record(self, outcome: str) -> None:
        self.record.report_extra.update(self._deciding.report())
        if self.weights is not None:
            self.record.report_extra["streamed_weights"] = self.weights.figures()
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
