"""Writes the profile that the configuration asks for, when its micro-batches have run.

The first micro-batches are measured, and the profile is written. Before the next forward (or when
the offloader is detached) the step is recorded on a fake copy of the model, and the profile is
written again with it: not in between, where backward may still be under way on another thread. The
first rank adds what the others measured, as soon as all have.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.collective_times import CollectiveTimes
from hf_pyao.auto.ranks.rank_exchange import RankExchange
from hf_pyao.auto.recording.forward_watch import ForwardWatch, Place
from hf_pyao.auto.recording.model_copy import CopyError
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import PyAOError, warn
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import ReportError, read_json, to_plain, write_json
from hf_pyao.plan.hardware.device_limit import gradient_bytes
from hf_pyao.plan.measure.profile import StepProfiler
from hf_pyao.plan.measure.profile_merge import merge_profiles
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.ranks import process_rank
from hf_pyao.text import describe_error, echo

logger = logging.getLogger(__name__)

SETTINGS = (
    *("policy", "window", "min_bytes", "keep_last_layers", "codec", "recompute_modules"),
    *Levers.names(),
)

"""Fields of the configuration that a profile holds."""

NUM_ROUNDS = 8
"""How often a plan's measuring begins anew where batches were empty, or layers frozen."""

LAST_WAIT_S = 10.0
"""How long the first rank waits for the others' figures when its training ends."""

_NOT_YET = "the run ended before it was recorded."
_INTERRUPTED = "its recording was interrupted."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What a profile is to be made of, and where it is written."""

    path: str | None
    """The JSON file; None: the profile is handed on, and not written."""
    num_micro_batches: int
    """How many are measured."""
    layers: Sequence[str]
    """``PyAOConfig.layers``."""
    levers: Levers
    """With which the model runs."""
    settings: Mapping[str, Any]
    """With what it is measured: the fields :data:`SETTINGS` of the configuration, as they are in
    force."""


class ProfileWriter:
    """Measures an engine's first micro-batches, and writes their profile or hands it on.

    Args:
        engine: what is measured.
        link: whose clock and host memory it uses.
        device: where the model is.
        asked: what is measured, and where it is written.
        title: a heading.
        identity: what tells the model.
        layer_names: qualified names of its layers.
        has_compiled_layers: whether some, or modules inside of them, are compiled.
        on_done: is handed the profile when it is complete, before a forward; None where none came
            of it. Not when training ends first.
        on_again: called when what was measured is of no use for *on_done*, and it begins anew.

    Raises:
        ReportError: there is a file already, and it is no profile of this version and this model.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        link: LinkContext,
        device: torch.device,
        asked: ProfileSettings,
        *,
        title: str,
        identity: Mapping[str, Any],
        layer_names: Sequence[str],
        has_compiled_layers: bool = False,
        on_done: Callable[[Profile | None], None] | None = None,
        on_again: Callable[[], None] | None = None,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._link = link
        self._device = device
        # Wherever the script goes meanwhile; None: it is handed on, and not written.
        self._path = None if asked.path is None else Path(os.path.abspath(asked.path))
        self._on_done = on_done
        self._levers = asked.levers
        self._layers = asked.layers
        self._settings = {name: asked.settings[name] for name in SETTINGS}
        self._settings["transport"] = link.transport.name
        self._title = title
        self._identity = dict(identity)
        self._layer_names = tuple(layer_names)
        self._has_compiled_layers = has_compiled_layers
        self._kept = None if self._path is None else _read_kept(self._path, self._identity)
        self.profile: Profile | None = None
        """What was measured, or read from the file; None until then."""
        self.is_complete = False
        """True when nothing more is measured, recorded or written."""
        self._exchange: RankExchange | None = None
        self._num_micro_batches = asked.num_micro_batches
        self._num_rounds_left = NUM_ROUNDS - 1
        self._on_again = on_again
        self._profiler = self._new_profiler()
        self._stalls_ms = engine.upload_stalls_ms()
        """Waits for streamed weights before what is measured."""
        self._watch: ForwardWatch | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._collectives = CollectiveTimes(link.transport, device)

    def _new_profiler(self) -> StepProfiler:
        return StepProfiler(
            self._link.transport,
            self._device,
            self._num_micro_batches,
            weakly(self._measured, None),  # the profiler is ours: [Note: Who owns whom]
            pinned_bytes=weakly(self._pinned_bytes, 0),
            gradient_bytes=weakly(self._gradient_bytes, 0),
            times_packs=self._path is not None,  # no plan is made from them
        )

    def _pinned_bytes(self) -> int:
        return self._link.tiers.pinned_bytes

    def _gradient_bytes(self) -> int:
        model = None if self._model is None else self._model()
        return 0 if model is None else gradient_bytes(model.parameters())

    def start(self, model: nn.Module, owner: object) -> None:
        """Begin; *owner* is who has the writer, and *model* what is trained."""
        engine = self._engine()
        if engine is not None:
            engine.observe_too(self._profiler)
        self._watch = ForwardWatch(model, owner, self._before_forward, Place.MEASURES)
        self._model = weakref.ref(model)

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        """Use the profile of an earlier run, if it is of the same; else go on."""
        if is_first and self._kept is not None:
            other = self._differs(self._kept, seen)
            if other is None:
                self._use_kept(self._kept)
                self._tell_done()
                return
            logger.info("the profile in %s is made anew: %s.", echo(str(self._path)), other)
        model = None if self._model is None else self._model()
        if self.profile is not None:
            self.finish()
        elif model is not None:  # which may be sharded since it was attached
            self._collectives.start(model)
            self._profiler.begin_forward()
        if self.is_complete:
            self._tell_done()

    def _tell_done(self) -> None:
        if self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done(self.profile)

    def _use_kept(self, kept: Profile) -> None:
        self.profile, self.is_complete = kept, True
        self._leave()
        logger.info(
            "the profile in %s is of this model, these shapes, this device and these versions: "
            "nothing is measured. Delete it to have it made anew.",
            echo(str(self._path)),
        )

    def _differs(self, kept: Profile, seen: SeenForward) -> str | None:
        """Say in what a profile differs from what runs; None if in nothing that matters."""
        ours = collect_provenance().versions
        theirs = kept.provenance.versions
        for what, then, now in (
            ("shapes", kept.shapes, seen.shapes()),
            ("device", kept.device, _name_of(self._device)),
            *((name, theirs.get(name), ours.get(name)) for name in ("torch", "transformers")),
        ):
            if then != now:
                return f"{what}: it has {echo(str(then))}, and here it is {echo(str(now))}"
        return None

    def _measured(self, profiler: StepProfiler) -> None:
        """Write what was measured. The rest follows in :meth:`finish`."""
        engine = self._engine()
        if engine is None:
            return
        engine.stop_observing(profiler)
        try:
            if self._is_of_no_use(profiler):
                self._measure_again(engine)
                return
            self._note_measured(profiler, engine.upload_stalls_ms())
        except Exception as error:  # no reason to end a training
            self._give_up(error)

    def _is_of_no_use(self, profiler: StepProfiler) -> bool:
        """Say whether nothing was copied, so that nothing can be planned."""
        is_wanted = self._on_done is not None and self._path is None
        return is_wanted and not profiler.has_copied and self._num_rounds_left > 0

    def _measure_again(self, engine: OffloadEngine) -> None:
        self._num_rounds_left -= 1
        self._profiler = self._new_profiler()
        engine.observe_too(self._profiler)
        self._stalls_ms = engine.upload_stalls_ms()
        if self._watch is not None:
            self._watch.forget()
        if self._on_again is not None:
            self._on_again()

    def _note_measured(self, profiler: StepProfiler, stalls_ms: tuple[float, float]) -> None:
        tiers = self._link.tiers
        host = {
            "capacity_bytes": float(tiers.capacity_bytes),
            "pinned_bytes": float(tiers.pinned_bytes),
        }
        seen = None if self._watch is None else self._watch.seen
        self.profile = profiler.profile(
            title=self._title,
            model=self._identity,
            layer_names=self._layer_names,
            device_name=_name_of(self._device),
            shapes=[] if seen is None else seen.shapes(),
            compiled_layers=self._has_compiled_layers,
            host=host,
            settings=self._settings,
            why_no_program=_NOT_YET,
        )
        # Waits for weights, streamed or gathered, are no compute, as those for activations are not.
        self._collectives.stop()
        waits_ms = profiler.within_ms(self._collectives.waits())
        for phase, before_ms, after_ms in zip(
            ("forward", "backward"), self._stalls_ms, stalls_ms, strict=True
        ):
            num_run = self._num_micro_batches + profiler.num_uncounted
            mean_ms = max(0.0, after_ms - before_ms) / num_run
            waits_ms[phase] = waits_ms.get(phase, 0.0) + mean_ms
        metrics = dict(self.profile.metrics)
        for phase, mean_ms in waits_ms.items():
            if mean_ms:
                key = f"stall_{phase}_ms"
                metrics[key] = metrics.get(key, 0.0) + mean_ms
        self.profile = dataclasses.replace(
            self.profile, metrics=metrics, collective_gib_per_s=self._collectives.gib_per_s()
        )
        self._exchange = RankExchange("profile")
        self._exchange.tell(json.dumps(to_plain(self.profile)))
        self._write()

    def finish(self, *, is_last: bool = False) -> None:
        """Record the step, and add what other ranks measured, if all have.

        Args:
            is_last: it is not called again: wait a little for them.
        """
        if self.profile is None or self.is_complete:
            return
        try:
            self._finish(is_last=is_last)
        except Exception as error:  # no reason to end a training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        warn(logger, "profile-incomplete", "the profile goes no further: %s", describe_error(error))
        self._complete()
        self._tell_done()

    def _finish(self, *, is_last: bool) -> None:
        assert self.profile is not None
        if not process_rank().is_first:
            self._complete()
            return
        changed = False
        if self.profile.program is None and self.profile.why_no_program == _NOT_YET:
            # An interrupt is not answered by recording it once more.
            self.profile = dataclasses.replace(self.profile, why_no_program=_INTERRUPTED)
            program, why = self._recorded()
            seen = None if self._watch is None else self._watch.seen
            shapes = self.profile.shapes or ([] if seen is None else seen.shapes())
            self.profile = dataclasses.replace(
                self.profile, shapes=shapes, program=program, why_no_program=why
            )
            changed = True
        if self._exchange is not None and self._exchange.num_ranks > 1:
            texts = self._exchange.heard(wait_s=LAST_WAIT_S if is_last else 0.0)
            if texts is not None:
                others = [Profile.from_dict(json.loads(text)) for text in texts[1:]]
                self.profile = merge_profiles([self.profile, *others])
                changed = True
            elif is_last:
                warn(
                    logger,
                    "profile-incomplete",
                    "the profile covers one rank only: not all of the others sent theirs.",
                )
            else:
                self._write_if(changed)
                return
        self._write_if(changed)
        self._complete()

    def _recorded(self) -> tuple[dict[str, Any] | None, str]:
        """Return the recorded step, or why there is none."""
        try:
            if self._watch is None:
                raise CopyError(_NOT_YET)
            if self._watch.is_compiled:
                return None, "the model is compiled as a whole."
            step = self._watch.step()
            recorded, _ = record_fake_step(step, levers=self._levers, layers=self._layers)
            if self._has_compiled_layers and (why := self._saves_others(recorded)):
                return None, why
            return recorded.to_dict(), ""
        except CopyError as error:
            return None, f"{error}"
        except Exception as error:  # no reason to end a training
            return None, f"it could not be recorded: {describe_error(error)}"

    def _saves_others(self, recorded: RecordedStep) -> str:
        """Say that *recorded* saves other tensors than were measured; empty if it does not.

        Asked where layers are compiled: what they save is the compiler's choice.
        """
        assert self.profile is not None
        predicted = Counter(slot.name for slot in recorded.whole().slots)
        measured = {slot.name: slot.num_layers for slot in self.profile.slots}
        if predicted == measured:
            return ""
        return (
            f"its compiled layers save {sum(measured.values())} tensors, and those of a copy "
            f"{predicted.total()}. Layers beyond torch's recompile limit run uncompiled: with "
            "use_cache=False one code serves all layers."
        )

    def _write_if(self, changed: bool) -> None:
        if changed:
            self._write()

    def _write(self) -> None:
        if self._path is None or not process_rank().is_first:
            return
        try:
            write_json(self._path, self.profile)
            logger.info("the profile is written: %s", self._path)
        except PyAOError as error:  # no reason to end a training
            warn(logger, "file-unwritable", "the profile is lost: %s", error)

    def _complete(self) -> None:
        self.is_complete = True
        self._leave()

    def cancel(self) -> None:
        """Measure no more for someone who has decided without it."""
        self._on_done = None
        if self._path is None and not self.is_complete:
            self._complete()

    def _leave(self) -> None:
        self._collectives.stop()
        if self._watch is not None:
            self._watch.remove()
        engine = self._engine()
        if engine is not None:
            engine.stop_observing(self._profiler)

    def end(self) -> None:
        """Finish the profile, and take everything off. Twice is fine."""
        try:
            if (
                self.profile is None
                and self._path is not None
                and self._watch is not None
                and not self.is_complete
            ):
                warn(
                    logger,
                    "profile-incomplete",
                    "no profile is written: it is of %d micro-batches, and fewer ran forward and "
                    "backward with offloaded layers. Ask for fewer (`profile_steps`), or train "
                    "longer.",
                    self._num_micro_batches,
                )
                self.is_complete = True
            if self._path is not None:  # else no one waits for it any more
                self.finish(is_last=True)
        finally:
            self._leave()


def _read_kept(path: Path, identity: Mapping[str, Any]) -> Profile | None:
    """Return the profile of an earlier run; None if there is none.

    Raises:
        ReportError: the file is none, is of another version, or of another model.
    """
    if not path.is_file() and not path.is_dir():
        return None  # also where it is a device or a pipe, which is written to and not read
    remedy = "Name another file, or delete this one."
    where = echo(str(path))
    try:
        kept = Profile.from_dict(read_json(path), where)
    except ReportError as error:
        raise ReportError(
            f"{error} A profile is to be written there: {remedy}", key="file-kind"
        ) from error
    for key, value in identity.items():
        if kept.model.get(key) != value:
            raise ReportError(
                f"{where} is the profile of another model: its {key} is "
                f"{echo(str(kept.model.get(key)))}, and here it is {echo(str(value))}. {remedy}",
                key="profile-other-model",
            )
    return kept


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type.upper()
