"""``PyAOPlugin``: offloading for training loops written with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_pyao.config import SETTINGS, PyAOConfig
from hf_pyao.errors import ConflictError
from hf_pyao.integrations.attach import attach
from hf_pyao.integrations.environment import read_environment, variable_of
from hf_pyao.integrations.setting_fields import PluginFields
from hf_pyao.report import write_run_report
from hf_pyao.settings import Switch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_pyao.integrations.attach import Offloader

_ENABLED = Switch()


@dataclass(kw_only=True)
class PyAOPlugin(PluginFields):
    """Offload the models that an ``Accelerator`` prepares.

    ```python
    accelerator = Accelerator()
    plugin = PyAOPlugin(min_bytes=2**20).bind(accelerator)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    ```

    The fields are those of :class:`~hf_pyao.PyAOConfig`, which describes them. A field that is not
    given is read from the environment, which ``accelerate launch`` passes on: ``PYAO_POLICY``,
    ``PYAO_MODULES`` (separated by commas), ``PYAO_MIN_BYTES`` and so on; an empty variable counts
    as absent. What neither gives has PyAOConfig's default.

    Accelerate's own ``kwargs_handlers`` takes no foreign classes, hence :meth:`bind`.

    Raises:
        ConfigError: a value is bad, or an unknown ``PYAO_`` variable is set.
    """

    enabled: bool | None = None
    """Whether binding does anything; ``PYAO_ENABLED=false`` turns a script's offloading off.
    Default: true."""

    offloaders: list[Offloader] = field(default_factory=list, init=False, repr=False, compare=False)
    """One for each prepared model, in the order of preparation."""
    _accelerator: Accelerator | None = field(default=None, init=False, repr=False, compare=False)
    _unwrap_methods: list[Callable[[], None]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    _from_environment: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Names of the fields that the environment filled."""
    _num_packs_seen: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill unset fields from the environment, and check everything."""
        kinds = {"enabled": _ENABLED, **{name: s.kind for name, s in SETTINGS.items()}}
        for name, value in read_environment(kinds).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
                self._from_environment.add(name)
        self.enabled = True if self.enabled is None else _ENABLED.check("enabled", self.enabled)
        self.config()

    def config(self) -> PyAOConfig:
        """Return the configuration that the fields make.

        Raises:
            ConfigError: a value is bad.
        """
        given = {name: getattr(self, name) for name in SETTINGS}
        return PyAOConfig.from_dict(
            {name: value for name, value in given.items() if value is not None},
            {name: variable_of(name) for name in self._from_environment},
        )

    def bind(self, accelerator: Accelerator) -> PyAOPlugin:
        """Attach every model that *accelerator* prepares from now on; return the plugin.

        ``accelerator.free_memory()`` and ``end_training()`` detach them; the latter also writes the
        report that ``report`` asks for (of further models to ``<name>.model<i>.json``). Binding
        again to the same accelerator changes nothing.

        Raises:
            ConflictError: the plugin is bound to another accelerator.
        """
        if not self.enabled or self._accelerator is accelerator:
            return self
        if self._accelerator is not None:
            raise ConflictError(
                "this PyAOPlugin is bound to another Accelerator already. Make one plugin for "
                "each, or call unbind() first."
            )
        self._accelerator = accelerator
        # `prepare` and not `prepare_model`, which FSDP2 and DeepSpeed go around.
        self._wrap_method(accelerator, "prepare", after=self._attach_models)
        self._wrap_method(accelerator, "backward", before=self._warn_if_idle)
        # The offloaders refer to the models, which these two are meant to let go.
        self._wrap_method(accelerator, "free_memory", before=self._detach_models)
        self._wrap_method(accelerator, "end_training", before=partial(self._end, accelerator))
        return self

    def unbind(self) -> None:
        """Give the accelerator its own methods back; prepared models stay attached. Idempotent."""
        while self._unwrap_methods:
            self._unwrap_methods.pop()()
        self._accelerator = None

    def detach(self) -> None:
        """Remove everything from the models and from the accelerator. Idempotent."""
        self.unbind()
        self._detach_models()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last finished micro-batch.

        With several models the keys of the i-th begin with ``model<i>/``, from 0.
        """
        if len(self.offloaders) == 1:
            return self.offloaders[0].metrics()
        return {
            f"model{index}/{key}": value
            for index, offloader in enumerate(self.offloaders)
            for key, value in offloader.metrics().items()
        }

    def _attach_models(self, prepared: object) -> None:
        for model in prepared if isinstance(prepared, tuple | list) else (prepared,):
            if isinstance(model, nn.Module):
                offloader = attach(model, self.config())
                if not any(offloader is known for known in self.offloaders):
                    self.offloaders.append(offloader)

    def _warn_if_idle(self) -> None:
        """Warn, once, if none of the models saved anything in the forward before a backward."""
        num_packs = sum(offloader.engine.num_packs for offloader in self.offloaders)
        if self.offloaders and num_packs == self._num_packs_seen:
            self.offloaders[0].engine.warn_idle()
        self._num_packs_seen = num_packs

    def _end(self, accelerator: Accelerator) -> None:
        if self.report is not None and accelerator.is_main_process:
            path = Path(self.report)
            for index, offloader in enumerate(self.offloaders):
                name = f"{path.stem}.model{index}{path.suffix}" if index else path.name
                write_run_report(offloader, path.with_name(name))
        self._detach_models()

    def _detach_models(self) -> None:
        while self.offloaders:
            self.offloaders.pop().detach()

    def _wrap_method(
        self,
        accelerator: Accelerator,
        name: str,
        before: Callable[[], None] | None = None,
        after: Callable[[object], None] | None = None,
    ) -> None:
        """Put a wrapper in the place of one method of this accelerator, on the instance alone."""
        was_on_instance = name in vars(accelerator)
        method = getattr(accelerator, name)

        @wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Someone may have wrapped the wrapper, and still call it after unbind().
            is_bound = self._accelerator is accelerator
            if is_bound and before is not None:
                before()
            result = method(*args, **kwargs)
            if is_bound and after is not None:
                after(result)
            return result

        def unwrap() -> None:
            if vars(accelerator).get(name) is not wrapper:
                return
            if was_on_instance:
                setattr(accelerator, name, method)
            else:
                delattr(accelerator, name)

        setattr(accelerator, name, wrapper)
        self._unwrap_methods.append(unwrap)
