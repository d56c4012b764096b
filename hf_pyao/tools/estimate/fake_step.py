"""One training step on fake tensors: every byte that would be alive on the device, and no memory.

The engine, the head loss and transformers run as they do in training. Fake tensors of a CPU stand
for the device's; where a CPU would pick another operation than CUDA does, CUDA's is put in its
place (``hf_pyao/model/fake_cuda``). So no GPU is needed, and none is measured.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.model.fake_cuda.cuda_choices import answers_without_values, choices_of_cuda
from hf_pyao.model.fake_cuda.cuda_operations import operations_of_cuda, replaced
from hf_pyao.plan.hardware.beside_step import FUSED, optimizer_requests, zero_bucket
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.predict.optimizer_step import gradients_of
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.weights.base_names import ALL_LINEAR, PLAIN
from hf_pyao.text import describe_error
from hf_pyao.tools.simulation.kept_models import KeptModels, new_mode
from hf_pyao.tools.simulation.quantised_base import fake_parameter, quantise_linear_layers

BUCKET_BYTES = zero_bucket().nbytes
"""What ZeRO-2 reduces gradients in: 5e8 elements of half precision."""


@contextmanager
def runs_without_values(model_type: str) -> Iterator[None]:
    """Say of an error of the model's own code that fake tensors have no values.

    Raises:
        ConfigError: the model cannot be run on fake tensors.
    """
    try:
        yield
    except PyAOError:
        raise
    except Exception as error:  # of the model's own code, which may look at values
        raise ConfigError(
            f"the model {model_type} cannot be run on fake tensors, which have no values: "
            f"{describe_error(error)}",
            key="model-not-run",
        ) from error


@dataclass(frozen=True, kw_only=True)
class FakeTraining:
    """How a model is trained, where it is not."""

    config: Any
    """The model's transformers configuration; it is not changed."""
    checkpointing: bool = False
    training_state: str = "host"
    """``"host"`` is ZeRO-2 with its optimizer offloaded: a gradient leaves as soon as it is
    complete, through a bucket of 1 GB, and AdamW works on the host. ``"device"`` is a plain loop:
    gradients stay, and so do the optimizer's states."""
    optimizer_bytes: int = 4
    """Bytes of the optimizer's states for each trained parameter, where they are on the device: 4
    is AdamW's two moments in bfloat16."""
    operations_of: str = "cuda"
    """Whose choice of operations is run: ``"cuda"`` or ``"cpu"``."""
    lora_rank: int | None = None
    """Train LoRA adapters of this rank; None: all parameters."""
    lora_targets: str = ALL_LINEAR
    """Modules that get adapters: names, separated by commas, or ``"all-linear"`` as in PEFT. That
    puts adapters on fused experts too, which then cannot be streamed."""
    base: str = PLAIN
    """How frozen linear layers are stored beside adapters: a key of
    :data:`~hf_pyao.plan.weights.base_names.BASES`."""
    adapter_dtype: str = "bfloat16"
    """Of adapters. With ``"float32"``, which is PEFT's own choice, forward runs under autocast in
    :attr:`dtype`, as with ``bf16=True`` or ``fp16=True`` of Trainer."""
    lora_dropout: float = 0.0
    """Share of an adapter's input that is dropped."""
    is_kbit_prepared: bool = False
    """Whether PEFT's ``prepare_model_for_kbit_training`` was called: what is not quantised is
    float32 then, and forward runs under autocast."""
    dtype: str = "bfloat16"
    """Of weights and arithmetic."""
    implementation: str = FUSED
    """How the optimizer goes over parameters, where it is torch's and on the device; see
    :func:`~hf_pyao.plan.hardware.beside_step.optimizer_requests`."""
    kernels: KernelSettings = ANY_DEVICE
    """The device and the process that kernels are chosen for, and their workspaces computed."""

    kept: KeptModels | None = field(default=None, compare=False, repr=False)
    """Where models are kept from one step to the next; None: each step builds its own."""

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model on fake tensors, or take a kept one; everything of it happens in here.

        Yields:
            The model, and the mode.
        """
        if self.kept is not None:
            with self.kept.model(self._key, self._build, self._operations) as found:
                yield found
            return
        with new_mode() as fake_mode, self._operations():
            yield self._build(), fake_mode

    @property
    def _key(self) -> tuple[object, ...]:
        """What the model follows from."""
        shape = (id(self.config), self.checkpointing, self.dtype)
        adapters = (self.lora_rank, self.lora_targets, self.adapter_dtype, self.lora_dropout)
        return (*shape, *adapters, self.base, self.is_kbit_prepared)

    def _operations(self) -> AbstractContextManager[None]:
        return _operations_of(self.operations_of, self.kernels)

    def _build(self) -> nn.Module:
        config = type(self.config).from_dict(self.config.to_dict())
        config.use_cache = False
        built: nn.Module
        if self.lora_rank is None:
            built = build_model(config, checkpointing=self.checkpointing, dtype=self.dtype)
        else:
            built = build_lora_model(self, config)
        return built

    def let_gradients_go(self, model: nn.Module) -> None:
        """Move gradients off the device as they are complete, if training does."""
        if self.training_state == "host":
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _let_go_of_gradient
                )

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of the optimizer's states on the device."""
        if self.training_state == "host":
            return 0
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return self.optimizer_bytes * num_trained

    @property
    def bucket_bytes(self) -> int:
        """What gradients are reduced in, in backward; 0 where they stay."""
        return BUCKET_BYTES if self.training_state == "host" else 0

    def with_optimizer(self, program: StepProgram) -> StepProgram:
        """Return *program* with what the optimizer's step allocates, if it is on the device."""
        if self.training_state == "host":
            return program
        requests = optimizer_requests(
            [program.buffers[number].nbytes for number in sorted(gradients_of(program))],
            self.implementation,
            has_moments=self.optimizer_bytes > 0,
        )
        return dataclasses.replace(program, optimizer_requests=requests)

    def run(
        self,
        model: nn.Module,
        micro_batch: int,
        sequence_length: int,
        end_phase: Callable[[str], None] = lambda name: None,
        label: Callable[[Tensor, str], None] = lambda tensor, name: None,
    ) -> None:
        """Run forward, loss and backward of a micro-batch without padding.

        Args:
            model: from :meth:`model`.
            micro_batch: samples.
            sequence_length: tokens of each.
            end_phase: told of the end of each part of the step.
            label: told of tensors that have a name.
        """
        ids = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
        # As in a loop by hand, the outputs live on during backward, logits included.
        is_mixed = self.lora_rank is not None and (
            self.adapter_dtype == "float32" or self.is_kbit_prepared
        )
        with torch.autocast("cpu", getattr(torch, self.dtype), enabled=is_mixed):
            outputs = model(input_ids=ids, labels=ids)
        end_phase("head and loss")
        bucket = None
        if self.bucket_bytes:
            bucket = torch.empty(self.bucket_bytes, dtype=torch.uint8)
            label(bucket, "the bucket that gradients are reduced in")
        label(outputs.loss, "the loss")
        logits = dict.get(outputs, "logits")  # not as users read it: they would be computed then
        if type(logits) is FakeTensor:
            label(logits, "the logits")
        outputs.loss.backward()
        end_phase("backward")
        del bucket, outputs


def _operations_of(device: str, kernels: KernelSettings) -> AbstractContextManager[None]:
    if device == "cuda":
        return operations_of_cuda(*choices_of_cuda(), kernels=kernels)
    return replaced(*answers_without_values())


def build_model(config: Any, *, checkpointing: bool, dtype: str = "bfloat16") -> Any:
    """Return the model of *config* in *dtype* and training mode."""
    from transformers import AutoModelForCausalLM

    cls: Any = AutoModelForCausalLM._model_mapping[type(config)]
    has_sdpa = getattr(cls, "_supports_sdpa", False)
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa" if has_sdpa else "eager",
    ).train()
    if checkpointing:
        # transformers 5.23 renamed it.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        # The state of the random numbers is a few bytes, and fake tensors have none.
        enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def build_lora_model(training: FakeTraining, config: Any) -> Any:
    """Return the model of *config* with the LoRA adapters that *training* says.

    Raises:
        ConfigError: peft or bitsandbytes is missing, or the model has no such modules.
    """
    try:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ConfigError(
            "LoRA needs peft, which is not installed: pip install peft.", key="missing-package"
        ) from error
    targets, dtype = training.lora_targets, training.dtype
    lora = LoraConfig(
        r=training.lora_rank or 0,
        target_modules=targets if targets == ALL_LINEAR else targets.split(","),
        lora_dropout=training.lora_dropout,
        task_type="CAUSAL_LM",
    )
    # On the meta device first: peft moves parameters, which fake ones do not take.
    with unset_fake_temporarily(), torch.device("meta"), warnings.catch_warnings():
        for about in ("fan_in_fan_out is set to", "`is_gradient_checkpointing` is deprecated"):
            warnings.filterwarnings("ignore", about)  # of PEFT: nobody here can heed them
        model = build_model(config, checkpointing=training.checkpointing, dtype=dtype)
        quantise_linear_layers(model, training.base)
        if training.is_kbit_prepared:
            prepare: Any = prepare_model_for_kbit_training
            model = prepare(model, use_gradient_checkpointing=False)
        # A checkpoint's first input has to carry a gradient, where the embedding is frozen.
        model.enable_input_require_grads()
        try:
            model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
        except ValueError as error:
            raise ConfigError(
                f"adapters on {targets!r}: {describe_error(error)}", key="model-spec"
            ) from error
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.data = parameter.data.to(getattr(torch, training.adapter_dtype))
    _materialize(model, getattr(torch, dtype))
    return model


def _materialize(model: nn.Module, dtype: torch.dtype) -> None:
    """Give *model*, on the meta device, parameters and buffers of the mode that is on.

    Quantised weights are as if made of weights of *dtype*.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _made(tensor, dtype)
                table[name] = made[id(tensor)]  # type: ignore[assignment]


def _made(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the mode that is on, like one on the meta device."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    found = fake_parameter(tensor, dtype)
    if found is not None:
        return found
    return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)


def _let_go_of_gradient(parameter: Tensor) -> None:
    parameter.grad = None
