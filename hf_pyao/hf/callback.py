"""``PyAOCallback``: offloading for a Trainer whose class cannot be changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_pyao.attachment import attach
from hf_pyao.auto.effects.arguments import look_at_arguments, warn_of_sequence_parallel
from hf_pyao.auto.install.conflicts import check_checkpointing_arguments, check_training_arguments
from hf_pyao.auto.install.run_record import LOG_PREFIX
from hf_pyao.auto.policy import PLAN_FILE
from hf_pyao.config import SWITCHED_OFF, PyAOConfig, is_switched_off
from hf_pyao.hf.accumulation import said_of_accumulation
from hf_pyao.hf.announce import announce
from hf_pyao.hf.arguments import PyAOArguments
from hf_pyao.hf.disk_writes import check_disk_writes
from hf_pyao.hf.micro_batch.checks import refuse_without_trainer
from hf_pyao.plan.documents.run import FINISHED, UNKNOWN

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_pyao.auto.offloader import Offloader
    from hf_pyao.plan.documents.plan import Plan

logger = logging.getLogger(__name__)


class PyAOCallback(TrainerCallback):
    """Offload while the Trainer trains: ``Trainer(..., callbacks=[PyAOCallback(config)])``.

    The model is attached when training begins (it has its final wrapping then) and detached when
    training ends. A Trainer tells its callbacks little, so that these things need
    :class:`~hf_pyao.PyAOTrainerMixin` instead:

    - After an out-of-memory error a micro-batch does not run again: training ends with the error.
    - After an exception in training the model stays attached until :meth:`detach` is called. The
      report is written then, or else when the process ends.
    - Trackers that are registered before this callback, such as those of ``report_to``
      (TensorBoard, W&B, ...), get no ``pyao/`` metrics. The log history and callbacks that are
      added later do.
    - With ``stream_weights``, Trainer moves the whole model to the device before it is attached:
      all weights must fit there once. Evaluation outside of training is not streamed.
    - ``auto_micro_batch`` is refused.
    - A training that resumes from a checkpoint does not take up the plan that lies there.
    - A run that would write more than ``disk_write_limit`` is not refused before it trains. Writing
      ends at the limit.

    Args:
        config: what to offload and how; None for what the flags in the training arguments say, if
            ``activation_offload`` is among them and on, else the defaults.
        trainer_chooses_micro_batch: the Trainer makes the choice that ``auto_micro_batch`` asks
            for; its mixin gives this.
    """

    def __init__(
        self, config: PyAOConfig | None = None, *, trainer_chooses_micro_batch: bool = False
    ) -> None:
        self.config = config
        self.offloader: Offloader | None = None
        self._last_totals: dict[str, float] = {}
        self._state: TrainerState | None = None
        self._is_attached_early = False
        """True from an attachment before training until training begins."""
        self._trainer_chooses_micro_batch = trainer_chooses_micro_batch
        self._resumed_from: str | None = None
        """The checkpoint that training goes on from, if it does."""
        self._disk_bytes: int | None = None
        """Predicted bytes that a micro-batch writes to the disk; None: not known."""
        self._first_plan: Plan | None = None
        """What policy ``auto`` is to follow from the start; None: it measures, and plans itself."""

    def go_on_from(self, checkpoint: str | None) -> None:
        """Take up the plan in *checkpoint* as training begins; None: it goes on from none."""
        self._resumed_from = checkpoint

    def begin_with(self, plan: Plan | None) -> None:
        """Have policy ``auto`` follow *plan* from the start; None: it makes one itself."""
        self._first_plan = plan

    def expect_disk_writes(self, micro_batch_bytes: int | None) -> None:
        """Check what a micro-batch writes to the disk as training begins; None: not known."""
        self._disk_bytes = micro_batch_bytes

    @property
    def totals(self) -> dict[str, float]:
        """Sums and peaks of the running training, or of the last one when none is running."""
        return self.offloader.totals() if self.offloader is not None else self._last_totals

    def logged_metrics(self) -> dict[str, float]:
        """Return what of the last micro-batch's metrics goes to the logs, under its names there."""
        if self.offloader is None:
            return {}
        metrics = self.offloader.record.logged_metrics()
        return {f"{LOG_PREFIX}{key}": value for key, value in metrics.items()}

    def detach(self, outcome: str | None = None) -> None:
        """Remove everything from the model; its totals stay readable. Idempotent.

        Args:
            outcome: how training ended, for the report, as in :meth:`~hf_pyao.Offloader.detach`.
        """
        offloader, self.offloader = self.offloader, None
        self._is_attached_early = False
        if offloader is None:
            return
        self._note_steps(offloader)
        try:
            offloader.detach(outcome)
        finally:
            self._last_totals = offloader.totals()

    def attach_before_training(self, model: nn.Module, args: TrainingArguments) -> None:
        """Attach to *model* before Trainer moves and wraps it: its weights are to be streamed.

        Raises:
            ConfigError: they cannot be.
            ConflictError: see ``../auto/install/conflicts.py``.
        """
        self.detach(UNKNOWN)
        config = self.config or _config_of(args)
        self.offloader = attach(model, config, device=args.device)
        self._is_attached_early = True

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note in the training arguments, if they have flags of ours, that they are heeded.

        Raises:
            ConflictError: see ``../auto/install/conflicts.py``.
            ConfigError: only a Trainer of ours can do what is asked for.
        """
        if isinstance(args, PyAOArguments):
            args.is_heeded = True
        if not is_switched_off():
            self._checked_config(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Attach to the model.

        Raises:
            ConflictError: see ``../auto/install/conflicts.py``.
            ConfigError: more would be written to the disk than may be.
        """
        if is_switched_off():
            log_and_show(SWITCHED_OFF, args, state)
            return
        # With auto_find_batch_size this event comes once per try and the end only once; what a try
        # that ran out of memory left behind must go, and the model may have been wrapped anew.
        if self._is_attached_early:
            self._is_attached_early = False
        else:
            self.detach(UNKNOWN)
        config = self._checked_config(args)
        assert model is not None, "Trainer passes the model to every event"
        if self._disk_bytes is not None:
            num_steps = state.max_steps - state.global_step
            check_disk_writes(self._disk_bytes, args.gradient_accumulation_steps, num_steps, config)
        self._state = state
        self.offloader = attach(model, config, device=args.device)
        warn_of_sequence_parallel(args)
        for fact in look_at_arguments(args, config):
            self.offloader.engine.effects.note(fact)
        if self.offloader.auto is not None:
            self.offloader.auto.show_on(lambda line: log_and_show(line, args, state))
            if self._resumed_from is not None:
                self.offloader.auto.resume(Path(self._resumed_from) / PLAN_FILE)
            if self._first_plan is not None and self.offloader.auto.plan is None:
                self.offloader.auto.follow(self._first_plan, "the plan for this micro-batch")
        _show(self.offloader.describe(), args, state)
        if line := said_of_accumulation(self.offloader, args.gradient_accumulation_steps):
            log_and_show(line, args, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn, once, if a step went by in which nothing was offloaded."""
        if self.offloader is not None:
            self.offloader.warn_if_idle()
            # As it goes: should training fail, perhaps no one will ask us again.
            self._note_steps(self.offloader)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the plan of policy ``auto`` beside the checkpoint, for a run that resumes from it."""
        if self.offloader is None or self.offloader.auto is None or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if folder.is_dir():
            self.offloader.auto.save(folder / PLAN_FILE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to training logs (those with a ``loss``) and to the log history."""
        if not logs or "loss" not in logs:
            return
        added = {key: value for key, value in self.logged_metrics().items() if key not in logs}
        logs.update(added)
        state.log_history[-1].update(added)  # Trainer.log has just put a copy of `logs` there

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach, which writes the report that the configuration asks for."""
        offloader = self.offloader
        self.detach(FINISHED)
        if offloader is not None:
            _show(offloader.record.describe_end(), args, state)

    def _checked_config(self, args: TrainingArguments) -> PyAOConfig:
        """Return what is to be done, after a look whether *args* allow it."""
        config = self.config or _config_of(args)
        check_training_arguments(args)
        if not self._trainer_chooses_micro_batch:
            refuse_without_trainer(config, "a callback")
        check_checkpointing_arguments(args, config.effective().checkpoint_every)
        return config

    def _note_steps(self, offloader: Offloader) -> None:
        if self._state is not None:
            offloader.report_extra["num_steps"] = self._state.global_step


def _config_of(args: object) -> PyAOConfig:
    """Return what the flags among training arguments say, if there are any; else the defaults."""
    config = args.pyao_config() if isinstance(args, PyAOArguments) else None
    return PyAOConfig() if config is None else config


def log_and_show(line: str, args: TrainingArguments, state: TrainerState) -> None:
    """Log *line*, and show it once."""
    logger.info("%s", line)
    _show(line, args, state)


def _show(line: str, args: TrainingArguments, state: TrainerState) -> None:
    """Show *line* once, where Trainer shows its logs: over the progress bar, or plainly."""
    if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
        announce(line, print if args.disable_tqdm else tqdm.write)
