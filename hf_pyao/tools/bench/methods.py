"""The methods that are compared: ours, and what a user of transformers could take instead.

A method is one row of :func:`known_methods`, or a function of another module, by the name
``module:function``. ``install`` puts it on a model and takes it off again; where it cannot run, it
raises :class:`MethodUnavailable` with the reason, which becomes its row.
Nothing here imports torch before a method is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_pyao.config import POLICY_NAMES, SETTINGS
from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.settings.kind import Names
from hf_pyao.text import describe_error, echo
from hf_pyao.tools.bench import peers
from hf_pyao.tools.bench.peers import Installed, MethodUnavailable
from hf_pyao.tools.estimate.model_specs import parse_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

__all__ = ["Installed", "Method", "MethodUnavailable", "find_method", "known_methods"]

WINDOW_BYTES = 256 * 2**20
"""The window of the rows that have one: 10 ms of a link of 25 GiB/s."""

SELECTED_ROLES = ("core_attn", "mlp_act")
"""What the ``modules`` row offloads: large, and produced by little compute."""

CUSTOM_PREFIX = "pyao:"
"""Before a configuration of one's own: ``pyao:window=67108864,keep_last_layers=2``."""

OVER_CHECKPOINT = "checkpoint+"
"""Before :data:`CUSTOM_PREFIX`: the same on top of checkpointing."""

Install = Callable[["nn.Module", "torch.device"], AbstractContextManager[Installed]]


@dataclass(frozen=True)
class Method:
    """One way to save activation memory."""

    name: str
    label: str
    """As tables show it."""
    install: Install


class _PyAO:
    """Installs hf_pyao with one configuration, if asked on top of checkpointing."""

    def __init__(
        self, *, with_checkpointing: bool = False, copy_streams: int | None = None, **settings: Any
    ) -> None:
        self.settings = settings
        self.with_checkpointing = with_checkpointing
        self.copy_streams = copy_streams

    @contextmanager
    def __call__(self, model: nn.Module, device: torch.device) -> Iterator[Installed]:
        """Attach; detach at the end."""
        from hf_pyao import PyAOConfig, attach
        from hf_pyao.engine.transfer.stream_transport import StreamTransport

        try:
            config = PyAOConfig(**{"policy": "all", **self.settings})
        except ConfigError as error:
            raise MethodUnavailable(f"{error}") from error
        transport = None
        if self.copy_streams is not None:
            if device.type == "cpu":
                raise MethodUnavailable("a CPU has no streams to choose a number of")
            transport = StreamTransport(self.copy_streams)
        with ExitStack() as stack:
            if self.with_checkpointing:
                stack.enter_context(peers.checkpointing(model))
            offloader = stack.enter_context(attach(model, config, transport=transport))
            yield Installed(step=nullcontext, metrics=offloader.metrics, engine=offloader.engine)


def _table() -> list[Method]:
    window: dict[str, Any] = {"window": WINDOW_BYTES}
    ours = [
        Method("pyao-window", "hf_pyao, all, byte window", _PyAO(policy="all", **window)),
        Method("pyao-layer", "hf_pyao, all, window=layer", _PyAO(policy="all", window="layer")),
        Method(
            "pyao-single-stream",
            "hf_pyao, all, on the compute stream",
            _PyAO(policy="all", copy_streams=0),
        ),
        Method(
            "pyao-one-copy-stream",
            "hf_pyao, all, one copy stream",
            _PyAO(policy="all", copy_streams=1, **window),
        ),
        Method(
            "pyao-modules",
            f"hf_pyao, {' + '.join(SELECTED_ROLES)}",
            _PyAO(policy="modules", modules=SELECTED_ROLES, **window),
        ),
        Method(
            "pyao-recompute",
            "hf_pyao, all, pointwise results rebuilt",
            _PyAO(policy="all", recompute_modules=("pointwise",), **window),
        ),
        Method(
            "pyao-checkpoint",
            "hf_pyao over checkpointing",
            _PyAO(policy="all", with_checkpointing=True, **window),
        ),
    ]
    # Policies that came later than this table get a row with the defaults of their knobs.
    ours += [
        Method(
            f"pyao-{policy}",
            f"hf_pyao, {policy}",
            _PyAO(policy=policy, **_ARGUMENTS.get(policy, {}), **window),
        )
        for policy in POLICY_NAMES
        if policy not in ("all", "modules", "plan")  # a plan is one model's: give it by pyao:plan=
    ]
    return [
        Method("none", "nothing", peers.nothing),
        *ours[:1],
        Method("checkpoint", "transformers checkpointing", peers.checkpoint),
        Method(
            "checkpoint-offload",
            "transformers checkpointing, offload=True",
            peers.checkpoint_offload,
        ),
        *ours[1:],
        Method("trl-streams", "TRL OffloadActivations, streams", peers.trl_streams),
        Method("trl-no-streams", "TRL OffloadActivations, no streams", peers.trl_no_streams),
        Method("deepspeed", "DeepSpeed CheckpointHiddenStatesOffload", peers.deepspeed),
        Method("save-on-cpu", "torch save_on_cpu", peers.save_on_cpu),
    ]


_ARGUMENTS: dict[str, dict[str, Any]] = {"budget": {"budget": "1GiB"}, "pyao": {"profile_steps": 1}}
"""What policies need beside their name, in their rows."""


def known_methods() -> Mapping[str, Method]:
    """Return all methods by name, in the order in which they are worth measuring."""
    return {method.name: method for method in _table()}


def find_method(name: str) -> Method:
    """Return the method called *name*.

    Args:
        name: of :func:`known_methods`; ``pyao:key=value,...``, a configuration; or
            ``module:function``, an :data:`Install` of a module on ``sys.path``.

    Raises:
        ConfigError: there is none; the nearest name and all names are given.
    """
    if name.removeprefix(OVER_CHECKPOINT).startswith(CUSTOM_PREFIX):
        return _custom(name)
    if ":" in name:
        return Method(name, name, _function(name))
    methods = known_methods()
    if name not in methods:
        others = (CUSTOM_PREFIX + "key=value,...", "module:function")
        raise unknown_name("method", name, [*methods, *others])
    return methods[name]


def _function(name: str) -> Install:
    """Return the function behind ``module:function``.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        install: Install = getattr(importlib.import_module(module), function)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"method {echo(name)} cannot be imported: {describe_error(error)}. Expected "
            "module:function, with the module on sys.path.",
            key="setting-value",
        ) from error
    return install


def is_lossy(name: str) -> bool:
    """Say whether the method called *name* changes gradients by design: it has a lossy codec."""
    install = find_method(name).install
    codec = install.settings.get("codec") if isinstance(install, _PyAO) else None
    if codec is None:
        return False
    from hf_pyao.engine.codecs import CODECS  # imports torch

    return codec in CODECS and not CODECS[codec]().is_lossless


def _custom(name: str) -> Method:
    settings: dict[str, Any] = {}
    given = name.removeprefix(OVER_CHECKPOINT).removeprefix(CUSTOM_PREFIX)
    is_over_checkpoint = name.startswith(OVER_CHECKPOINT)
    for pair in given.split(","):
        key, equals, text = pair.partition("=")
        if not equals or key not in SETTINGS:
            raise unknown_name(f"setting in {echo(name)}:", key, SETTINGS)
        # A comma separates settings, so several names are joined with '+'.
        has_names = isinstance(SETTINGS[key].kind, Names)
        settings[key] = tuple(text.split("+")) if has_names else parse_value(text)
    label = f"hf_pyao{' over checkpointing' * is_over_checkpoint}, {given}"
    return Method(name, label, _PyAO(with_checkpointing=is_over_checkpoint, **settings))
