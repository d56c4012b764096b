"""``PyAOPlugin``: offloading for training loops written with Accelerate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_pyao.attachment import attach
from hf_pyao.auto.effects.arguments import look_at_accelerator, warn_of_sequence_parallel
from hf_pyao.auto.install.conflicts import check_accelerator_of_streaming
from hf_pyao.auto.install.run_record import LOG_PREFIX
from hf_pyao.auto.policy import PLAN_FILE
from hf_pyao.config import SETTINGS, SWITCHED_OFF, PyAOConfig, is_switched_off
from hf_pyao.errors import ConflictError, NoLayersFoundError
from hf_pyao.hf.accumulation import said_of_accumulation
from hf_pyao.hf.announce import announce
from hf_pyao.hf.environment import read_environment, variable_of
from hf_pyao.hf.micro_batch.checks import refuse_without_trainer
from hf_pyao.hf.setting_fields import PluginFields
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.settings.kind import Switch
from hf_pyao.settings.removed import refuses_removed

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_pyao.auto.offloader import Offloader

logger = logging.getLogger(__name__)

_ENABLED = Switch()


@refuses_removed
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
    _installed: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """What stands on the accelerator; each has ``remove()``."""

    _from_environment: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Names of the fields that the environment filled."""
    _num_logged: int = field(default=0, init=False, repr=False, compare=False)
    """Micro-batches that had ended when metrics were logged last."""

    def __post_init__(self) -> None:
        """Fill unset fields from the environment, and check everything."""
        kinds = {"enabled": _ENABLED, **{name: s.kind for name, s in SETTINGS.items()}}
        for name, value in read_environment(kinds).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
                self._from_environment.add(name)
        self.enabled = True if self.enabled is None else _ENABLED.check("enabled", self.enabled)
        if is_switched_off():
            logger.info(SWITCHED_OFF)
            self.enabled = False
        refuse_without_trainer(self.config(), "a training loop of your own")

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

        A model without layers is passed over, if another one has them. ``accelerator.log`` gets
        ``pyao/...`` metrics beside what it is given, as ``log_metrics`` says.
        ``accelerator.free_memory()`` and ``end_training()`` detach the models, which writes the
        report that ``report`` asks for (of further models to ``<name>.model<i>.json``); where an
        error ends the process before, it is written then. Binding again to the same accelerator
        changes nothing.

        Raises:
            ConflictError: the plugin is bound to another accelerator.
        """
        if not self.enabled or self._accelerator is accelerator:
            return self
        if self._accelerator is not None:
            raise ConflictError(
                "this PyAOPlugin is bound to another Accelerator already. Make one plugin for "
                "each, or call unbind() first.",
                key="plugin-bound",
            )
        self._accelerator = accelerator
        self._installed += [
            # `prepare` and not `prepare_model`, which FSDP2 and DeepSpeed go around.
            _Around(self, accelerator, "prepare", self._prepare),
            _Around(self, accelerator, "backward", self._backward),
            _Around(self, accelerator, "log", self._log),
            # The offloaders refer to the models, which these two are meant to let go.
            _Around(self, accelerator, "free_memory", self._free_memory),
            accelerator.register_save_state_pre_hook(self._save_plans),
            accelerator.register_load_state_pre_hook(self._load_plans),
            _Around(self, accelerator, "end_training", self._end_training),
        ]
        return self

    def unbind(self) -> None:
        """Give the accelerator its own methods back; prepared models stay attached. Idempotent."""
        while self._installed:
            self._installed.pop().remove()
        self._accelerator = None

    def detach(self) -> None:
        """Remove everything from the models and from the accelerator. Idempotent."""
        self.unbind()
        self._detach_models()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last finished micro-batch.

        With several models the keys of the i-th begin with ``model<i>/``, from 0.
        """
        return self._by_model(lambda offloader: offloader.metrics())

    def logged_metrics(self) -> dict[str, float]:
        """Return what goes to the trackers: ``pyao/<key>``, as ``log_metrics`` says.

        With several models the keys of the i-th begin with ``pyao/model<i>/``, from 0.
        """
        logged = self._by_model(lambda offloader: offloader.record.logged_metrics())
        return {f"{LOG_PREFIX}{key}": value for key, value in logged.items()}

    def _by_model(self, figures: Callable[[Offloader], dict[str, float]]) -> dict[str, float]:
        if len(self.offloaders) == 1:
            return figures(self.offloaders[0])
        return {
            f"model{index}/{key}": value
            for index, offloader in enumerate(self.offloaders)
            for key, value in figures(offloader).items()
        }

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = self.config()
        if config.stream_weights != "off":  # before Accelerate moves the models
            if self._accelerator is not None:
                label = config.label("stream_weights")
                check_accelerator_of_streaming(self._accelerator, label)
            self._attach_models([item for item in args if isinstance(item, nn.Module)])
        prepared = prepare(*args, **kwargs)
        objects = prepared if isinstance(prepared, tuple | list) else (prepared,)
        self._attach_models([item for item in objects if isinstance(item, nn.Module)])
        return prepared

    def _attach_models(self, models: list[nn.Module]) -> None:
        """Attach those of *models* that have layers.

        Raises:
            NoLayersFoundError: none has, and none was attached before.
        """
        without: NoLayersFoundError | None = None
        device = None if self._accelerator is None else self._accelerator.device
        for model in models:
            try:
                offloader = attach(model, self.config(), device=device)
            except NoLayersFoundError as error:
                without = without or error
                logger.info("a %s is not offloaded: it has no layers", class_name(model))
                continue
            if not any(offloader is known for known in self.offloaders):
                self._add(offloader)
        if without is not None and not self.offloaders:
            raise without

    def _add(self, offloader: Offloader) -> None:
        index = len(self.offloaders)
        if index and self.report is not None:
            path = Path(self.report)
            name = f"{path.stem}.model{index}{path.suffix}"
            offloader.record.write_to(str(path.with_name(name)))
        self.offloaders.append(offloader)
        if self._accelerator is not None:
            warn_of_sequence_parallel(self._accelerator.state)
            for fact in look_at_accelerator(self._accelerator.state):
                offloader.engine.effects.note(fact)
        if offloader.auto is not None:
            offloader.auto.show_on(self._log_and_show)
        self._show(offloader.describe())
        accelerator = self._accelerator
        num_micro_batches = 1 if accelerator is None else accelerator.gradient_accumulation_steps
        if line := said_of_accumulation(offloader, num_micro_batches):
            self._log_and_show(line)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Warn, once, of a model that is trained and of which hooks have seen nothing."""
        result = backward(*args, **kwargs)
        for offloader in self.offloaders:
            offloader.warn_if_bypassed()
        return result

    def _log(self, log: Callable[..., Any], values: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Log the metrics too, unless no micro-batch has ended since they were logged last.

        So evaluation's logs are left alone.
        """
        totals = [offloader.engine.figures.totals for offloader in self.offloaders]
        num_micro_batches = sum(total.num_micro_batches for total in totals)
        if num_micro_batches != self._num_logged:
            self._num_logged = num_micro_batches
            values = {**self.logged_metrics(), **values}
        return log(values, *args, **kw)

    def _free_memory(self, free_memory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._detach_models()
        return free_memory(*args, **kwargs)

    def _end_training(self, end_training: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ended = list(self.offloaders)
        self._detach_models()
        for offloader in ended:
            self._show(offloader.record.describe_end())
        return end_training(*args, **kwargs)

    def _save_plans(self, models: object, weights: object, output_dir: str) -> None:
        """Put the plans of policy ``auto`` beside what ``save_state`` saves."""
        if self._accelerator is None or not self._accelerator.is_main_process:
            return
        for index, offloader in enumerate(self.offloaders):
            if offloader.auto is not None:
                offloader.auto.save(Path(output_dir) / _plan_file(index))

    def _load_plans(self, models: object, input_dir: str) -> None:
        """Follow the plans that were saved, without measuring."""
        for index, offloader in enumerate(self.offloaders):
            if offloader.auto is not None:
                offloader.auto.resume(Path(input_dir) / _plan_file(index))

    def _log_and_show(self, line: str) -> None:
        logger.info("%s", line)
        self._show(line)

    def _show(self, line: str) -> None:
        if self._accelerator is not None:
            announce(line, self._accelerator.print)

    def _detach_models(self) -> None:
        while self.offloaders:
            self.offloaders.pop().detach()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: all but models. It is bound to the copy of the accelerator."""
        return {**vars(self), "offloaders": []}


class _Around:
    """Stands in the place of one method of one accelerator, on the instance.

    A plain object, so that copies of the accelerator, pickled ones too, have their own.

    Args:
        plugin: bound to the accelerator; after ``unbind()`` the method is called alone.
        accelerator: has the method.
        name: of the method.
        around: gets the method, and what that would get.
    """

    def __init__(
        self, plugin: PyAOPlugin, accelerator: Accelerator, name: str, around: Callable[..., Any]
    ) -> None:
        self._plugin = plugin
        self._accelerator = accelerator
        self._name = name
        self._around = around
        self._on_instance: Callable[..., Any] | None = vars(accelerator).get(name)
        setattr(accelerator, name, self)

    @property
    def _method(self) -> Callable[..., Any]:
        # Not kept, but found by its name: the methods that accelerate decorates cannot be pickled.
        own: Any = getattr(type(self._accelerator), self._name)
        return self._on_instance or own.__get__(self._accelerator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Someone may have wrapped this, and still call it after unbind().
        if self._plugin._accelerator is not self._accelerator:
            return self._method(*args, **kwargs)
        return self._around(self._method, *args, **kwargs)

    def remove(self) -> None:
        """Put the method back, unless someone has wrapped this."""
        if vars(self._accelerator).get(self._name) is self:
            delattr(self._accelerator, self._name)
            if self._on_instance is not None:
                setattr(self._accelerator, self._name, self._on_instance)


def _plan_file(index: int) -> str:
    """Return the name of the plan of the model with a number, in a checkpoint's folder."""
    path = Path(PLAN_FILE)
    return PLAN_FILE if not index else f"{path.stem}.model{index}{path.suffix}"
