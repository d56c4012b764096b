"""Reading, changing and hooking the logits of a chunked loss: as without it, or refused."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_to_fp32, recursively_apply
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from torch.utils import _pytree as pytree

from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.head.head_loss import HeadLoss, install_head_loss
from tests.helpers.head_loss_models import VOCAB, assert_same_step, make_batch, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning"),
    # PEFT uses the older of two names, which transformers 5.23 warns about.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning"),
]


def make(kind: str = "llama", dtype: torch.dtype = torch.float64) -> tuple[Any, HeadLoss]:
    """Return a model with a chunked head loss; *kind* is an architecture, or a head with LoRA."""
    model: Any = make_model("llama" if kind == "lora" else kind, dtype)
    if kind == "lora":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    return model.train(), install_head_loss(model, "chunked", chunk_tokens=16)


# ---- hooks ---------------------------------------------------------------------------------------


def z_loss(outputs: Any, labels: Tensor) -> Tensor:
    return outputs.loss + 1e-2 * torch.logsumexp(outputs.logits, -1).square().mean()


def distillation(outputs: Any, labels: Tensor) -> Tensor:
    teacher = torch.zeros(VOCAB, dtype=outputs.logits.dtype).log_softmax(-1)
    return F.kl_div(
        outputs.logits.float().log_softmax(-1), teacher, log_target=True, reduction="batchmean"
    )


def own_cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "lora"])
@pytest.mark.parametrize("loss_of", [z_loss, distillation, own_cross_entropy])
def test_a_loss_of_logits_that_were_read_late_is_refused(
    loss_of: Callable[[Any, Tensor], Tensor], kind: str
) -> None:
    model, _ = make(kind)
    batch = make_batch()
    loss = loss_of(model(**batch, use_cache=False), batch["labels"])
    with pytest.raises(ConflictError, match="head_loss='off'"):
        loss.backward()
    outputs = model(**batch, use_cache=False)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(outputs.loss, outputs.logits)


@pytest.mark.parametrize("return_dict", [True, False])
def test_values_of_logits_are_read_beside_the_loss(return_dict: bool) -> None:
    """As TRL's trainers do for accuracy and entropy."""
    (model, handle), own = make(), make_model("llama", torch.float64)
    batch = make_batch()
    results = []
    for each in (model, own):
        loss, logits = each(**batch, return_dict=return_dict, use_cache=False)[:2]
        with torch.no_grad():
            entropy = torch.distributions.Categorical(logits=logits).entropy()
        loss.backward()
        results.append((logits.detach(), logits.argmax(-1), entropy))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    assert handle.metrics()["head_loss_num_chunked"] == 1


def test_hooks_that_the_loss_function_hangs_on_its_logits_work() -> None:
    def hooked(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        flat = logits[:, :-1].flatten(0, 1)
        logits.register_hook(lambda grad: grad * 0.5)
        return F.cross_entropy(flat, labels[:, 1:].flatten())

    (mine, handle), own = make(), make_model("llama", torch.float64)
    mine.loss_function = own.loss_function = hooked
    assert_same_step(mine, own, 0.0, **make_batch())
    assert handle.metrics()["head_loss_num_own"] == 1


# ---- changes in place ----------------------------------------------------------------------------


def halve(logits: Any) -> None:
    logits *= 0.5


def mask_words(logits: Any) -> None:
    logits[:, :-1][..., 5:9] = -1.0


@pytest.mark.parametrize("change", [halve, mask_words])
def test_changes_in_place_inside_the_loss_function(change: Callable[[Any], None]) -> None:
    def changed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        shifted = logits[:, :-1]  # before the change, and sees it
        change(logits)
        return F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())

    (mine, _), own = make(), make_model("llama", torch.float64)
    mine.loss_function = own.loss_function = changed
    outputs, expected = assert_same_step(mine, own, 0.0, **make_batch())
    assert torch.equal(outputs.logits, expected.logits)


# ---- reading late --------------------------------------------------------------------------------


def optimizer(name: str, **options: Any) -> Callable[[list[Tensor]], None]:
    def step(parameters: list[Tensor]) -> None:
        getattr(torch.optim, name)(parameters, lr=0.1, **options).step()

    return step


STEPS = {"SGD": optimizer("SGD", foreach=False), "AdamW fused": optimizer("AdamW", fused=True)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi", "lora"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("order", ["after backward", "without backward"])
def test_logits_are_not_those_of_other_weights(order: str, name: str, kind: str) -> None:
    model, _ = make(kind, torch.float32)
    model(**make_batch(seed=1)).loss.backward()  # gradients for the optimizers
    outputs, read = model(**make_batch()), model(**make_batch())
    values = read.logits.detach()
    if order == "after backward":
        outputs.loss.backward()
    head = model.get_output_embeddings()
    STEPS[name]([p for p in head.parameters() if p.requires_grad])
    with pytest.raises(SavedTensorModifiedError, match="before the step"):
        outputs.logits.argmax(-1)
    assert torch.equal(read.logits, values), "read in time"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_logits_can_be_read_until_the_step(kind: str) -> None:
    model, _ = make(kind)
    expected = model.eval()(**make_batch()).logits
    outputs = model.train()(**make_batch())
    outputs.loss.backward()
    assert torch.equal(outputs.logits, expected), "after backward"
    outputs = model(**make_batch())
    with torch.no_grad():
        assert torch.equal(outputs.logits, expected), "without gradients"
        model.get_output_embeddings().weight[0].mul_(2)
    outputs = model(**make_batch())
    with torch.no_grad():
        model.get_output_embeddings().weight[0].mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="had changed"):
        outputs.logits.detach()


def test_logits_of_a_gathered_head() -> None:
    model, _ = make()
    weight, whole = model.lm_head.weight, model.lm_head.weight.data.clone()
    weight.ds_id = 0

    def gather(*_: Any) -> None:
        weight.data = whole

    def release(*_: Any) -> None:
        weight.data = torch.empty(0, dtype=whole.dtype)

    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    expected = model.eval()(**make_batch()).logits
    first, second = (model.train()(**make_batch()) for _ in range(2))
    assert torch.equal(first.logits, expected)
    optimizer("SGD")([whole])
    with pytest.raises(SavedTensorModifiedError, match="before the step"):
        second.logits.detach()


def test_an_unread_output_does_not_hold_the_hidden_states() -> None:
    model, _ = make()
    seen: list[Any] = []
    model.model.norm.register_forward_hook(lambda _m, _a, out: seen.append(weakref.ref(out)))
    loss = model(**make_batch(), use_cache=False).loss
    assert loss.requires_grad and seen[0]() is None


# ---- walking through outputs ---------------------------------------------------------------------


def zero3(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Walk as DeepSpeed's ``apply_to_tensors_only`` does: dictionaries in place, item by item."""
    if isinstance(value, tuple | list):
        return type(value)([zero3(function, item) for item in value])
    if isinstance(value, dict):
        for key in value.keys():
            value[key] = zero3(function, value[key])
        return value
    return function(value) if isinstance(value, Tensor) else value


def by_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Walk as FSDP2 does: a dataclass field by field."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            function(item)
    return value


WALKS: dict[str, Callable[[Callable[[Tensor], Tensor], Any], Any]] = {
    "ZeRO-3": zero3,
    "fields": by_fields,
    "torch.distributed": _apply_to_tensors,
    "pytree": lambda function, value: pytree.tree_map_only(Tensor, function, value),
    "accelerate": recursively_apply,
    "casts": lambda function, value: convert_to_fp32(value),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_through_the_outputs_computes_nothing(name: str) -> None:
    (mine, handle), own = make(), make_model("llama", torch.float64)
    seen: list[torch.Size] = []

    def function(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    outputs = WALKS[name](function, mine(**make_batch(), use_cache=False))
    expected = own(**make_batch(), use_cache=False)
    assert handle.metrics()["head_loss_num_logits_read"] == 0
    assert all(len(shape) < 3 for shape in seen)
    assert list(outputs) == list(expected)
    assert torch.equal(outputs["logits"], expected.logits)
    assert handle.metrics()["head_loss_num_logits_read"] == 1
    outputs.loss.backward()


def zero3_hooks(model: nn.Module) -> None:
    """Put around every module what ZeRO-3 does with its outputs, through tensors of the graph."""

    class Before(torch.autograd.Function):
        """Stands for what gathers a module's weights before its backward."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        # What it does with outputs that are neither tensors nor containers.
        if not isinstance(output, Tensor | tuple | list | dict):
            [item for item in vars(output).items() if isinstance(item[1], Tensor)]
        return zero3(
            lambda tensor: Before.apply(tensor) if tensor.requires_grad else tensor, output
        )

    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.ds_id = 0  # type: ignore[attr-defined]
        module.register_forward_hook(after_forward)


def test_zero3_around_every_module() -> None:
    mine, own = (make_model("llama", torch.float64) for _ in range(2))
    zero3_hooks(mine)
    zero3_hooks(own)
    handle = install_head_loss(mine, "chunked", chunk_tokens=16)
    for seed in range(2):
        assert_same_step(mine, own, 1e-12, **make_batch(seed=seed))
    assert handle.metrics()["head_loss_num_chunked"] == 2
    assert handle.metrics()["head_loss_num_logits_read"] == 0


def test_who_reads_the_logits_of_every_step_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, handle = make()

    def token_accuracy(outputs: Any) -> Tensor:
        return outputs.logits.argmax(-1)

    with caplog.at_level(logging.WARNING, logger="hf_pyao"):
        for _ in range(3):
            token_accuracy(model(**make_batch()))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "something reads outputs.logits" in record.getMessage()
    assert f"token_accuracy in {__file__}" in record.getMessage()
    assert handle.metrics()["head_loss_num_logits_read"] == 3
    assert not any(isinstance(v, DeferredLogits) for v in model.eval()(**make_batch()).values())
