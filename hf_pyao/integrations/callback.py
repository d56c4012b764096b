"""``PyAOCallback``: offloading for a Trainer whose class cannot be changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_pyao.config import PyAOConfig
from hf_pyao.integrations.attach import attach
from hf_pyao.integrations.conflicts import check_training_arguments, uses_checkpointing
from hf_pyao.report import write_run_report

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_pyao.integrations.attach import Offloader

logger = logging.getLogger(__name__)

LOG_PREFIX = "pyao/"
"""Put before each metric's name in the training logs."""


class PyAOCallback(TrainerCallback):
    """Offload while the Trainer trains: ``Trainer(..., callbacks=[PyAOCallback(config)])``.

    The model is attached when training begins (it has its final wrapping then) and detached when
    training ends. Two things need :class:`~hf_pyao.PyAOTrainerMixin` instead: a Trainer calls no
    callback when training *fails*, so that the model stays attached (call :meth:`detach`); and it
    tells its own reporters (TensorBoard, W&B, ...) the logs before this callback sees them, so that
    the ``pyao/`` metrics reach only the log history and callbacks added later.

    Args:
        config: what to offload and how; None for the defaults.
    """

    def __init__(self, config: PyAOConfig | None = None) -> None:
        self.config = config if config is not None else PyAOConfig()
        self.offloader: Offloader | None = None
        self._last_totals: dict[str, float] = {}
        self._has_warned_checkpointing = False

    @property
    def totals(self) -> dict[str, float]:
        """Sums and peaks of the running training, or of the last one when none is running."""
        return self.offloader.totals() if self.offloader is not None else self._last_totals

    def log_metrics(self) -> dict[str, float]:
        """Return the last micro-batch's metrics under their names in the logs."""
        if self.offloader is None:
            return {}
        return {f"{LOG_PREFIX}{key}": value for key, value in self.offloader.metrics().items()}

    def detach(self) -> None:
        """Remove everything from the model; its totals stay readable. Idempotent."""
        offloader, self.offloader = self.offloader, None
        if offloader is None:
            return
        try:
            self._last_totals = offloader.totals()
        finally:
            offloader.detach()

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
            ConflictError: see ``conflicts.py``.
        """
        # With auto_find_batch_size this event comes once per try and the end only once; what a try
        # that ran out of memory left behind must go, and the model may have been wrapped anew.
        self.detach()
        check_training_arguments(args)
        if uses_checkpointing(args) and not self._has_warned_checkpointing:
            self._has_warned_checkpointing = True
            logger.warning(
                "gradient checkpointing is on: autograd then saves only each layer's input, and "
                "only that is offloaded. To offload instead of recomputing, set "
                "gradient_checkpointing=False (activation_checkpointing=False from transformers "
                "5.23 on); TRL's configs switch it on by default."
            )
        assert model is not None, "Trainer passes the model to every event"
        self.offloader = attach(model, self.config)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn, once, if a step went by in which nothing was offloaded."""
        if self.offloader is not None:
            self.offloader.warn_if_idle()

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
        added = {key: value for key, value in self.log_metrics().items() if key not in logs}
        logs.update(added)
        state.log_history[-1].update(added)  # Trainer.log has just put a copy of `logs` there

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the report that the configuration asks for, and detach."""
        if self.offloader is not None and state.is_world_process_zero:
            write_run_report(self.offloader, extra={"num_steps": state.global_step})
        self.detach()
