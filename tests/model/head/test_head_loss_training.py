"""The head loss under PEFT, Accelerate, Trainer, TRL, DDP and FSDP."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.head.head_loss import HeadLoss, install_head_loss
from tests.helpers.head_loss_models import (
    VOCAB,
    assert_same_step,
    gradients,
    make_batch,
    make_model,
    pair,
)

# PEFT warns about tied heads among the targets; the tests want just that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning"),
    # PEFT and TRL use the older of two names, which transformers 5.23 warns about.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning"),
]

CHUNK = 16


def install(model: nn.Module) -> HeadLoss:
    return install_head_loss(model, chunk_tokens=CHUNK)


# ---- PEFT ----------------------------------------------------------------------------------------


def with_lora(model: nn.Module, **options: Any) -> Any:
    """Wrap in LoRA whose second matrices are not zero, so that every adapter has gradients."""
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, **options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return wrapped.train()


LORA: dict[str, dict[str, Any]] = {
    "layers only": {"target_modules": ["q_proj", "v_proj"]},
    "head too": {"target_modules": ["q_proj", "lm_head"]},
    "head with dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", LORA)
def test_lora(case: str, when: str) -> None:
    mine, own = pair("llama", torch.float64)
    if when == "before":
        install(mine)
    mine, own = with_lora(mine, **LORA[case]), with_lora(own, **LORA[case])
    handle = install(mine)
    outputs, expected = assert_same_step(mine, own, 1e-12, **make_batch())
    assert handle.metrics()["head_loss_num_chunked"] == 1
    assert handle.metrics()["head_loss_num_chunks"] == 4
    assert torch.equal(outputs.logits, expected.logits)


def test_lora_on_the_head_with_dropout_keeps_its_own_loss() -> None:
    options = {"target_modules": ["lm_head"], "lora_dropout": 0.3}
    mine, own = (with_lora(make_model("llama"), **options) for _ in range(2))
    handle = install(mine)
    outputs = []
    for model in (mine, own):
        torch.manual_seed(2)
        outputs.append(model(**make_batch()))
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert handle.metrics()["head_loss_num_chunked"] == 0
    assert "dropout (p=0.3)" in handle.describe()


def test_switched_off_adapters() -> None:
    mine, own = (with_lora(make_model("llama"), **LORA["head saved"]) for _ in range(2))
    install(mine)
    with torch.no_grad():
        for model in (mine, own):
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    with mine.disable_adapter(), own.disable_adapter():
        assert torch.equal(mine(**make_batch()).loss, own(**make_batch()).loss)
    assert torch.equal(mine(**make_batch()).loss, own(**make_batch()).loss)


# ---- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_accelerators_autocast_does_not_compute_the_logits(when: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    mine, own = pair("gpt2")
    if when == "before prepare":
        install(mine)
    mine, own = accelerator.prepare(mine), accelerator.prepare(own)
    handle = install(mine)
    outputs, expected = mine(**make_batch()), own(**make_batch())
    stand_in = next(value for value in outputs.values() if isinstance(value, DeferredLogits))
    assert stand_in.is_put_off
    assert outputs.logits.dtype == expected.logits.dtype == torch.float32
    assert torch.equal(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0)
    assert handle.metrics()["head_loss_num_chunked"] == 1
    unwrapped = accelerator.unwrap_model(mine, keep_fp32_wrapper=False)
    plain = accelerator.unwrap_model(own, keep_fp32_wrapper=False)
    assert torch.equal(unwrapped(**make_batch()).loss, plain(**make_batch()).loss)
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- Trainer -------------------------------------------------------------------------------------


TRAINING: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def train(model: Any, folder: Path, **options: Any) -> Any:
    """Train for three steps of three micro-batches."""
    rows = make_batch(24, 12)
    data = [{key: value[i] for key, value in rows.items()} for i in range(24)]
    args = TrainingArguments(str(folder), **TRAINING, **options)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.sampled(every=1000)
def test_trainer_with_accumulation_and_evaluation(name: str, tmp_path: Path) -> None:
    mine, own = pair(name)
    handle = install(mine)
    options = {"eval_strategy": "steps", "eval_steps": 1}
    got = train(mine, tmp_path, **options)
    expected = train(own, tmp_path, **options)
    assert handle.metrics()["head_loss_num_chunked"] == 9
    assert handle.metrics()["head_loss_num_own"] == 0
    for key in ("loss", "eval_loss", "grad_norm"):
        assert logged(got, key) == pytest.approx(logged(expected, key), rel=1e-4)
        assert len(logged(got, key)) == 3


@pytest.mark.thorough
def test_trainer_with_label_smoothing_keeps_its_own_way(tmp_path: Path) -> None:
    # It takes the labels away from the model, so that the model has no loss to compute in chunks.
    mine, own = pair("llama")
    handle = install(mine)
    got = train(mine, tmp_path, label_smoothing_factor=0.1)
    expected = train(own, tmp_path, label_smoothing_factor=0.1)
    assert logged(got, "loss") == logged(expected, "loss")
    assert handle.metrics()["head_loss_num_chunked"] == 0


# ---- TRL -----------------------------------------------------------------------------------------


def tiny_tokenizer() -> Any:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<eos>"
    )


# ---- sharded heads -------------------------------------------------------------------------------


def gather_only_around_calls(head: Any) -> None:
    """Do to a linear head what ZeRO-3 does: its weight is whole in its own calls, and nowhere else.

    Gathered before forward, released after, and gathered again when the gradient of what the call
    returned arrives.
    """
    whole = head.weight.data.clone()
    head.weight.ds_id = 0

    def gather(*_: Any) -> None:
        head.weight.data = whole

    def release(module: nn.Module, args: Any, output: Any) -> None:
        head.weight.data = torch.empty(0, dtype=whole.dtype)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(gather)

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(release)
    head.weight.data = torch.empty(0, dtype=whole.dtype)


def test_a_head_that_is_gathered_in_hooks_around_its_calls() -> None:
    mine, own = pair("llama", torch.float64)
    for model in (mine, own):
        gather_only_around_calls(model.lm_head)
    handle = install(mine)
    outputs, expected = assert_same_step(mine, own, 1e-12, **make_batch())
    assert handle.metrics()["head_loss_num_chunked"] == 1
    assert torch.equal(outputs.logits, expected.logits)


# ---- several ranks -------------------------------------------------------------------------------

DDP_CASES: dict[str, tuple[str, dict[str, bool]]] = {
    "plain": ("llama", {}),
    "tied": ("gpt2", {}),
    "unused": ("gpt2", {"find_unused_parameters": True}),
    "static": ("gpt2", {"static_graph": True}),
    "buckets": ("gpt2", {"gradient_as_bucket_view": True}),
}


def on_ranks(rank: int, folder: str, check: str) -> None:
    """One rank: run *check* of this module, and leave nothing of it when the group is destroyed."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    globals()[check](rank)
    gc.collect()  # A DDP model that outlives its group can deadlock in its destructor.
    dist.barrier()
    dist.destroy_process_group()


def check_ddp(rank: int) -> None:
    """Compare two DDP models in every case: loss and reduced gradients, over two steps."""
    for name, options in DDP_CASES.values():
        mine, own = pair(name, torch.float64)
        handle = install(mine)
        # A bucket smaller than the head's gradient: it is reduced by itself.
        models = [DistributedDataParallel(m, bucket_cap_mb=0.01, **options) for m in (mine, own)]
        for step in range(2):
            for model in models:
                model.zero_grad()
            batch = make_batch(seed=10 * step + rank)
            assert_same_step(models[0], models[1], 1e-11, **batch)
        assert handle.metrics()["head_loss_num_chunked"] == 2
        for grad in gradients(mine).values():
            other: list[Tensor] = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(other, grad)
            assert torch.equal(other[0], other[1])


def shard_whole(model: Any) -> nn.Module:
    """FSDP2, the head in the root's group."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def shard_head_too(model: Any) -> nn.Module:
    """FSDP2, the head in a group of its own that is resharded after each call."""
    fully_shard(model.lm_head)
    return shard_whole(model)


def shard_head_with_norm(model: Any) -> nn.Module:
    """FSDP2, the head in a group with the last norm, as Accelerate makes it."""
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    return shard_whole(model)


def shard_head_with_norm_anew(model: Any) -> nn.Module:
    """The same, resharded after the norm's and the head's call."""
    fully_shard([model.model.norm, model.lm_head])
    return shard_whole(model)


def shard_first_generation(model: Any) -> nn.Module:
    """FSDP1 with the original parameters, the head wrapped by itself."""
    model.lm_head = FullyShardedDataParallel(
        model.lm_head, use_orig_params=True, device_id=torch.device("cpu")
    )
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def check_fsdp(rank: int) -> None:
    """Compare two sharded models, kind by kind: losses, and this rank's shards after two steps."""
    for shard in (
        *(shard_whole, shard_head_too, shard_head_with_norm, shard_head_with_norm_anew),
        shard_first_generation,
    ):
        models = [shard(model) for model in pair("llama", torch.float64)]
        handle = install(models[0])
        losses: list[list[float]] = []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append([])
            for step in range(2):
                loss = model(**make_batch(seed=10 * step + rank)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-11), shard.__name__
        assert handle.metrics()["head_loss_num_chunked"] == 2, handle.describe()
        assert handle.metrics()["head_loss_num_own"] == 0
        assert handle.metrics()["head_loss_num_logits_read"] == 0, shard.__name__
        for mine, own in zip(models[0].parameters(), models[1].parameters(), strict=True):
            local = [p.to_local() if isinstance(p, DTensor) else p for p in (mine, own)]
            torch.testing.assert_close(local[0], local[1], rtol=1e-9, atol=1e-11)
        check_reading(models, shard is not shard_whole, rank)


def check_reading(models: list[Any], has_own_group: bool, rank: int) -> None:
    """Read the logits of sharded models: before backward, after it, and after a step."""
    outputs, expected = (model(**make_batch(seed=rank)) for model in models)
    torch.testing.assert_close(outputs.logits.detach(), expected.logits, rtol=1e-9, atol=1e-9)
    outputs, late = (models[0](**make_batch(seed=rank)) for _ in range(2))
    (outputs.loss + late.loss).backward()
    if has_own_group:  # which gathers the weight for this call, and so before the step
        torch.testing.assert_close(outputs.logits.detach(), expected.logits, rtol=1e-9, atol=1e-9)
        optimizer = torch.optim.SGD(models[0].parameters(), lr=1.0)
        optimizer.step()
    with pytest.raises(SavedTensorModifiedError, match="sharded again"):
        late.logits.detach()


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_ddp", "check_fsdp"])
def test_two_ranks(check: str, tmp_path: Path) -> None:
    spawn(on_ranks, args=(str(tmp_path), check), nprocs=2)
