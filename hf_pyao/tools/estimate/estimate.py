"""What a model's training would take on a card, by each way to save memory.

Steps are recorded on fake tensors at a few sizes (``recorded_step``), and computed for all others
(``hf_pyao.plan``). What is assumed is in ``assumptions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hf_pyao.config import (
    DEFAULT_KEEP_LAST_LAYERS,
    DEFAULT_MIN_BYTES,
    DEFAULT_WINDOW_BYTES,
    PyAOConfig,
)
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.documents.estimate import EstimateRow
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.measure.activation_throughput import by_pack_intervals
from hf_pyao.plan.options.chosen_levers import FIXED, LeverRoom
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.plan.paper.pyao_plan import plan_of_rule, saved_by
from hf_pyao.plan.predict.allocator_replay import Reserved, StepMemory
from hf_pyao.plan.predict.optimizer_step import optimizer_step_bytes
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.peak_cause import largest_workspace, peak_cause
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.predictor.choice import LENGTH_STEP, LONGEST
from hf_pyao.plan.predictor.largest import largest_fitting, largest_on_a_line
from hf_pyao.plan.predictor.predictor import Card, Predictor, StepAt
from hf_pyao.plan.predictor.sized_memory import USUAL_SHARE, NeededAt, SizedMemory
from hf_pyao.plan.predictor.steps import Steps
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.disk_share import with_blocks_on_disk
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import with_streamed_blocks
from hf_pyao.plan.weights.base_names import BASES
from hf_pyao.plan.weights.hiding import tokens_by_clock, tokens_by_formula
from hf_pyao.plan.weights.weight_plan import WeightPlan
from hf_pyao.tools.estimate.card_memory import card_memory
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import most_positions
from hf_pyao.tools.estimate.recorded_step import record_step
from hf_pyao.tools.estimate.ways import Family
from hf_pyao.tools.simulation.kept_models import KeptModels

FREE = LeverRoom(segments=True, nested=True, attention=True, groups=True)
"""Levers that a plan may choose."""

SLACK = 1 / 128
"""Share of a size within which larger ones are not looked for with MLPs in tiles or attention in
groups; and which a size may lack that leaves room."""

NUM_LENGTHS = 8
"""Steps that are looked at before the longest, where lengths vary."""

LIKELY_MICRO_BATCH = 128
"""Asked for behind the first where each size is recorded: smaller ones tell little of larger ones,
as tiles and chunks are as large as the rows that there are."""


class Estimator:
    """Estimates one model on one card.

    Args:
        config: the model's transformers configuration.
        hardware: the card.
        training_state: ``"host"`` or ``"device"``, see
            :class:`~hf_pyao.tools.estimate.fake_step.FakeTraining`.
        sequence_length: tokens of each sample.
        shortest: tokens of the shortest one, where lengths vary; None: they do not.
        window: ``PyAOConfig.window``.
        allocator: settings of PyTorch's allocator; None: its default.
        more: further fields of :class:`~hf_pyao.tools.estimate.fake_step.FakeTraining`.
    """

    def __init__(
        self,
        config: Any,
        hardware: Hardware,
        *,
        training_state: str = "host",
        sequence_length: int = 512,
        shortest: int | None = None,
        window: int | str = DEFAULT_WINDOW_BYTES,
        allocator: AllocatorSettings | None = None,
        **more: Any,
    ) -> None:
        self.allocator = allocator or AllocatorSettings()
        self.config = config
        self.hardware = hardware
        self.sequence_length = sequence_length
        self.shortest = shortest
        window = PyAOConfig(window=window).effective().window
        self.window_bytes = None if isinstance(window, str) else window
        self.num_recordings = 0
        kernels = more.setdefault("kernels", hardware.kernels)
        self.card_memory = card_memory(hardware, kernels)
        """What of the card may be reserved for a step, and what the rest is for."""
        self.limit_bytes = self.card_memory.limit_bytes
        self._training = FakeTraining(
            config=config, training_state=training_state, kept=KeptModels(), **more
        )
        self._recorded: dict[tuple[Family, int, int], StepProgram] = {}
        self._programs: dict[tuple[Family, int, int], StepProgram] = {}
        """Recorded or computed."""
        self._memories: dict[tuple[Way, Family, int, int], SizedMemory] = {}
        self._shared: dict[tuple[Family, int, int, tuple[bool, ...]], Outcome] = {}
        self._by_size: dict[tuple[Family, int | None], Steps] = {}
        self._shares: dict[AllocatorSettings, float] = {}
        """What the allocator needed last for each byte of a peak."""
        self._flagged: tuple[str, ...] | None = None
        self._rule_plan: Plan | None = None
        positions = most_positions(config)
        self.most_length = None if positions is None else positions // LENGTH_STEP * LENGTH_STEP
        """The longest sequence that the model has positions for; None if any will do."""

    def row(
        self,
        way: Way,
        *,
        micro_batch: int | None = None,
        with_longest: bool = True,
    ) -> EstimateRow:
        """Estimate one way to train.

        Args:
            way: which.
            micro_batch: what times and peaks are for; None: the largest that fits.
            with_longest: look for the longest sequence too.

        Raises:
            ConfigError: the model has no head that the chunked loss understands.
        """
        length = self.sequence_length
        self._shares.clear()  # ways that offload the same come to the same
        largest = self.largest_micro_batch(way, self.allocator)
        growing = None
        if not self.allocator.expandable_segments:
            expandable = replace(self.allocator, expandable_segments=True)
            growing = self.largest_micro_batch(way, expandable, at_least=largest)
        shown = micro_batch or max(largest, 1)
        predicted, weights = self.predicted(way, shown)
        prediction = predicted.timed
        tokens = largest * length
        longest = self.longest_sequence(way, likely=tokens) if with_longest else None
        transfer_ms = 2 * self.hardware.link.copy_ms("offload", prediction.offloaded_bytes)
        hidden = None
        if prediction.offloaded_bytes:
            hidden = max(0.0, 1 - predicted.stall_ms / transfer_ms)
        cause = peak_cause(predicted.program, predicted.late)
        inside = largest_workspace(predicted.program)
        worst = self._among_lengths(way, shown, predicted.memory)
        streamed = self._streamed(way, shown, weights)
        return EstimateRow(
            method=way.name,
            largest_micro_batch=largest,
            largest_with_expandable_segments=growing,
            longest_sequence=longest,
            is_length_limited_by_positions=longest is not None and longest == self.most_length,
            micro_batch=shown,
            fits=predicted.memory.fits(self.limit_bytes) and (worst is None or worst.fits),
            peak_bytes=predicted.peak_bytes,
            reserved_bytes=self._reserved_bytes(way, predicted.memory, worst),
            peak_phase=cause.phase,
            peak_where=cause.where,
            peak_tensor=cause.tensor,
            peak_tensor_bytes=cause.nbytes,
            next_peak_bytes=cause.next_peak_bytes,
            workspace_bytes=sum(inside.parts.values()),
            workspace_of=inside.name,
            workspace_parts=inside.parts,
            optimizer_step_bytes=optimizer_step_bytes(predicted.program),
            step_ms=prediction.step_ms,
            compute_ms=prediction.compute_ms,
            tokens_per_s=shown * length / prediction.step_ms * 1e3,
            host_bytes=prediction.host_peak_bytes,
            offloaded_bytes=prediction.offloaded_bytes,
            hidden=hidden,
            recomputed_modules=list(self.flagged()) if way.policy == "pyao" else [],
            **streamed,
        )

    def _among_lengths(self, way: Way, micro_batch: int, memory: StepMemory) -> Reserved | None:
        """Return what is reserved behind steps of rising lengths; None where they do not vary.

        Nor of a way that plans, since its plan is for one length.
        """
        if self.shortest is None or way.policy == "auto":
            return None
        gap = (self.sequence_length - self.shortest) / NUM_LENGTHS
        shorter = [round(self.shortest + number * gap) for number in range(NUM_LENGTHS)]
        family = self._family(way)
        before = [self._outcome(way, family, micro_batch, each).memory for each in shorter]
        return memory.behind(before, self.limit_bytes)

    def _reserved_bytes(self, way: Way, memory: StepMemory, worst: Reserved | None) -> int | None:
        """Return what a row says is reserved; None where lengths vary and that is not known."""
        if worst is not None:
            return worst.reserved_bytes
        return None if self.shortest is not None else memory.reserved_within(self.limit_bytes)

    def _streamed(self, way: Way, micro_batch: int, weights: WeightPlan | None) -> dict[str, Any]:
        """Return the fields of a row that streams weights; none of others."""
        if weights is None:
            return {}
        hardware, length = self.hardware, self.sequence_length
        program = self.program(self._family(way), micro_batch, length)
        return {
            "num_streamed_blocks": len(weights.streamed_layers),
            "num_resident_blocks": weights.num_resident,
            "uploaded_bytes": weights.uploaded_bytes,
            "weights_host_bytes": weights.host_bytes,
            "num_disk_blocks": len(weights.disk_layers),
            "weights_disk_bytes": weights.disk_bytes,
            "disk_read_bytes": weights.disk_read_bytes,
            "tokens_to_hide": tokens_by_formula(
                BASES[self._training.base], hardware.device, hardware.link
            ),
            "tokens_to_hide_by_clock": tokens_by_clock(
                program,
                operation_times_ms(program, hardware.device),
                hardware.link,
                micro_batch * length,
            ),
        }

    def largest_micro_batch(
        self,
        way: Way,
        allocator: AllocatorSettings,
        *,
        at_least: int = 0,
    ) -> int:
        """Return the most samples that fit; 0 if not even one does.

        Args:
            way: how it is trained.
            allocator: settings of PyTorch's allocator.
            at_least: samples that are known to fit.

        Raises:
            ConfigError: the model has no head that the chunked loss understands.
        """
        family = self._family(way)

        def memory_at(size: int) -> SizedMemory:
            return self._sized(way, family, size, self.sequence_length)

        levers = family.levers
        is_exact = levers.mlp_tiles == levers.attention_groups == "off"
        found = self._largest(
            levers.scales,
            memory_at,
            allocator,
            at_least=at_least,
            likely=(1, LIKELY_MICRO_BATCH) if not at_least else (),
            slack=0.0 if is_exact else SLACK,
        )
        if not is_exact or found <= at_least or SLACK * found < 1:
            return found
        # What fits with a full device may not fit with copies that end at other times: an emulated
        # card ran 144 samples of GPT-2, which leave room, and not 145, which fill the device.
        fewer, most = (
            memory_at(size).leaves_room(self.limit_bytes, allocator) for size in (found - 1, found)
        )
        return found - 1 if fewer and not most else found

    def _largest(
        self,
        is_computed: bool,
        memory_at: Callable[[int], SizedMemory],
        allocator: AllocatorSettings,
        *,
        most: int | None = None,
        at_least: int = 0,
        likely: Sequence[int] = (),
        slack: float = SLACK,
        is_positions: bool = False,
    ) -> int:
        """Return the largest size that fits.

        Args:
            is_computed: steps are computed from a few recordings; False: each one is recorded.
            memory_at: the memory of the step at a size.
            allocator: settings of PyTorch's allocator.
            most: the largest size that there is; None: there is no such.
            at_least: a size that is known to fit.
            likely: sizes to ask for first, where they are not computed.
            slack: share of a size within which larger ones are not looked for then.
            is_positions: *most* is the model's, and as likely as not to fit.
        """
        limit_bytes = self.limit_bytes
        if is_positions and most is not None and memory_at(most).fits(limit_bytes, allocator):
            return most
        if is_computed:

            def reserved_at(size: int) -> int:
                return memory_at(size).reserved_about(limit_bytes, allocator)

            return largest_fitting(reserved_at, limit_bytes, most=most, at_least=at_least)
        share = self._shares.get(allocator, USUAL_SHARE)
        needed_at = NeededAt(memory_at, limit_bytes, allocator, share, is_recorded=slack > 0)
        found = largest_on_a_line(
            needed_at,
            limit_bytes,
            most=most,
            at_least=at_least,
            likely=likely,
            slack=slack,
        )
        self._shares[allocator] = needed_at.share
        return found

    def _sized(self, way: Way, family: Family, micro_batch: int, length: int) -> SizedMemory:
        """Return the memory of a way to train at a size."""
        key = (way, family, micro_batch, length)
        if key not in self._memories:
            self._memories[key] = SizedMemory(self._outcomes(way, family, micro_batch, length))
        return self._memories[key]

    def _outcomes(
        self, way: Way, family: Family, micro_batch: int, length: int
    ) -> Sequence[Outcome]:
        """Return what a way comes to; one that plans: what fits, without solving anything."""
        program = self.program(family, micro_batch, length)
        if way.policy != "auto":
            return [self._outcome(way, family, micro_batch, length)]
        if way.streams:  # all that can be
            program = with_streamed_blocks(program, range(program.num_layers))
            if self.hardware.link.disk is not None:
                program = with_blocks_on_disk(program, self.hardware.host_limit_bytes)
        family = dataclasses.replace(family, levers=NO_LEVERS)
        planner = self._predictor(family, lambda *_: program).planner(micro_batch, NO_LEVERS)
        return [each.outcome for each in planner.simple().values()]

    def _outcome(self, way: Way, family: Family, micro_batch: int, length: int) -> Outcome:
        """Return what *way* comes to; ways that offload the same share it."""
        program = self.program(family, micro_batch, length)
        found = self._predictor(family, lambda *_: program).at(micro_batch, way)
        key = (family, micro_batch, length, tuple(found.step.leaves))
        return self._shared.setdefault(key, found)

    def predicted(self, way: Way, micro_batch: int) -> tuple[Outcome, WeightPlan | None]:
        """Predict one step; return what is streamed too, None where nothing was to be.

        Args:
            way: how it is trained.
            micro_batch: samples.

        Raises:
            ConfigError: the model has no head that the chunked loss understands.
        """
        family, length = self._family(way), self.sequence_length
        if way.policy != "auto":
            return self._outcome(way, family, micro_batch, length), None

        def step_at(size: int, levers: Levers) -> StepProgram:
            if levers == family.levers:
                return self.program(family, size, length)
            other = dataclasses.replace(family, levers=levers, is_other=True)
            return self._record(other, size, length)

        predictor = self._predictor(family, step_at, streams=way.streams)
        found = predictor.choice(micro_batch).best(self.limit_bytes)
        return found.levers.candidate.outcome, found.weights if way.streams else None

    def _family(self, way: Way) -> Family:
        follows_rule = way.policy == "pyao" and bool(self.rule_plan().slots)
        return Family(way.checkpointing, way.levers or NO_LEVERS, follows_rule)

    def flagged(self) -> tuple[str, ...]:
        """Return the sub-modules that PyAO's rule flags, timed as the paper times them."""
        self.rule_plan()
        assert self._flagged is not None
        return self._flagged

    def rule_plan(self) -> Plan:
        """Return the plan that PyAO's rule comes to."""
        if self._rule_plan is None:
            program = self._record(Family(False, NO_LEVERS), 1, self.sequence_length)
            layer = min(1, program.num_layers - 1)
            rates = by_pack_intervals(program, self.hardware.device, layer)
            self._flagged = find_outliers(rates, self.hardware.link.d2h_gib_per_s).flagged
            self._rule_plan = plan_of_rule(self._flagged, saved_by(program, layer), rates)
        return self._rule_plan

    # ---- programs ------------------------------------------------------------------------------

    def program(self, family: Family, micro_batch: int, length: int) -> StepProgram:
        """Return the step at a size: recorded there, or computed from recordings at others."""
        key = (family, micro_batch, length)
        if key not in self._programs:
            if length == self.sequence_length:
                steps, size = self._steps(family, None), micro_batch
            else:
                steps, size = self._steps(family, micro_batch), length
            self._programs[key] = self._recorded.get(key) or steps.at(size, family.levers)
        return self._programs[key]

    def _steps(self, family: Family, micro_batch: int | None) -> Steps:
        """Return the steps of one micro-batch by their length; None: of our length, by theirs."""
        key = (family, micro_batch)
        if key not in self._by_size:
            points: Sequence[int] | None = (2, 3)  # a single sample may run other operations
            if micro_batch is not None:
                last = max(3, self._recorded_multiple(family))
                has_lengths = self._longest_multiple >= 3
                points = [LENGTH_STEP * each for each in (1, 2, last)] if has_lengths else None

            def record(size: int, levers: Levers) -> StepProgram:
                if micro_batch is None:
                    return self._record(family, size, self.sequence_length)
                return self._record(family, micro_batch, size)

            self._by_size[key] = Steps(record, points)
        return self._by_size[key]

    def _recorded_multiple(self, family: Family) -> int:
        """Return the multiple of :data:`LENGTH_STEP` that is recorded; 0 if there is none."""
        length = self.sequence_length
        is_recorded = (family, 1, length) in self._recorded and length % LENGTH_STEP == 0
        return length // LENGTH_STEP if is_recorded else 0

    def _record(self, family: Family, micro_batch: int, length: int) -> StepProgram:
        key = (family, micro_batch, length)
        if key not in self._recorded:
            self.num_recordings += 1
            self._recorded[key] = record_step(
                dataclasses.replace(self._training, checkpointing=family.checkpointing),
                micro_batch,
                length,
                levers=family.levers,
                plan=self.rule_plan() if family.follows_rule else None,
                keep_last_layers=DEFAULT_KEEP_LAST_LAYERS if family.follows_rule else 0,
                is_other=family.is_other,
            )
        return self._recorded[key]

    @property
    def _longest_multiple(self) -> int:
        return (LONGEST if self.most_length is None else self.most_length) // LENGTH_STEP

    def longest_sequence(self, way: Way, *, likely: int = 0) -> int:
        """Return the longest sequence that fits at micro-batch 1, in steps of :data:`LENGTH_STEP`.

        Args:
            way: how it is trained.
            likely: tokens that fit in a micro-batch: about as many will in one sequence.

        Raises:
            ConfigError: the model has no head that the chunked loss understands.
        """
        most = self._longest_multiple
        if not most:
            return 0  # fewer positions than a step
        family = self._family(way)
        is_computed = self._steps(family, 1).is_computed(family.levers)

        def memory_at(multiple: int) -> SizedMemory:
            return self._sized(way, family, 1, multiple * LENGTH_STEP)

        multiple = self._largest(
            is_computed,
            memory_at,
            self.allocator,
            most=most,
            likely=[
                each for each in (self._recorded_multiple(family), likely // LENGTH_STEP) if each
            ],
            is_positions=self.most_length is not None,
        )
        return multiple * LENGTH_STEP

    # ---- plans ---------------------------------------------------------------------------------

    def _predictor(self, family: Family, step_at: StepAt, *, streams: bool = False) -> Predictor:
        """Return the predictor of one family of steps.

        Of levers, those are free that change no sums; with streamed weights none, since each number
        of blocks has plans of its own to look at.
        """
        binds = PlanRequest(
            min_bytes=DEFAULT_MIN_BYTES,
            window_bytes=self.window_bytes,
            keep_last_layers=DEFAULT_KEEP_LAST_LAYERS,
            may_shrink_window=True,
            may_keep_fewer=True,
            levers=family.levers,
            room=FIXED if streams else FREE,
            host_limit_bytes=self.hardware.host_limit_bytes,
            allocator=self.allocator,
            stream_weights="auto" if streams else "off",
        )
        return Predictor(step_at, Card.of(self.hardware.device, self.hardware.link), binds)

    def leaves(self, way: Way, program: StepProgram) -> list[bool]:
        """Return which slots of *program* are offloaded."""
        predictor = self._predictor(self._family(way), lambda *_: program)
        return list(predictor.at(1, way).step.leaves)
