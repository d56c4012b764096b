"""The command-line flags: ``PyAOArguments``, and ``PyAOTrainingArguments`` which has them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.integrations.conflicts import check_other_offloaders

logger = logging.getLogger(__name__)

_PREFIX = "activation_offload_"
_CONFIG_DEFAULTS = {f.name: f.default for f in fields(PyAOConfig)}


def _help(name: str, text: str) -> dict[str, str]:
    """Make the metadata of the flag for the PyAOConfig field *name*; states the default there.

    The flag itself defaults to None, so that "given" can be told from "default".
    """
    default = _CONFIG_DEFAULTS[name]
    stated = "" if default in (None, ()) else f" (default: {default})"
    # The empty %(default) keeps argparse from adding "(default: None)", which is not the default.
    return {"help": f"{text}{stated}%(default).0s"}


@dataclass
class PyAOArguments:
    """The ``--activation_offload...`` flags, to be mixed into any ``TrainingArguments`` subclass.

    ```python
    @dataclass
    class MySFTConfig(PyAOArguments, SFTConfig):
        pass
    ```

    Mix it in (named first, so that its checks run at once) rather than parse it beside the training
    arguments: the trainer finds the flags in its ``args``, and only a class that has the flags
    keeps argparse from taking ``--activation_offload`` for an abbreviation of TRL's
    ``--activation_offloading``. A new :class:`PyAOConfig` field needs one line here, of the same
    name with the prefix ``activation_offload_``.
    """

    activation_offload: bool = field(
        default=False,
        metadata={
            "help": "Move what backward needs from device to host memory during forward, and back "
            "in time for backward. Turn it on when activations, not weights, fill the device: a "
            "larger micro-batch or longer sequences then fit, with the same gradients."
        },
    )
    activation_offload_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON file with any of the settings below, under the same names without the "
            "prefix; PyAOConfig.to_json_file writes one. A flag given beside it wins."
            "%(default).0s"
        },
    )
    activation_offload_policy: str | None = field(
        default=None,
        metadata=_help(
            "policy",
            "Which saved tensors leave the device. 'all': every one that is large enough, the "
            "most memory freed. 'modules': only those of --activation_offload_modules; choose it "
            "when the link to the host is the bottleneck.",
        ),
    )
    activation_offload_codec: str | None = field(
        default=None,
        metadata=_help(
            "codec",
            "How tensors are written on the host. 'identity' is exact. A smaller format moves "
            "fewer bytes, for when copies and not compute set the step time: 'int8' has about the "
            "gradient error of bf16 autocast, 'fp8' suits models with ReLU better.",
        ),
    )
    activation_offload_modules: list[str] | None = field(
        default=None,
        metadata=_help(
            "modules",
            "With policy 'modules': the parts of a layer whose saved tensors leave, separated by "
            "spaces. Roles such as mlp_act or core_attn, or module names inside a layer, * as "
            "wildcard. The MLP's (mlp_act, mlp_down) free the most.",
        ),
    )
    activation_offload_recompute_modules: list[str] | None = field(
        default=None,
        metadata=_help(
            "recompute_modules",
            "The parts of a layer whose tensors are neither kept nor moved but computed again in "
            "backward, named as in --activation_offload_modules. 'pointwise': all that needs no "
            "matrix product, the most bytes for the least time.",
        ),
    )
    activation_offload_keep_last_layers: int | None = field(
        default=None,
        metadata=_help(
            "keep_last_layers",
            "Number of last layers whose tensors stay on the device. Backward begins with them, "
            "so offloading them only costs time; raise it as far as memory allows.",
        ),
    )
    activation_offload_min_bytes: int | None = field(
        default=None,
        metadata=_help(
            "min_bytes",
            "Saved tensors smaller than this many bytes stay on the device. Raise it if there are "
            "many small copies, lower it only to free the last few MiB.",
        ),
    )
    # `int` comes first: HfArgumentParser takes the second member of such a union as the type to
    # parse, and "layer" is no number.
    activation_offload_window: int | str | None = field(
        default=None,
        metadata=_help(
            "window",
            "How much may be in flight. 'layer': copies are waited for at the end of every layer, "
            "the tightest memory. A number of bytes: copies run on under later layers as long as "
            "no more than that waits; faster, and that much more device memory.",
        ),
    )
    activation_offload_copy_streams: int | None = field(
        default=None,
        metadata=_help(
            "copy_streams",
            "Streams for copies. 2: one for each direction, the fastest. 1: both directions on "
            "one. 0: on the compute stream, without any overlap; 1 and 0 serve comparison.",
        ),
    )
    activation_offload_host_memory_gib: float | None = field(
        default=None,
        metadata=_help(
            "host_memory_gib",
            "Most host memory for offloaded tensors, in GiB (2**30 bytes), for each process; what "
            "does not fit stays on the device. Set it when several jobs or ranks share a host "
            "(default: half of what is available at the start).",
        ),
    )
    activation_offload_head_loss: str | None = field(
        default=None,
        metadata=_help(
            "head_loss",
            "How the loss is computed from the last hidden states. 'off': as the model does. "
            "'chunked': without ever holding all logits, which frees much when the vocabulary is "
            "large. 'liger': by Liger's kernel, if installed. 'auto': 'chunked' where the model's "
            "head is understood, else 'off'.",
        ),
    )
    activation_offload_report: str | None = field(
        default=None,
        metadata=_help(
            "report",
            "Write what was moved, kept and waited for to this JSON file when training ends.",
        ),
    )

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
            ConflictError: offloading is on, and another offloader of activations too.
        """
        if self.pyao_config() is not None:
            check_other_offloaders(self)

    def pyao_config(self) -> PyAOConfig | None:
        """Return the configuration that file and flags give; None if offloading is off.

        Raises:
            ConfigError: as :meth:`check_pyao_arguments`.
        """
        if not isinstance(self.activation_offload, bool):
            raise ConfigError(
                f"activation_offload is {self.activation_offload!r}; expected True or False. If it "
                "was meant as another class's first positional argument, list PyAOArguments before "
                "that class among the bases."
            )
        if self.activation_offload:
            return PyAOConfig.from_dict(self.given_pyao_settings())
        idle = [f"--{_PREFIX}{name}" for name in self._given_flags()]
        if self.activation_offload_config is not None:
            idle.insert(0, f"--{_PREFIX}config")
        if idle:
            raise ConfigError(
                f"offloading is off, so {', '.join(idle)} would have no effect. Add "
                "--activation_offload (activation_offload=True), or drop what depends on it."
            )
        return None

    def given_pyao_settings(self) -> dict[str, Any]:
        """Return what was given, by PyAOConfig field: the file's settings, the flags over them.

        A flag that overrules a different value of the file is logged, once.

        Raises:
            ConfigError: the file is missing, or holds a bad key or value.
        """
        flags = self._given_flags()
        if self.activation_offload_config is None:
            return flags
        in_file = _read_settings(self.activation_offload_config)
        overruled = {name for name in flags if name in in_file and flags[name] != in_file[name]}
        if overruled and not self._has_logged_overruled:
            self._has_logged_overruled = True
            for name in sorted(overruled):
                logger.warning(
                    "--%s%s %s wins over %s=%s in %s",
                    *(_PREFIX, name, flags[name], name, in_file[name]),
                    self.activation_offload_config,
                )
        return {**in_file, **flags}

    # No annotation: this must not become a field, and thereby a flag.
    _has_logged_overruled = False

    def _given_flags(self) -> dict[str, Any]:
        """Return the knobs that were given, by PyAOConfig field."""
        given = {}
        for flag in fields(PyAOArguments):
            name, value = flag.name.removeprefix(_PREFIX), getattr(self, flag.name)
            if name not in _CONFIG_DEFAULTS:
                continue
            if name == "window" and isinstance(value, str):
                value = int(value) if value.removeprefix("-").isdecimal() else value
            if value is not None:
                given[name] = value
        return given


def _read_settings(path: str) -> dict[str, Any]:
    """Return what a configuration file itself says; it must be a valid configuration alone."""
    PyAOConfig.from_json_file(path)
    settings: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    settings.pop("schema_version", None)
    return settings


@dataclass
class PyAOTrainingArguments(PyAOArguments, TrainingArguments):
    """``transformers.TrainingArguments`` with the ``--activation_offload...`` flags.

    Usable wherever the base class is: ``HfArgumentParser``, JSON files, saved
    ``training_args.bin``. Offloading is off unless ``activation_offload`` is given.
    """
