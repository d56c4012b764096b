"""The command-line flags: ``PyAOArguments``, and ``PyAOTrainingArguments`` which has them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from hf_pyao.auto.install.conflicts import check_other_offloaders
from hf_pyao.config import SETTINGS, PyAOConfig, file_labels, is_switched_off, read_settings
from hf_pyao.errors import ConfigError, warn
from hf_pyao.hf.flags import flag_of, flag_text
from hf_pyao.hf.micro_batch.checks import check_auto_micro_batch
from hf_pyao.hf.setting_fields import ArgumentFields
from hf_pyao.no_effect import EffectLedger, NoEffect
from hf_pyao.plan.documents.run import check_report_path
from hf_pyao.settings.removed import REMOVED_SETTINGS, refuse_removed
from hf_pyao.text import echo

logger = logging.getLogger(__name__)

_HEAD_LOSS_ALONE = (
    "--activation_offload --activation_offload_policy off --activation_offload_head_loss"
)


_NOT_HEEDED = NoEffect(
    setting="activation_offload",
    expected="what the layers save for backward leaves the device",
    seen="training begins, and nothing of hf_pyao is attached",
    reason="the trainer does not know this flag",
    remedy="train with PyAOTrainer instead of Trainer, or with a class that has PyAOTrainerMixin "
    "first among its bases; or add a PyAOCallback",
)


@dataclass
class PyAOArguments(ArgumentFields):
    """The ``--activation_offload...`` flags, to be mixed into any ``TrainingArguments`` subclass.

    ```python
    @dataclass
    class MySFTConfig(PyAOArguments, SFTConfig):
        pass
    ```

    Mix it in (named first, so that its checks run at once) rather than parse it beside the training
    arguments: the trainer finds the flags in its ``args``, and only a class that has the flags
    keeps argparse from taking ``--activation_offload`` for an abbreviation of TRL's
    ``--activation_offloading``. Each :class:`PyAOConfig` field has its flag here, of the same name
    with the prefix ``activation_offload_``; None stands for "not given".
    """

    def __post_init__(self) -> None:
        """Let the other bases check themselves, then check the flags."""
        parent_post_init = getattr(super(), "__post_init__", None)
        if parent_post_init is not None:
            parent_post_init()
        self.check_pyao_arguments()

    def check_pyao_arguments(self) -> None:
        """Check all flags, before any training; also done when the instance is made.

        Only a class that lists :class:`PyAOArguments` after its other bases has reason to call it.

        Raises:
            ConfigError: a flag or the file's content is bad, or a flag is given while
                ``activation_offload`` is off.
            ConflictError: offloading is on, and another offloader of activations too; or the
                micro-batch is to be chosen, and transformers would change it.
        """
        config = self.pyao_config()
        if config is not None and not is_switched_off():
            check_other_offloaders(self)
            check_auto_micro_batch(self, config)
            check_report_path(config.report, config.label("report"))

    def pyao_config(self) -> PyAOConfig | None:
        """Return the configuration that file and flags give; None if offloading is off.

        Raises:
            ConfigError: as :meth:`check_pyao_arguments`.
        """
        if not isinstance(self.activation_offload, bool):
            raise ConfigError(
                f"activation_offload is {echo(self.activation_offload)}; expected True or False. "
                "If it was meant as another class's first positional argument, list PyAOArguments "
                "before that class among the bases.",
                key="mixin-order",
            )
        if self.activation_offload:
            return PyAOConfig.from_dict(*self._settings_and_labels())
        flags = self._given_flags()
        idle = [flag_text(name) for name in flags]
        if self.activation_offload_config is not None:
            idle.insert(0, flag_text("config"))
        if not idle:
            return None
        alone = ""
        if "head_loss" in flags:
            alone = f" For the head loss alone: {_HEAD_LOSS_ALONE} {flags['head_loss']}."
        raise ConfigError(
            f"offloading is off, so {', '.join(idle)} would have no effect. Add "
            f"--activation_offload (activation_offload=True), or drop what depends on it.{alone}",
            key="setting-without-effect",
        )

    def given_pyao_settings(self) -> dict[str, Any]:
        """Return what was given, by PyAOConfig field: the file's settings, the flags over them.

        A flag that overrules a different value of the file is logged, once.

        Raises:
            ConfigError: the file is missing, or holds a bad key or value.
        """
        return self._settings_and_labels()[0]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return what the base class does; warn if a plain Trainer trains, which knows no flags.

        Trainer asks for it when training begins, and it is the only thing that it asks then: by
        that time one of ours has read its arguments.
        """
        if self.activation_offload and not self.is_heeded and not is_switched_off():
            EffectLedger().note(_NOT_HEEDED)
        num_steps: int = super().get_warmup_steps(num_training_steps)  # type: ignore[misc]
        return num_steps

    # No annotations: these must not become fields, and thereby flags.
    is_heeded = False
    """True once a trainer or callback of ours has them."""
    _has_logged_overruled = False

    def _settings_and_labels(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what was given, and how messages call each setting: by its flag, or its file."""
        flags, path = self._given_flags(), self.activation_offload_config
        labels = {name: flag_text(name) for name in SETTINGS}
        if path is None:
            return flags, labels
        in_file, in_file_labels = read_settings(path), file_labels(path)
        overruled = [n for n in sorted(flags) if n in in_file and flags[n] != in_file[n]]
        if overruled and not self._has_logged_overruled:
            self._has_logged_overruled = True
            for name in overruled:
                values = echo(flags[name]), name, echo(in_file[name]), path
                warn(
                    logger,
                    "setting-given-twice",
                    "%s %s wins over %s=%s in %s",
                    flag_text(name),
                    *values,
                )
        labels |= {name: in_file_labels[name] for name in in_file.keys() - flags.keys()}
        return {**in_file, **flags}, labels

    def _given_flags(self) -> dict[str, Any]:
        """Return the knobs that were given, checked one by one, by PyAOConfig field."""
        for name in REMOVED_SETTINGS:
            refuse_removed(name, flag_text(name), getattr(self, flag_of(name)))
        values = {name: getattr(self, flag_of(name)) for name in SETTINGS}
        return {
            name: SETTINGS[name].check(flag_text(name), value)
            for name, value in values.items()
            if value is not None
        }


@dataclass
class PyAOTrainingArguments(PyAOArguments, TrainingArguments):
    """``transformers.TrainingArguments`` with the ``--activation_offload...`` flags.

    Usable wherever the base class is: ``HfArgumentParser``, JSON files, saved
    ``training_args.bin``. Offloading is off unless ``activation_offload`` is given.
    """
