"""``PyAOZerothOrderTrainer``: a Trainer that fine-tunes by two forwards a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_pyao.auto.zeroth_order.step import ZerothOrder
from hf_pyao.engine.zeroth_order.perturbation import ZerothOrderSettings
from hf_pyao.errors import ConfigError
from hf_pyao.model.map.wrappers import unwrap_model

_OPTIONS = ("num_resident", "host_memory_gib", "stream_embeddings", "head_loss")
"""Arguments of ``ZerothOrder`` that the Trainer takes."""
_REFUSED = {
    "pyao_config": "it saves no activations, which a policy or 'auto' could move; leave it out",
    "activation_offload": "it saves no activations; give False, or train with PyAOTrainer",
    "optimizers": "it has no gradients for one; give zeroth_order=, and a scheduler beside None",
    "fp16": "its gradient scaler needs gradients; load the model in float16, or give bf16",
    "weight_decay": "it has no weight decay; give 0",
    "deepspeed": "DeepSpeed moves and shards the weights itself",
    "fsdp": "FSDP shards the weights",
    "torch_compile": "compiled code reads weights by itself",
    "auto_find_batch_size": "it starts training again, after steps that were made",
    "n_gpu": "Trainer would wrap the model in nn.DataParallel; set CUDA_VISIBLE_DEVICES to one "
    "device, or start two processes",
}
"""Arguments that zeroth order cannot have, each with the reason."""


class ZerothOrderOptimizer(torch.optim.Optimizer):
    """Ends steps of *zeroth_order*, for those who expect an optimizer: schedulers, checkpoints.

    Args:
        zeroth_order: of the model that is trained.
        parameters: its trained parameters.
        learning_rate: of the first step; a scheduler changes it.
    """

    def __init__(
        self, zeroth_order: ZerothOrder, parameters: list[nn.Parameter], learning_rate: float
    ) -> None:
        self.zeroth_order = zeroth_order
        self.projected_gradient = 0.0
        """Of the last step."""
        super().__init__(parameters, {"lr": learning_rate})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End a step with the learning rate of the first group."""
        rate = float(self.param_groups[0]["lr"])
        self.projected_gradient = self.zeroth_order.end_step(rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with that of zeroth order; all weights are updated first."""
        return {**super().state_dict(), "zeroth_order": self.zeroth_order.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from *state_dict*.

        Raises:
            ConfigError: it is of another optimizer, or does not fit the model.
        """
        if "zeroth_order" not in state_dict:
            raise ConfigError(
                "the checkpoint has the state of an optimizer that needs gradients; expected one "
                "of zeroth order. Resume it with the Trainer that has written it.",
                key="zeroth-order-resume",
            )
        self.zeroth_order.load_state_dict(state_dict["zeroth_order"])
        rest = {key: value for key, value in state_dict.items() if key != "zeroth_order"}
        super().load_state_dict(rest)


class PyAOZerothOrderTrainer(Trainer):
    """``transformers.Trainer`` that fine-tunes by two forwards a step, without gradients.

    Learning rate, schedule, accumulation, evaluation, files and resume are those of ``Trainer``.
    Weights of layers live on the host and visit the device. With two processes, rank 0 runs the
    pass at +epsilon and rank 1 that at -epsilon, of the same batches. Optimizer flags have no
    meaning here. See ``../auto/zeroth_order``.

    Args:
        zeroth_order: epsilon, momentum and seed; None: the defaults, with ``args.seed``.
        num_resident: layers that stay on the device; None: all.
        host_memory_gib: most memory of the host, in GiB; None: this process's share.
        head_loss: ``"chunked"`` or ``"auto"``: both passes compute the loss without all logits.

    Raises:
        ConfigError: settings for activations are given, which zeroth order does not save; or
            settings of training that need gradients, or shard or compile the model.
    """

    def __init__(
        self, *args: Any, zeroth_order: ZerothOrderSettings | None = None, **kwargs: Any
    ) -> None:
        given = [*args, kwargs.get("args")]
        training_args = next((each for each in given if isinstance(each, TrainingArguments)), None)
        _refuse(training_args, kwargs)
        self._options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        seed = 42 if training_args is None else training_args.seed
        self._options["settings"] = zeroth_order or ZerothOrderSettings(seed=seed)
        self.zeroth_order: ZerothOrder | None = None
        """What trains the model; None outside of :meth:`train`."""
        super().__init__(*args, **kwargs)
        accelerator: Any = self.accelerator
        own = accelerator.prepare_model

        def prepare_model(model: nn.Module, *_: Any, **__: Any) -> Any:
            return own(model, device_placement=False, evaluation_mode=True)

        accelerator.prepare_model = prepare_model  # it neither moves nor wraps the model

    # ---- what Trainer calls --------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the base class's, with the same batches on both ranks."""
        accelerator: Any = self.accelerator
        if accelerator.num_processes == 1:
            return super().get_train_dataloader()

        def prepare(loader: Any, *_: Any, **__: Any) -> Any:
            prepared = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=1,
                process_index=0,
                put_on_device=accelerator.device.type != "cpu",
                rng_types=list(accelerator.rng_types or ()),
                dispatch_batches=False,
                use_seedable_sampler=accelerator.use_seedable_sampler,
            )
            accelerator._dataloaders.append(prepared)
            return prepared

        accelerator.prepare_data_loader = prepare
        try:
            return super().get_train_dataloader()
        finally:
            del accelerator.prepare_data_loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Put the weights where they train, and return what ends steps."""
        assert self.model is not None
        zeroth_order = self._open()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        rate = float(self.args.learning_rate)
        self.optimizer = ZerothOrderOptimizer(zeroth_order, trained, rate)
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; the model has its updated, plain weights afterwards."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close()

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run both passes over a micro-batch; return the mean of their losses."""
        assert self.zeroth_order is not None
        num_items = args[0] if args else kwargs.get("num_items_in_batch")
        model.train()
        prepared = self._prepare_inputs(inputs)
        num = getattr(self, "current_gradient_accumulation_steps", 1)
        # A loss may be a part of the step's, which the micro-batches' losses add up to.
        is_part = self.compute_loss_func is not None
        is_part |= bool(self.model_accepts_loss_kwargs) and num_items is not None

        def loss_of(model: nn.Module) -> Any:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, dict(prepared), num_items_in_batch=num_items)
            return loss * num if is_part and num != 1 else loss

        with _without_cache(model):
            return self.zeroth_order.accumulate(model, loss_of).to(self.args.device) / num

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: :meth:`create_optimizer` moves its weights."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the base class does, with weights that visit the device."""
        if self.zeroth_order is not None:
            return super().evaluation_loop(*args, **kwargs)
        self._open()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._close()

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log the projected gradient in place of the norm of gradients that are not there."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if "grad_norm" in logs and isinstance(optimizer, ZerothOrderOptimizer):
            del logs["grad_norm"]
            logs["projected_gradient"] = optimizer.projected_gradient
        super().log(logs, *args, **kwargs)

    def _open(self) -> ZerothOrder:
        self._close()
        assert self.model is not None
        self.zeroth_order = ZerothOrder(self.model, device=self.args.device, **self._options)
        return self.zeroth_order

    def _close(self) -> None:
        zeroth_order, self.zeroth_order = self.zeroth_order, None
        if zeroth_order is not None:
            zeroth_order.close()


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Keep a model of transformers from saving keys and values while it trains."""
    config: Any = getattr(unwrap_model(model), "config", None)
    before = getattr(config, "use_cache", None)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before


def _refuse(args: TrainingArguments | None, kwargs: dict[str, Any]) -> None:
    """Refuse, before data is prepared, what has no meaning without gradients."""
    given: dict[str, Any] = {name: getattr(args, name, None) for name in _REFUSED}
    given["pyao_config"] = kwargs.get("pyao_config")
    given["optimizers"] = kwargs.get("optimizers", (None,))[0]
    given["n_gpu"] = args is not None and args.n_gpu > 1
    for name, reason in _REFUSED.items():
        if given[name]:
            raise ConfigError(
                f"{name} is given, and cannot be used with zeroth order: {reason}.",
                key="settings-contradict",
            )
