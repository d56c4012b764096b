"""Options of commands that change the step itself: long context, and each part of it alone."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from hf_pyao.config import SETTINGS, PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers

if TYPE_CHECKING:
    from hf_pyao.plan.options.plan_request import PlanRequest

OFF, AUTO = "off", "auto"

HEAD_LOSSES = ("off", "chunked")
"""Of the names that ``head_loss`` takes, those that a step on fake tensors can run."""

LEVER_NAMES = ("long_context", *Levers.names())
"""Fields of the configuration that these options stand for. Estimates are of models that are not
compiled."""


def add_lever_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what changes the step itself to *group*; None stands for what was not given."""
    group.add_argument(
        "--long-context",
        action="store_true",
        default=None,
        help="as training with long_context: chunked loss, MLPs in tiles, each layer's input "
        "offloaded and the layer run again in backward, attention not. Each can be given otherwise "
        "beside it",
    )
    group.add_argument(
        "--head-loss",
        choices=HEAD_LOSSES,
        help="chunked: the loss without all logits at once (default: off; with --long-context: "
        "chunked)",
    )
    group.add_argument(
        "--mlp-tiles",
        metavar=SETTINGS["mlp_tiles"].kind.metavar,
        help="run MLPs over tiles of tokens, so that their intermediate tensors exist for one at a "
        "time; auto: as many as keep matrix products efficient (default: off; with --long-context: "
        "auto)",
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="K",
        help="of every K layers only the first one's input is saved, and they run again in "
        "backward. 2 takes half of the host memory that 1 does (default: 0, which is off; with "
        "--long-context: 1)",
    )
    group.add_argument(
        "--checkpoint-nested",
        action=argparse.BooleanOptionalAction,
        help="with --checkpoint-every of 2 or more: have the K layers' tensors on the device one "
        "layer at a time, for up to one more forward (default: no; with --long-context: yes)",
    )
    group.add_argument(
        "--save-attention",
        action=argparse.BooleanOptionalAction,
        help="with --checkpoint-every: save what attention returns too, so that its kernel does "
        "not run again (default: no; with --long-context: yes)",
    )
    group.add_argument(
        "--attention-groups",
        metavar=SETTINGS["attention_groups"].kind.metavar,
        help="run flash attention over groups of samples and heads, so that what its backward "
        "allocates inside exists for one group at a time; auto: as many as keep that small while "
        "each group fills the device (default: off; with --long-context: auto)",
    )


def flag_of_lever(name: str) -> str:
    """Return the option for a field of the configuration."""
    return "--" + name.replace("_", "-")


def given_levers(args: argparse.Namespace) -> list[str]:
    """Return which of these options were given, as they are written."""
    return [flag_of_lever(name) for name in LEVER_NAMES if getattr(args, name) is not None]


def levers_of(args: argparse.Namespace) -> Levers:
    """Return what the options say.

    Raises:
        ConfigError: see :func:`lever_config_of`.
    """
    return Levers.of(lever_config_of(args))


def lever_config_of(args: argparse.Namespace, **more: Any) -> PyAOConfig:
    """Return the configuration of which these options are a part.

    Args:
        args: the options.
        more: further fields.

    Raises:
        ConfigError: a value is bad, or one has no effect without another.
    """
    given: dict[str, Any] = dict(more)
    for name in LEVER_NAMES:
        value = getattr(args, name)
        if value is not None:
            is_text = isinstance(value, str)
            label = flag_of_lever(name)
            given[name] = SETTINGS[name].kind.parse(label, value) if is_text else value
    labels = {name: flag_of_lever(name) for name in LEVER_NAMES}
    return PyAOConfig.from_dict(given, labels)


def add_streaming_argument(group: argparse._ActionsContainer) -> None:
    """Add ``--stream-weights`` and ``--stream-embeddings``."""
    group.add_argument(
        "--stream-weights",
        default=OFF,
        metavar="off|auto|N",
        help="with --lora: frozen weights of layers live on the host and are uploaded layer by "
        "layer: as few layers as is fastest (auto), or all but N (default: off)",
    )
    group.add_argument(
        "--stream-embeddings",
        choices=("off", "on"),
        default=OFF,
        help="with --stream-weights: frozen embeddings and head live on the host, too; the time of "
        "their uploads is not predicted (default: off)",
    )


def ends_on_host_of(args: argparse.Namespace) -> bool:
    """Return whether ``--stream-embeddings`` is on.

    Raises:
        ConfigError: it is, without ``--stream-weights``.
    """
    is_on: bool = args.stream_embeddings != OFF
    if is_on and args.stream_weights == OFF:
        raise ConfigError(
            "--stream-embeddings is on, which has no effect without --stream-weights: give that, "
            "too, as auto, or drop it.",
            key="setting-without-effect",
        )
    return is_on


def resident_blocks_of(args: argparse.Namespace, *, is_profile: bool = False) -> int | str:
    """Return ``--stream-weights``: ``"off"``, ``"auto"``, or how many blocks stay.

    Args:
        args: of the command.
        is_profile: the step is that of a profile, whatever was trained in it.

    Raises:
        ConfigError: it is none of these, or nothing is frozen.
    """
    text: str = args.stream_weights
    if text not in (OFF, AUTO) and not text.isdigit():
        raise ConfigError(
            f"--stream-weights is {text!r}; expected off, auto, or how many layers stay.",
            key="setting-value",
        )
    if text != OFF and args.lora is None and not is_profile:
        raise ConfigError(
            "--stream-weights streams frozen weights, and all parameters are trained: give --lora.",
            key="nothing-to-stream",
        )
    return int(text) if text.isdigit() else text


def binds_of(
    args: argparse.Namespace, config: PyAOConfig | None = None, *, is_profile: bool = False
) -> PlanRequest:
    """Return what binds a plan, as the options say.

    Args:
        args: of the command.
        config: what the step was run with; None: the levers among the options.
        is_profile: as for :func:`resident_blocks_of`.

    Raises:
        ConfigError: an option is bad.
    """
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.options.plan_request import PlanRequest
    from hf_pyao.settings.sizes import Size

    host_bytes = float("inf")
    if args.host_memory is not None:
        host_bytes = float(Size().check("--host-memory", args.host_memory))
    request = PlanRequest.of_config(
        lever_config_of(args) if config is None else config,
        host_limit_bytes=host_bytes,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    return dataclasses.replace(
        request,
        ends_on_host=ends_on_host_of(args),
        stream_weights=resident_blocks_of(args, is_profile=is_profile),
    )
