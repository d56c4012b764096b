"""``PyAOTrainer``, and the mixin that gives offloading to any Trainer subclass."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_pyao.auto.install.conflicts import (
    check_checkpointing_arguments,
    check_engine_of_streaming,
    check_modules,
    check_other_checkpointing,
    check_training_arguments,
)
from hf_pyao.auto.install.weights import check_can_stream
from hf_pyao.auto.retry.repeatable_inputs import RepeatableInputs
from hf_pyao.config import SWITCHED_OFF, PyAOConfig, is_switched_off
from hf_pyao.errors import ConfigError
from hf_pyao.hf.arguments import PyAOArguments
from hf_pyao.hf.callback import PyAOCallback, log_and_show
from hf_pyao.hf.disk_writes import predicted_disk_bytes
from hf_pyao.hf.micro_batch.before_training import choose_batch
from hf_pyao.hf.micro_batch.checks import check_auto_micro_batch
from hf_pyao.hf.micro_batch.take_batch import take_batch
from hf_pyao.plan.documents.run import FINISHED, UNKNOWN, outcome_of

if TYPE_CHECKING:
    from hf_pyao.auto.offloader import Offloader

    _TrainerBase = Trainer
else:
    _TrainerBase = object


class PyAOTrainerMixin(_TrainerBase):
    """Offloading for any ``Trainer`` subclass.

    ```python
    class MySFTTrainer(PyAOTrainerMixin, SFTTrainer):
        pass
    ```

    Name it before the trainer class. With ``args`` that have the ``--activation_offload...`` flags
    (``PyAOTrainingArguments``, or a class with ``PyAOArguments`` mixed in) the flags decide; with
    any other ``args`` offloading is on, with the defaults or as *pyao_config* says.

    Args:
        pyao_config: what to offload and how. Beside flags it must not contradict them.

    Raises:
        ConfigError: *pyao_config* contradicts the flags, or a flag is bad.
        ConflictError: see ``../auto/install/conflicts.py``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which Trainer's methods hide those of the mixin.

        Raises:
            ConfigError: the mixin comes after the trainer class.
        """
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if Trainer in bases and bases.index(Trainer) < bases.index(PyAOTrainerMixin):
            order = ", ".join(
                base.__name__
                for base in sorted(cls.__bases__, key=lambda base: issubclass(base, Trainer))
            )
            raise ConfigError(
                f"{cls.__name__} lists PyAOTrainerMixin after the trainer class, whose methods "
                f"then hide those of the mixin, and nothing would be offloaded. Name the mixin "
                f"first: class {cls.__name__}({order}).",
                key="mixin-order",
            )

    def __init__(self, *args: Any, pyao_config: PyAOConfig | None = None, **kwargs: Any) -> None:
        self._pyao_callback: PyAOCallback | None = None
        # Before the base class: preparing data can take long, and TRL sets its offloader up there.
        given = (value for value in (*args, kwargs.get("args")))
        training_args = next((v for v in given if isinstance(v, TrainingArguments)), None)
        config = _resolve_config(training_args, pyao_config)
        if config is not None and is_switched_off():
            logging.getLogger(__name__).info(SWITCHED_OFF)
            config = None
        if config is not None and training_args is not None:
            check_training_arguments(training_args)
            check_auto_micro_batch(training_args, config)
            check_checkpointing_arguments(training_args, config.effective().checkpoint_every)
        model = next((v for v in (*args, kwargs.get("model")) if isinstance(v, nn.Module)), None)
        if config is not None and model is not None:
            check_modules(model)
            if length := config.effective().checkpoint_every:
                check_other_checkpointing(model, length)
        self._pyao_streams = config is not None and config.stream_weights != "off"
        if self._pyao_streams:
            assert config is not None
            _check_streaming(config, training_args, model, kwargs)
        super().__init__(*args, **kwargs)
        if config is not None:
            self._pyao_callback = PyAOCallback(config, trainer_chooses_micro_batch=True)
            self.add_callback(self._pyao_callback)
            self._pyao_callback.on_init_end(self.args, self.state, self.control)

    @property
    def pyao_offloader(self) -> Offloader | None:
        """The attached offloader; None outside :meth:`train`, and when offloading is off."""
        return self._pyao_callback.offloader if self._pyao_callback is not None else None

    @property
    def offloader(self) -> Offloader | None:
        """The same as :attr:`pyao_offloader`, which no trainer class uses for something else."""
        return self.pyao_offloader

    @property
    def offload_metrics(self) -> dict[str, float]:
        """Sums and peaks over the running training, or over the last one after it has ended."""
        return self._pyao_callback.totals if self._pyao_callback is not None else {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; whatever happens, the model is detached afterwards."""
        if self._pyao_callback is not None:
            resume = args[0] if args else kwargs.get("resume_from_checkpoint")
            self._pyao_callback.go_on_from(_checkpoint_of(resume, self.args.output_dir))
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:
            # Trainer skips on_train_end when training fails or is interrupted.
            if self._pyao_callback is not None:
                self._pyao_callback.detach(outcome_of(error))
            raise
        if self._pyao_callback is not None:
            self._pyao_callback.detach(FINISHED)
        return result

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a micro-batch as the base class does; run it again, in less, where it did not fit.

        With ``auto_find_batch_size`` an out-of-memory error goes through, as that wants it.

        Raises:
            OutOfDeviceMemoryError: see :meth:`hf_pyao.Offloader.run_micro_batch`.
        """
        step = super().training_step
        offloader = self.pyao_offloader
        if offloader is None or self.args.auto_find_batch_size:
            return step(model, inputs, *args, **kwargs)
        given = RepeatableInputs(inputs)
        return offloader.run_micro_batch(
            lambda: step(model, given(), *args, **kwargs), writes_only_this_model=True
        )

    def _inner_training_loop(self, batch_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does, with the micro-batch that is chosen, if one is.

        The last moment at which the model is there as it will be trained, and no data yet.
        """
        callback = self._pyao_callback
        config = None if callback is None else callback.config
        if callback is not None and config is not None and config.auto_micro_batch != "off":
            check_auto_micro_batch(self.args, config)
            chosen = choose_batch(self, config)
            batch_size = take_batch(self, chosen.micro_batch, chosen.accumulation)
            callback.begin_with(chosen.plan)
            log_and_show(chosen.words, self.args, self.state)
        if callback is not None and config is not None:
            callback.expect_disk_writes(predicted_disk_bytes(self, config))
        if callback is not None and self._pyao_streams and self.model is not None:
            callback.attach_before_training(self.model, self.args)
        return super()._inner_training_loop(batch_size, *args, **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model whose weights are streamed where it is: ``attach`` moves the rest."""
        if not self._pyao_streams:
            super()._move_model_to_device(model, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the base class does; streamed weights stream outside of training too."""
        callback = self._pyao_callback
        model = self.model if self._pyao_streams else None
        if callback is None or model is None or callback.offloader is not None:
            return super().evaluation_loop(*args, **kwargs)
        callback.attach_before_training(model, self.args)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            callback.detach(UNKNOWN)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log as the base class does, with the offloading metrics added to training logs."""
        # Here and not in the callback: reporters get the logs before callbacks added by users.
        if self._pyao_callback is not None and "loss" in logs:
            logs.update(self._pyao_callback.logged_metrics())
        super().log(logs, *args, **kwargs)


class PyAOTrainer(PyAOTrainerMixin, Trainer):
    """``transformers.Trainer`` with offloading; see :class:`PyAOTrainerMixin`."""


def _check_streaming(
    config: PyAOConfig,
    training_args: TrainingArguments | None,
    model: nn.Module | None,
    kwargs: Any,
) -> None:
    """Refuse, before data is prepared, what cannot go together with streamed weights."""
    label = config.label("stream_weights")
    if training_args is not None:
        check_engine_of_streaming(training_args, label)
    if model is not None:  # with `peft_config`, TRL adds the adapters itself
        has_adapters_to_come = kwargs.get("peft_config") is not None
        check_can_stream(model, config, will_be_frozen=has_adapters_to_come)


def _checkpoint_of(resume: object, output_dir: str | None) -> str | None:
    """Return the folder that training resumes from; None if it does not."""
    if resume is True and output_dir is not None and os.path.isdir(output_dir):
        found: str | None = get_last_checkpoint(output_dir)
        return found
    return resume if isinstance(resume, str) else None


def _resolve_config(args: object, pyao_config: PyAOConfig | None) -> PyAOConfig | None:
    """Return the configuration to train with, None for no offloading."""
    if not isinstance(args, PyAOArguments):
        return PyAOConfig() if pyao_config is None else pyao_config
    from_flags = args.pyao_config()
    if pyao_config is None:
        return from_flags
    if from_flags is None:
        raise ConfigError(
            "pyao_config was given, but the training arguments say activation_offload=False. "
            "Pass activation_offload=True (--activation_offload), or drop pyao_config.",
            key="settings-contradict",
        )
    given = args.given_pyao_settings()
    for name in given:
        if name in pyao_config.left_open:
            continue
        flag, argument = getattr(from_flags, name), getattr(pyao_config, name)
        if flag != argument:
            raise ConfigError(
                f"the training arguments say {name}={flag!r} (activation_offload_{name}, or the "
                f"configuration file), and pyao_config says {name}={argument!r}. Drop one of them.",
                key="settings-contradict",
            )
    return pyao_config.with_settings(
        **{name: getattr(from_flags, name) for name in given if name in pyao_config.left_open}
    )
