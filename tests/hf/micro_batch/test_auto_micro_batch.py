"""A Trainer that chooses its micro-batch: what it chooses, and that nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import HfArgumentParser, Trainer

from hf_pyao import PyAOCallback, PyAOConfig, PyAOPlugin, PyAOTrainer, PyAOTrainingArguments
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.hf.micro_batch import before_training as auto_micro_batch
from hf_pyao.hf.micro_batch.before_training import choose_batch
from hf_pyao.hf.micro_batch.checks import check_auto_micro_batch
from hf_pyao.hf.micro_batch.chooser import ChosenBatch
from hf_pyao.hf.micro_batch.memory_beside import library_bytes, memory_beside
from hf_pyao.hf.micro_batch.sample_batches import SampleBatches
from hf_pyao.hf.micro_batch.take_batch import take_batch
from hf_pyao.hf.micro_batch.trial_step import check_undoable, try_step
from tests.helpers import num_hooks
from tests.hf.test_trainer import EVERYTHING, arguments, examples, logged, tiny_opt, trainer_for

ROOMY_GIB = 0.01
"""More than the tiny model takes at any micro-batch."""

CONFIG = replace(EVERYTHING, policy="all", auto_micro_batch="largest", device_memory_gib=ROOMY_GIB)


def trainer_of(folder: Path, config: PyAOConfig | None, **values: Any) -> Any:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    args = arguments(folder, **{**sizes, **values})
    cls = Trainer if config is None else PyAOTrainer
    more = {} if config is None else {"pyao_config": config}
    return trainer_for(cls, tiny_opt(dropout=0.1), args, **more)


def sizes_of(trainer: Any) -> tuple[int, int]:
    args = trainer.args
    assert trainer._train_batch_size == args.per_device_train_batch_size
    return args.per_device_train_batch_size, args.gradient_accumulation_steps


@contextmanager
def running_out(
    model: nn.Module, most_samples: int, *, in_backward: bool = False
) -> Iterator[list[int]]:
    """Let *model* run out of memory with more samples; yield the sizes of its forwards."""
    seen: list[int] = []

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    def look(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > most_samples and not in_backward:
            fail()

    def look_behind(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward and seen[-1] > most_samples:
            output.loss.register_hook(fail)

    handles = [
        model.register_forward_pre_hook(look, with_kwargs=True),
        model.register_forward_hook(look_behind),
    ]
    yield seen
    for handle in handles:
        handle.remove()


# ---- what is chosen ------------------------------------------------------------------------------


def drawing(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put samples together, and change some of them at random, as for masked language models."""
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    batch["input_ids"][0, 0] = random.randrange(9) + numpy.random.randint(9)
    batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.2] = 3
    return batch


@pytest.mark.thorough
def test_training_goes_on_bit_for_bit_as_with_these_sizes(tmp_path: Path) -> None:
    """Dropout, the order of the data, parameters: nothing has been disturbed by the choice."""
    chosen = trainer_of(tmp_path / "a", CONFIG)
    chosen.data_collator = drawing
    chosen.train()
    assert sizes_of(chosen) == (8, 1)
    plain = trainer_of(
        tmp_path / "b", None, per_device_train_batch_size=8, gradient_accumulation_steps=1
    )
    plain.data_collator = drawing
    plain.train()
    assert logged(chosen, "loss") == logged(plain, "loss")
    for (name, ours), theirs in zip(
        chosen.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert num_hooks(chosen.model) == num_hooks(plain.model)
    assert chosen.state.max_steps == plain.state.max_steps
    assert chosen.state.epoch == plain.state.epoch


@pytest.mark.thorough
def test_the_global_batch_stays_and_the_choice_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(CONFIG, policy="auto", auto_micro_batch="fastest", profile_steps=1)
    trainer = trainer_of(tmp_path, config, per_device_train_batch_size=4, max_steps=2)
    trainer.train()
    micro_batch, accumulation = sizes_of(trainer)
    assert micro_batch * accumulation == 16
    assert trainer.state.train_batch_size == micro_batch
    told = [line for line in capsys.readouterr().out.splitlines() if "trains with" in line]
    assert len(told) == 1
    assert "instead of micro-batch 4 accumulated 4 times, which was tried. Predicted" in told[0]
    assert f"Fastest: micro-batch {micro_batch} " in told[0]
    assert trainer.pyao_offloader is None
    trainer.train()
    assert f"hf_pyao keeps micro-batch {micro_batch} " in capsys.readouterr().out


@pytest.mark.thorough
def test_a_small_cap_takes_a_smaller_micro_batch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CONFIG)
    _, rows = predicted_rows(trainer, CONFIG)
    cap = (rows[1] + rows[2]) / 2
    config = replace(CONFIG, device_memory_gib=cap / 2**30)
    chosen = choose_batch(trainer, config)
    assert (chosen.micro_batch, chosen.accumulation) == (2, 4)
    assert "4 would take" in chosen.words


def predicted_rows(trainer: Any, config: PyAOConfig) -> tuple[ChosenBatch, list[int]]:
    """Return the choice, and the peaks by rising micro-batch."""
    found: list[Any] = []
    original = auto_micro_batch.MicroBatchChooser._predicted

    def noting(self: Any, *args: Any) -> Any:
        found.append(original(self, *args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_micro_batch.MicroBatchChooser, "_predicted", noting)
        chosen = choose_batch(trainer, config)
    return chosen, [row.peak_bytes for row in found[0].rows]


@pytest.mark.thorough
def test_a_plan_that_must_not_be_measured_for_is_followed_from_the_start(tmp_path: Path) -> None:
    """Where offloading everything does not fit, and recomputing does."""
    config = replace(CONFIG, policy="auto", device_memory_gib=0.0005)
    trainer = trainer_of(tmp_path, config, max_steps=1)
    chosen = choose_batch(trainer, config)
    assert chosen.plan is not None
    trainer.train()
    assert trainer._pyao_callback._first_plan == chosen.plan
    assert logged(trainer, "pyao/recomputed_bytes")[-1] > 0


@pytest.mark.thorough
def test_nothing_that_fits_is_an_error_on_a_cpu(tmp_path: Path) -> None:
    config = replace(CONFIG, device_memory_gib=0.0001)
    with pytest.raises(ConfigError, match="Nothing fits 104.9 KiB: micro-batch 1 of 12 tokens"):
        trainer_of(tmp_path, config).train()


@pytest.mark.thorough
def test_without_a_limit_the_batch_stays_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, replace(CONFIG, device_memory_gib=None), max_steps=1)
    trainer.train()
    assert sizes_of(trainer) == (2, 4)
    assert "leaves the micro-batch at 2 (auto_micro_batch): on a CPU" in capsys.readouterr().out


# ---- what is tried -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("in_backward", [False, True])
def test_out_of_memory_as_it_is_tried_takes_the_next_smaller(
    tmp_path: Path, in_backward: bool
) -> None:
    trainer = trainer_of(tmp_path / "a", CONFIG)
    with running_out(trainer.model, 2, in_backward=in_backward) as seen:
        trainer.train()
    assert sizes_of(trainer) == (2, 4)
    assert seen[:4] == [8, 4, 2, 2]  # the last one twice: gradients are there then
    plain = trainer_of(tmp_path / "b", None)
    plain.train()
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.thorough
def test_out_of_memory_is_told_and_at_a_single_sample_it_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CONFIG)
    with running_out(trainer.model, 4):
        assert "Memory ran out as 8 was tried." in choose_batch(trainer, CONFIG).words
    with (
        running_out(trainer.model, 0),
        pytest.raises(ConfigError, match="micro-batches 8, 4, 2, 1 were tried, and memory ran out"),
    ):
        choose_batch(trainer, CONFIG)


@pytest.mark.thorough
def test_a_model_that_cannot_be_recorded_keeps_its_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, CONFIG, max_steps=1)
    forward = trainer.model.forward

    @wraps(forward)
    def looks(*args: Any, **kwargs: Any) -> Any:
        assert kwargs["input_ids"].sum().item() >= 0
        return forward(*args, **kwargs)

    trainer.model.forward = looks
    trainer.train()
    assert sizes_of(trainer) == (2, 4)
    assert (
        "leaves the micro-batch at 2 (auto_micro_batch): nothing can be" in capsys.readouterr().out
    )


@pytest.mark.thorough
def test_another_error_is_raised_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CONFIG)

    def fail(*_: Any) -> None:
        raise RuntimeError("a shape is wrong")

    handle = trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        choose_batch(trainer, CONFIG)
    handle.remove()
    assert num_hooks(trainer.model) == num_hooks(tiny_opt())


class Counting(nn.Module):
    """A module with a buffer that each forward changes, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise."""
        self.last = hidden.detach().flatten()[:3].clone()
        shape = hidden.shape
        return self.norm(hidden.reshape(-1, shape[-1])).reshape(shape)


@pytest.mark.thorough
@pytest.mark.parametrize("most_samples", [0, 1, 2])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_that_is_tried_leaves_nothing_behind(most_samples: int, in_backward: bool) -> None:
    model: Any = tiny_opt(dropout=0.1)
    model.model.decoder.final_layer_norm = Counting()
    model.eval()
    model.model.decoder.layers[0].train()
    modes = [module.training for module in model.modules()]
    first = next(model.parameters())
    first.grad = gradient = torch.full_like(first, 3.0)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: id(tensor) for name, tensor in model.named_buffers()}
    state, python_state = torch.get_rng_state(), random.getstate()
    batch = {key: torch.stack([row[key] for row in examples(2)]) for key in examples(1)[0]}

    with running_out(model, most_samples, in_backward=in_backward):
        hooks = num_hooks(model)
        trial = try_step(
            model, EVERYTHING, lambda: batch, autocast=nullcontext, num_runs=2, reserved_bytes=0
        )
        assert num_hooks(model) == hooks
    assert trial.has_run == (most_samples == 2)
    assert trial.peak_bytes is None
    assert [module.training for module in model.modules()] == modes
    assert first.grad is gradient
    assert torch.equal(gradient, torch.full_like(first, 3.0))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    assert {name: id(tensor) for name, tensor in model.named_buffers()} == buffers
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    model = tiny_opt()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConflictError, match="a hook on its gradient"):
        check_undoable(model)


# ---- samples -------------------------------------------------------------------------------------


def test_the_longest_sample_is_looked_at_and_none_is_taken() -> None:
    lengths = [3, 9, 4, 7] * 50
    data = [{"input_ids": list(range(length)), "text": "x" * 99} for length in lengths]
    data[120]["input_ids"] = list(range(30))  # not among those that are looked at
    loader = SimpleNamespace(dataset=data, collate_fn=lambda samples: samples)
    batches = SampleBatches(loader)
    assert batches.length == 9
    first, second = batches.batch(2)
    assert first == second == data[1]
    first["input_ids"].clear()
    assert batches.batch(1) == [data[1]]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples that can only be iterated."""

    def __iter__(self) -> Iterator[Any]:
        """Fail: to look would take."""
        raise AssertionError("a sample was taken")


def test_data_that_can_only_be_iterated_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CONFIG)
    trainer.train_dataset = Stream()
    with pytest.raises(ConfigError, match="a Stream can only be iterated"):
        trainer.train()
    with pytest.raises(ConfigError, match="is empty"):
        SampleBatches(SimpleNamespace(dataset=[], collate_fn=list))


# ---- refusals ------------------------------------------------------------------------------------


def test_another_way_to_change_the_batch_is_refused(tmp_path: Path) -> None:
    for values, message in (
        ({"auto_find_batch_size": True}, "transformers' auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches of accelerator_config"),
    ):
        with pytest.raises(ConflictError, match=message):
            trainer_of(tmp_path, CONFIG, **values)
        with pytest.raises(ConflictError, match=message):
            PyAOTrainingArguments(
                str(tmp_path),
                use_cpu=True,
                activation_offload=True,
                activation_offload_auto_micro_batch="fastest",
                **values,
            )


def test_policies_of_which_nothing_is_known_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, policy="modules", modules=("mlp_act",))
    with pytest.raises(ConfigError, match="'auto', 'all', 'budget', 'off' offload, and policy is"):
        trainer_of(tmp_path, config)


@pytest.mark.thorough
def test_only_a_trainer_of_ours_can_choose(tmp_path: Path) -> None:
    callbacks = [PyAOCallback(CONFIG)]
    with pytest.raises(ConfigError, match="a callback cannot change the batch size"):
        trainer_for(Trainer, tiny_opt(), arguments(tmp_path), callbacks=callbacks)
    with pytest.raises(ConfigError, match="a training loop of your own cannot change"):
        PyAOPlugin(auto_micro_batch="fastest")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"fsdp": ["full_shard"]}, "FSDP divides"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "ZeRO-3 divides"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, ""),
    ],
)
def test_arguments_that_shard_weights_are_refused_before_data_are_prepared(
    change: dict[str, Any], what: str
) -> None:
    args = SimpleNamespace(**change)
    if not what:
        check_auto_micro_batch(args, CONFIG)
        return
    with pytest.raises(ConflictError, match=what):
        check_auto_micro_batch(args, CONFIG)


def test_the_flag_alone_means_fastest() -> None:
    parser = HfArgumentParser(PyAOTrainingArguments)
    for given, expected in (
        (["--activation_offload_auto_micro_batch"], "fastest"),
        (["--activation_offload_auto_micro_batch", "--activation_offload_budget", "3"], "fastest"),
        (["--activation_offload_auto_micro_batch", "largest"], "largest"),
        ([], "off"),
    ):
        policy = ["--activation_offload_policy", "budget"] if len(given) == 3 else []
        (args,) = parser.parse_args_into_dataclasses(
            ["--output_dir", "out", "--use_cpu", "--activation_offload", *given, *policy]
        )
        assert args.pyao_config().auto_micro_batch == expected
    with pytest.raises(ConfigError, match="did you mean 'fastest'"):
        PyAOConfig(auto_micro_batch="fasttest")


# ---- engines and ranks ---------------------------------------------------------------------------


def fake_trainer(*, zero_stage: int | None = None, num_processes: int = 1, **more: Any) -> Any:
    plugin = None
    if zero_stage is not None:
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        config = {**sizes, "train_batch_size": 16}
        plugin = SimpleNamespace(
            zero_stage=zero_stage,
            deepspeed_config=config,
            hf_ds_config=SimpleNamespace(config=config),
            offload_optimizer_device="none",
        )
    accelerator = SimpleNamespace(
        num_processes=num_processes, state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    args = SimpleNamespace(
        optim="adamw_torch",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        train_batch_size=8,
    )
    return SimpleNamespace(accelerator=accelerator, args=args, optimizer=None, **more)


def test_deepspeed_is_told() -> None:
    trainer = fake_trainer(zero_stage=2, num_processes=2)
    take_batch(trainer, 8, 1)
    assert trainer.accelerator.state.deepspeed_plugin.deepspeed_config == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 16,
    }
    with pytest.raises(ConflictError, match="ZeRO-3 divides its weights"):
        choose_batch(fake_trainer(zero_stage=3), CONFIG)


def test_what_comes_beside_a_step_is_counted() -> None:
    model = nn.Linear(10, 10, bias=False)  # 400 bytes

    def beside(trainer: Any) -> dict[str, int]:
        return {each.name: each.nbytes for each in memory_beside(trainer, model)}

    states = "states of the optimizer"
    assert beside(fake_trainer()) == {states: 800}
    trainer = fake_trainer(num_processes=2)
    assert beside(trainer) == {states: 800, "DDP's buckets": 400}
    trainer.accelerator.ddp_handler = SimpleNamespace(gradient_as_bucket_view=True)
    assert beside(trainer) == {states: 800}  # gradients lie in the buckets
    trainer = fake_trainer(zero_stage=2, num_processes=2)
    assert beside(trainer) == {states: 400, "ZeRO's bucket": 10**9}
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config["zero_optimization"] = {"reduce_bucket_size": 50, "overlap_comm": True}
    assert beside(trainer) == {states: 400, "ZeRO's bucket": 200}
    trainer = fake_trainer()
    trainer.args.optim = "adamw_bnb_8bit"
    assert beside(trainer) == {states: 200}
    trainer.args.optim = "sgd"
    assert beside(trainer) == {}
    trainer.args.optim, trainer.optimizer = "adamw_torch", SimpleNamespace(state={1: 2})
    assert beside(trainer) == {}
    assert library_bytes(torch.device("cpu")) == 0
