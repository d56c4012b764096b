"""Every knob of hf_pyao in one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_pyao.config_checks import (
    DEFAULT_DISK_WRITE_LIMIT_TB,
    LEAST_LAYERS,
    LEAST_LIKELY_BYTES,
    check_together,
)
from hf_pyao.errors import ConfigError, unknown_name, warn
from hf_pyao.files import read_json_object
from hf_pyao.settings.kind import Choice, Implied, Named, Names, Switch
from hf_pyao.settings.paths import FilePath, FolderPath
from hf_pyao.settings.removed import REMOVED_SETTINGS, refuse_removed, refuses_removed
from hf_pyao.settings.setting import setting, settings_of
from hf_pyao.settings.sizes import (
    Amount,
    Count,
    CountOrWord,
    Gibibytes,
    Parts,
    Size,
    Terabytes,
)
from hf_pyao.text import Labels, echo

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Version of the JSON written by :meth:`PyAOConfig.to_dict`."""

POLICY_NAMES = ("auto", "all", "modules", "budget", "plan", "pyao", "off")
"""Names that ``policy`` takes; ``plan/policies/by_name.py`` makes them."""

CODEC_NAMES = ("identity", "int8", "fp8", "int4", "bitmask")
"""Names that ``codec`` takes: the keys of ``CODECS``, which is not imported here since codecs are
above the configuration and import torch."""

HEAD_LOSS_NAMES = ("auto", "off", "chunked")
"""Names that ``head_loss`` takes."""

LOG_METRICS_NAMES = ("off", "summary", "all")
"""Names that ``log_metrics`` takes."""

AUTO_MICRO_BATCH_NAMES = ("off", "fastest", "largest")
"""Names that ``auto_micro_batch`` takes."""

STREAM_EMBEDDINGS_NAMES = ("auto", "on", "off")
"""Names that ``stream_embeddings`` takes."""

VERIFY_RECOMPUTE_NAMES = ("auto", "always", "off")
"""Names that ``verify_recompute`` takes."""

SWITCHED_OFF = "hf_pyao is switched off by PYAO=off: nothing is attached."

MIB = 2**20
GIB = 2**30

DEFAULT_WINDOW_BYTES = 256 * MIB
"""What ``window`` is where it is left open."""

DEFAULT_KEEP_LAST_LAYERS = 1
"""What ``keep_last_layers`` is where it is left open."""

DEFAULT_MIN_BYTES = 64 * 1024
"""What ``min_bytes`` is where it is not given."""


@refuses_removed
@dataclass(frozen=True, kw_only=True)
class PyAOConfig:
    """What is offloaded, how, and within which limits.

    All fields have defaults that are safe to start with. Values are checked once, here; names that
    depend on the model (roles and module names) are checked when the model is attached. The same
    settings are flags of :class:`~hf_pyao.PyAOArguments` (``--activation_offload_<field>``) and
    fields and variables of :class:`~hf_pyao.PyAOPlugin` (``PYAO_<FIELD>``).

    A configuration is a value. A field that is None is *left open*: hf_pyao may choose it, and
    policy ``auto`` does. A field that is given binds, also where its value is the one that an open
    field has: ``PyAOConfig(checkpoint_every=0)`` is not equal to ``PyAOConfig()``. Open fields stay
    open in ``dataclasses.replace``, in dictionaries, files, flags and the environment.
    :meth:`effective` returns the values that are used where nothing else is chosen.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or contradicts another.
    """

    policy: Any = setting(
        "auto",
        Named("Policy", lambda: POLICY_NAMES, methods=("decide",)),
        "Which saved tensors leave the device. 'auto': the first {profile_steps} micro-batches are "
        "measured, then whatever is fastest within the device's memory is done: keep, offload or "
        "recompute, slot by slot, and nothing where everything fits (on a CPU nothing is done "
        "without {device_memory_gib}). 'all': every one that is large enough, the most "
        "memory freed. 'modules': only those of {modules}; choose it when the link to the host is "
        "the bottleneck. 'budget': the first of each forward, within {budget}. 'plan': what the "
        "file {plan} says. 'pyao': what the PyAO paper does; the first {profile_steps} "
        "micro-batches are timed, then parts of a layer that save far more than the link carries "
        "are recomputed, and the rest is offloaded. 'off': none; what would move is only counted, "
        "and {head_loss} works alone. Python code may give a Policy instead of a name.",
    )
    codec: Any = setting(
        "identity",
        Named(
            "Codec",
            lambda: CODEC_NAMES,
            methods=("accepts", "encode", "decode"),
            attributes=("name", "is_lossless"),
        ),
        "How tensors are written on the host. 'identity' is exact. A smaller format moves fewer "
        "bytes, for when copies and not compute set the step time: 'int8' (a scale for each row) "
        "halves those of 16-bit tensors, with about the gradient error of bf16 autocast; 'fp8' "
        "does so for models with ReLU, which int8 does not suit; 'int4' is for experiments. "
        "'bitmask', exact too, packs dropout masks. Python code may give a Codec instead of a "
        "name. Measured in engine/codecs/COMPRESSION.md.",
    )
    layers: Sequence[str] = setting(
        (),
        Names(),
        "Modules to take as layers, in the order of the forward: qualified names or patterns, such "
        "as down_blocks.* mid_block up_blocks.*, where * stands for one part of a name. Backward "
        "begins with the last of them. Empty: the layers that the architecture is known to have.",
    )
    modules: Sequence[str] = setting(
        (),
        Names(),
        "With {policy} 'modules': the parts of a layer whose saved tensors leave. Roles such as "
        "mlp_act or core_attn, or module names inside a layer (mlp.act_fn), with * as wildcard. "
        "The MLP's (mlp_act, mlp_down) free the most.",
    )
    budget: int | str | None = setting(
        None,
        Amount(),
        "With {policy} 'budget': how much leaves in each forward, first saved first: a number of "
        "tensors, such as 8, or a size with a unit, such as 2GiB. What the link carries while "
        "forward computes is a good start: `pyao estimate` says it.",
    )
    plan: str | os.PathLike[str] | None = setting(
        None,
        FilePath(),
        "With {policy} 'plan': the JSON file that says what becomes of each saved tensor. With "
        "'auto' and 'pyao': where to keep what was decided; if the file is there, it is followed "
        "and nothing is timed.",
    )
    profile_steps: int = setting(
        10,
        Count("micro-batches", least=1),
        "Micro-batches that are measured: for {profile}, and with {policy} 'auto' or 'pyao' before "
        "it decides (the PyAO paper takes 100).",
    )
    profile: str | os.PathLike[str] | None = setting(
        None,
        FilePath(),
        "Write to this JSON file what the first {profile_steps} micro-batches took and saved, part "
        "by part; `pyao report` draws it. To measure costs time while it lasts.",
    )
    recompute_modules: Sequence[str] = setting(
        (),
        Names(),
        "The parts of a layer whose tensors are neither kept nor moved but computed again in "
        "backward, where that needs no matrix product but their own; named as in {modules}. "
        "'pointwise': all that needs no matrix product, the most bytes for the least time. The "
        "policy decides on the rest.",
    )
    keep_last_layers: int | None = setting(
        None,
        Implied(Count("layers"), DEFAULT_KEEP_LAST_LAYERS),
        "Number of last layers of each forward whose tensors stay on the device. Backward begins "
        "with them, so offloading them only costs time (PyAO paper, section 4.2); raise it as far "
        "as memory allows. (default: 1; {policy} 'auto' keeps fewer where nothing else fits)",
    )
    min_bytes: int | str = setting(
        DEFAULT_MIN_BYTES,
        Size(),
        "Saved tensors smaller than this stay on the device: a number of bytes, or a size such as "
        "256KiB. Raise it if there are many small copies, lower it only to free the last few MiB.",
    )
    window: int | str | None = setting(
        None,
        Implied(Size(words=("layer",)), DEFAULT_WINDOW_BYTES),
        "How much may be in flight. A number of bytes, or a size such as 256MiB: copies run on "
        "under later layers as long as no more than that waits to leave or was brought back ahead "
        "of its use; faster, and that much more device memory. 'layer': compute and copies meet "
        "at the end of every layer (PyAO paper, section 4.2), the tightest memory. (default: "
        "256MiB; {policy} 'auto' takes a smaller one where nothing else fits)",
    )
    host_memory_gib: float | None = setting(
        None,
        Gibibytes(),
        "Most host memory for offloaded tensors, in GiB (2**30 bytes), for each process; what "
        "does not fit stays on the device. Set it when several jobs share a host (default: half "
        "of what is available when the model is attached, limits of containers and jobs respected, "
        "divided by the processes that the launcher says it runs on the node; less if others have "
        "taken most of it by the time it is needed).",
    )
    device_memory_gib: float | None = setting(
        None,
        Gibibytes(),
        "With {policy} 'auto': most memory of the device that may be reserved for tensors, in GiB "
        "(2**30 bytes), weights and optimizer included. Set it to leave room for others (default: "
        "what the device has free, less a margin). On a CPU it counts against the predicted peak.",
    )
    allow_lossy: bool = setting(
        False,
        Switch(),
        "With {policy} 'auto': let it choose codecs that are not exact ('int8') where they are "
        "faster. A lossy {codec} that is given is permission for that one.",
    )
    head_loss: str | None = setting(
        None,
        Implied(Choice(HEAD_LOSS_NAMES), "off", with_long_context="chunked"),
        "How the loss is computed from the last hidden states. 'off': as the model does. "
        "'chunked': without ever holding all logits, which frees much when the vocabulary is "
        "large. 'auto': 'chunked' where the model's head is understood, else 'off'. "
        "(default: off; with {long_context}: chunked)",
    )
    long_context: bool = setting(
        False,
        Switch(),
        "Train on the longest sequences that fit: those of {head_loss}, {mlp_tiles}, "
        "{checkpoint_every}, {checkpoint_nested}, {save_attention} and {attention_groups} that are "
        "not given are set for it. What grows "
        "with the number of tokens is then on the device for one layer, or one tile, at a time. "
        "{policy} stays. Costs about the time of one more forward.",
    )
    mlp_tiles: int | str | None = setting(
        None,
        Implied(Parts("tiles"), "off", with_long_context="auto"),
        "Run the MLP of each layer over tiles of tokens, forward and backward, so that its "
        "intermediate tensors exist for one tile at a time; norms that are written out in steps, "
        "as Llama's are, too. A number of tiles, or 'auto': as many as keep a tile's tensors small "
        "beside the layer's weights, and its products efficient. Costs the time of the MLP's "
        "forward once more. Gradients of its weights are summed in another order. (default: off; "
        "with {long_context}: auto)",
    )
    checkpoint_every: int | None = setting(
        None,
        Implied(Count("layers"), 0, with_long_context=1),
        "Of every so many layers only the first one's input is saved, and leaves; the layers run "
        "again in backward, which gives the same bits. 1: each layer's input leaves. More: that "
        "part of the host memory, while the tensors of so many layers are on the device at once. "
        "0: off. In place of gradient checkpointing. (default: 0; with {long_context}: 1; {policy} "
        "'auto' takes another number where that is faster, or where nothing else fits)",
    )
    checkpoint_nested: bool | None = setting(
        None,
        Implied(Switch(), False, with_long_context=True),
        "With {checkpoint_every} of 2 or more: the layers between two saved inputs run again "
        "twice, the first time for their inputs alone, so that one layer's tensors are on the "
        "device at once. Costs the time of up to one more forward. (default: false; with "
        "{long_context}: true)",
    )
    save_attention: bool | None = setting(
        None,
        Implied(Switch(), False, with_long_context=True),
        "With {checkpoint_every}: what attention returns leaves as well, and its kernel does not "
        "run again, where the host has room for it beside the layers' inputs. Attention takes time "
        "by the square of the length. (default: false; with {long_context}: true)",
    )
    attention_groups: int | str | None = setting(
        None,
        Implied(Parts("groups", zero_is_off=True), "off", with_long_context="auto"),
        "Run flash attention for one group of samples and heads after the other, so that what its "
        "backward allocates inside (float32 sums for all queries, and with grouped heads expanded "
        "keys and values) exists for one group at a time. A number of groups, or 'auto': as many "
        "as keep that small while each group fills the device. Bits stay as they are, but for the "
        "queries' gradients, which are as reproducible as the kernel's. With deterministic "
        "algorithms, groups are used only where each has as many samples times heads as the device "
        "has multiprocessors. "
        "(default: off; with {long_context}: auto; {policy} 'auto' takes groups where nothing else "
        "fits, or where that is faster)",
    )
    stream_weights: int | str = setting(
        "off",
        CountOrWord("layers", words=("off", "auto")),
        "Whether the frozen weights of the layers live on the host and come to the device layer by "
        "layer, for forward and again for backward, so that a model larger than the device can be "
        "fine-tuned with adapters. 'off': all weights are on the device. 'auto': as few layers as "
        "needed are streamed, and none where everything fits. A number: so many layers stay on the "
        "device, spread over the depth; two more are there at a time. Bits do not change. The "
        "weights on the host count against {host_memory_gib}.",
    )
    stream_embeddings: str = setting(
        "auto",
        Choice(STREAM_EMBEDDINGS_NAMES, alone="on"),
        "With {stream_weights}, whether the frozen weights of embeddings and head live on the "
        "host, too. Of an embedding the rows of the batch are uploaded, for which the host reads "
        "the ids. The head's weight is uploaded where logits or the loss are computed, once more "
        "for their gradient unless {head_loss} is 'chunked', and once for each token that is "
        "generated. 'auto': where the device has no room for them beside the layers that stay. "
        "'on': always. 'off': never. Bits do not change.",
    )
    verify_recompute: str = setting(
        "auto",
        Choice(VERIFY_RECOMPUTE_NAMES, alone="always"),
        "Whether fingerprints of what layers save are compared with those of their second runs, "
        "where layers run again ({checkpoint_every}, {mlp_tiles}, {recompute_modules}, plans). A "
        "difference is an error before the optimizer steps, which names the layer; where the "
        "micro-batch can run again, it does so without second runs. 'auto': in the first "
        "micro-batches with second runs, and in one of 61 later. 'always': in each. 'off': never.",
    )
    disk_path: str | os.PathLike[str] | None = setting(
        None,
        FolderPath(),
        "A directory on a local disk, such as an NVMe drive, that the run may use below the host's "
        "memory: for offloaded tensors that find no room there, as {disk_gib} says, and for frozen "
        "weights of {stream_weights}. Files lie in a directory of your own inside of it "
        "(mode 0700). A directory in memory (tmpfs) is refused. Bits do not change. Without it no "
        "disk is used.",
    )
    disk_gib: float | None = setting(
        None,
        Gibibytes(),
        "With {disk_path}: most GiB (2**30 bytes) of offloaded tensors on the disk, for each "
        "process. They are written in forward and read in backward of each step, which wears the "
        "drive; {checkpoint_every} divides those bytes and comes first. 0: none, the disk has "
        "frozen weights alone. (default: what the disk has free, less 10 GiB, divided by the "
        "processes on the node)",
    )
    disk_write_limit: float = setting(
        DEFAULT_DISK_WRITE_LIMIT_TB,
        Terabytes(),
        "With {disk_path}: most TB (10**12 bytes) of offloaded tensors that each process of the "
        "run may write to the disk. Where the number of steps is known, a run that would write "
        "more is refused before it trains. Else writing ends at the limit, and training goes on "
        "with what the host and the device hold. Compare it with the drive's endurance (TBW).",
    )
    auto_micro_batch: str = setting(
        "off",
        Choice(AUTO_MICRO_BATCH_NAMES, alone="fastest"),
        "Whether PyAOTrainer chooses the micro-batch when training begins, and gradient "
        "accumulation with it, so that samples per optimizer step stay as the training arguments "
        "have them. 'fastest': the one with the least predicted time a sample within "
        "{device_memory_gib}; 'largest': the largest that fits. What is chosen is tried before it "
        "is taken. The flag without a value means 'fastest'. `pyao estimate --find` predicts the "
        "same for a device that is not there.",
    )
    log_metrics: str = setting(
        "summary",
        Choice(LOG_METRICS_NAMES),
        "Which metrics go to the training logs, under pyao/. 'off': none. 'summary': the few that "
        "say what was moved and what it cost. 'all': every one.",
    )
    report: str | os.PathLike[str] | None = setting(
        None,
        FilePath(),
        "Write what was moved, kept and waited for to this JSON file when training ends.",
    )

    labels: InitVar[Mapping[str, str] | None] = None
    """By field, the name by which messages call it, such as a flag. Labels change messages and
    nothing else, so they are no field and take no part in ``==``; ``replace`` keeps them."""

    def __post_init__(self, labels: Mapping[str, str] | None) -> None:
        """Check every field, and hold it in its plain form; see the class docstring."""
        is_copy = isinstance(labels, Labels)
        object.__setattr__(self, "labels", Labels(labels or {}))
        for name, declared in SETTINGS.items():
            value = declared.check(self.label(name), getattr(self, name))
            object.__setattr__(self, name, value)
        check_together(implied_by(vars(self)), self.label)
        if not is_copy and isinstance(self.window, int) and 0 < self.window < LEAST_LIKELY_BYTES:
            warn(
                logger,
                "bytes-without-unit",
                "%s is %d, which means bytes; expected %d or more. Give a unit, such as '256MiB'.",
                *(self.label("window"), self.window, LEAST_LIKELY_BYTES),
            )

    @property
    def left_open(self) -> frozenset[str]:
        """The fields that are not given, which are those that are None."""
        return frozenset(name for name in SETTINGS if getattr(self, name) is None)

    @property
    def given(self) -> dict[str, Any]:
        """The policy, and the other fields whose values are not their defaults."""
        default = vars(PyAOConfig())
        values = {name: getattr(self, name) for name in SETTINGS}
        return {n: v for n, v in values.items() if n == "policy" or v != default[n]}

    def effective(self) -> EffectiveConfig:
        """Return the configuration with the implied value in each field that was left open.

        This is what a step runs with where no plan chooses otherwise. As a configuration of its own
        it leaves nothing to choose. Fields that stand for something to do without a default, such
        as ``report``, stay None.
        """
        return EffectiveConfig(**implied_by(vars(self)))

    def label(self, name: str) -> str:
        """Return a field's name as the user gave it: a flag, a variable, a key of a file."""
        return self.all_labels()[name]

    def all_labels(self) -> Labels:
        """Return how messages call each field; see :meth:`label`."""
        labels: Labels = vars(self)["labels"]
        return labels

    def with_settings(self, **values: Any) -> PyAOConfig:
        """Return the same with *values* given, as ``dataclasses.replace`` does.

        Raises:
            ConfigError: a bad value, or one that contradicts another.
        """
        return dataclasses.replace(self, **values)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], labels: Mapping[str, str] | None = None
    ) -> PyAOConfig:
        """Build a configuration from plain values, as :meth:`to_dict` writes them.

        Args:
            values: by field; what is missing has its default.
            labels: by field, the name under which messages speak of it, such as a flag.

        Raises:
            ConfigError: an unknown key (the nearest known one is named), or a bad value.
        """
        return cls(**_known(values), labels=labels)

    @classmethod
    def from_json_file(cls, path: str | Path) -> PyAOConfig:
        """Read a configuration from a JSON file.

        Raises:
            ConfigError: the file is missing, is no JSON object, or holds a bad key or value.
        """
        return cls.from_dict(read_settings(path), file_labels(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values, with a ``schema_version``.

        Open fields are None. Policy and codec instances are written by their ``name``.
        """
        values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for name in SETTINGS:
            value = getattr(self, name)
            if name in ("policy", "codec") and not isinstance(value, str):
                value = value.name
            values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def to_json_file(self, path: str | Path) -> None:
        """Write the configuration to a JSON file that :meth:`from_json_file` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


class EffectiveConfig(PyAOConfig):
    """A configuration whose open fields hold their implied values; see PyAOConfig.effective."""

    if TYPE_CHECKING:
        keep_last_layers: int
        window: int | str
        head_loss: str
        mlp_tiles: int | str
        checkpoint_every: int
        checkpoint_nested: bool
        save_attention: bool
        attention_groups: int | str


def is_switched_off() -> bool:
    """Say whether the environment has ``PYAO=off``: then nothing is attached, whoever asks for it.

    Raises:
        ConfigError: the variable ``PYAO`` is there, and neither on nor off.
    """
    return not Switch().parse("PYAO", os.environ.get("PYAO", "").strip() or "on")


def implied_by(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return *values*, by field, with the implied value in place of each open one."""
    whole = dict(values)
    for name, declared in SETTINGS.items():
        if isinstance(declared.kind, Implied) and whole[name] is None:
            whole[name] = declared.kind.implied(long_context=whole["long_context"])
            # checkpoint_every is declared before the fields that depend on it.
            if name in LEAST_LAYERS and whole["checkpoint_every"] < LEAST_LAYERS[name]:
                whole[name] = False
    return whole


SETTINGS = settings_of(PyAOConfig)
"""Every field of the configuration: flags, variables and documents are made of these."""


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return what a configuration file gives, checked value by value; open fields are left out.

    Raises:
        ConfigError: the file is missing, is no JSON object, or holds a bad key or value.
    """
    values = read_json_object(
        path,
        ConfigError,
        what="the configuration file",
        expected="Give the path of a JSON file such as PyAOConfig().to_json_file(path) writes.",
    )
    return _checked(_known(values, where=f"in {echo(str(path))}: "), file_labels(path))


def file_labels(path: str | Path) -> dict[str, str]:
    """Return, by field, how messages speak of the settings in a file."""
    return {name: f"{name} in {echo(str(path))}" for name in SETTINGS}


def _known(values: object, where: str = "") -> dict[str, Any]:
    """Return *values* by field; refuse what is none, or of another version."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where}a configuration is {echo(values)}; expected a mapping of settings, such as "
            "{'policy': 'all'}.",
            key="setting-value",
        )
    given = dict(values)
    version = given.pop("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{where}this configuration has schema_version {echo(version)}; this hf_pyao reads "
            f"{SCHEMA_VERSION}. Write it again with the version you run.",
            key="file-other-version",
        )
    for name in REMOVED_SETTINGS.intersection(given):  # files of earlier versions have them as null
        refuse_removed(name, f"{where}{name}", given.pop(name))
    for name in given:
        if name not in SETTINGS:
            error = unknown_name("PyAOConfig key", name, SETTINGS)
            raise ConfigError(f"{where}{error}", key="unknown-name")
    return given


def _checked(values: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return *values* that are given, each checked by itself."""
    checked = {n: SETTINGS[n].check(labels.get(n, n), value) for n, value in values.items()}
    return {name: value for name, value in checked.items() if value is not None}


def _described(cls: type) -> str:
    """Return the class's documentation with its fields, which ``help()`` then shows."""
    lines = []
    for name, declared in SETTINGS.items():
        text = declared.help(lambda other: f"`{other}`")
        lines += textwrap.wrap(f"{name}: {text}", 88, subsequent_indent="    ")
    fields = textwrap.indent("\n".join(lines), " " * 8)
    return f"{cls.__doc__ or ''}\n    Fields:\n{fields}\n"


PyAOConfig.__doc__ = _described(PyAOConfig)
