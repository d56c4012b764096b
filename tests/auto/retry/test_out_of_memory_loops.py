"""Out of memory in a Trainer and in an Accelerate loop: what comes out is as if it had fitted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainingArguments

from hf_pyao import OutOfDeviceMemoryError, PyAOConfig, PyAOPlugin, PyAOTrainer, PyAOTrainerMixin
from tests.helpers import EVERYTHING, assert_same_tensors, tiny_batch, tiny_model
from tests.helpers.memory_faults import EVER, MemoryFaults, sample


@pytest.fixture(autouse=True)
def _few_objects(small_heap: None) -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def examples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    rows = tiny_batch(5, size=count, length=12)["input_ids"]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


class Faulty:
    """A trainer's training step, the third of which meets faults; mixed in below the mixin."""

    faults: MemoryFaults
    num_steps = 0
    seen: list[list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(inputs["input_ids"][:, 0].tolist())
        if self.faults.at is EVER or len({tuple(each) for each in self.seen}) == 3:
            with self.faults:
                return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**inputs, "labels": inputs.pop("labels")}  # as label smoothing does
        return super().compute_loss(model, given, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # what takes things out takes them out of what was given


class Ours(PyAOTrainerMixin, Faulty, Trainer):  # type: ignore[misc]
    """Offloads."""


def run_trainer(
    folder: Path,
    faults: MemoryFaults,
    cls: type[TrainingArguments] = TrainingArguments,
    config: PyAOConfig = EVERYTHING,
    **more: Any,
) -> Ours:
    args = cls(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 7,
            **more,
        }
    )
    model = tiny_model("gpt2", dropout=0.1)
    extra = {} if cls is not TrainingArguments else {"pyao_config": config}
    trainer = Ours(model=model, args=args, train_dataset=examples(), **extra)
    trainer.faults, trainer.seen = faults, []
    trainer.train()
    return trainer


def outcome(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return found | {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}


@pytest.mark.thorough
@pytest.mark.parametrize("num_points", [4, pytest.param(60, marks=pytest.mark.thorough)])
def test_a_trainer_completes_with_the_same_bits(tmp_path: Path, num_points: int) -> None:
    counted = MemoryFaults()
    reference = run_trainer(tmp_path, counted)
    expected = outcome(reference)
    assert len(expected["losses"]) == 3
    for at in sample(len(counted.allocations), num_points):
        faults = MemoryFaults({at}, counted.allocations)
        trainer = run_trainer(tmp_path, faults)
        assert faults.num_raised == 1
        assert_same_tensors(outcome(trainer), expected, f"allocation {at}")
        order = [rows for i, rows in enumerate(trainer.seen) if i != 3]
        assert order == reference.seen, "the order of the data"
        assert trainer.seen[3] == trainer.seen[2], "the same micro-batch again"
        assert trainer.pyao_offloader is None


@pytest.mark.thorough
def test_a_trainer_without_room_ends_with_the_error(tmp_path: Path) -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="nothing tighter is left"):
        run_trainer(tmp_path, MemoryFaults(EVER))


@pytest.mark.thorough
def test_auto_find_batch_size_gets_the_error_itself(tmp_path: Path) -> None:
    faults = MemoryFaults(EVER)
    trainers: list[int] = []

    class Fits(MemoryFaults):
        def __enter__(self) -> Any:
            trainers.append(1)
            if len(trainers) > 1:
                self.at = ()
            return super().__enter__()

    faults = Fits(EVER)
    trainer = run_trainer(tmp_path, faults, auto_find_batch_size=True)
    assert faults.num_raised == 1
    sizes = [len(rows) for rows in trainer.seen]
    assert sizes[0] == 2
    assert sizes[-1] == 1, "it has tried a smaller batch"


def test_inputs_that_a_try_changes_end_the_run(tmp_path: Path) -> None:
    class Changes(PyAOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs["input_ids"].add_(0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    args = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to="none", dataloader_pin_memory=False
    )
    trainer = Changes(
        model=tiny_model("gpt2"), args=args, train_dataset=examples(), pyao_config=EVERYTHING
    )
    with pytest.raises(OutOfDeviceMemoryError, match="changed its inputs in place"):
        trainer.train()


def run_accelerate(faults: MemoryFaults) -> tuple[dict[str, torch.Tensor], int]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = PyAOPlugin(policy="all", min_bytes=0, host_memory_gib=0.1).bind(accelerator)
    model = tiny_model("opt", dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(examples(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(3)
    losses = []
    for index, batch in enumerate(loader):

        def micro_batch(batch: Any = batch) -> torch.Tensor:
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            return loss.detach()

        def disturbed(run: Any = micro_batch) -> torch.Tensor:
            with faults:
                return run()

        with accelerator.accumulate(model):
            (offloader,) = plugin.offloaders
            losses.append(offloader.run_micro_batch(disturbed if index == 1 else micro_batch))
            optimizer.step()
            optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    num = int(offloader.totals()["num_micro_batches"])
    plugin.detach()
    return found | {"losses": torch.stack(losses)}, num


@pytest.mark.parametrize("num_points", [4, pytest.param(60, marks=pytest.mark.thorough)])
def test_an_accelerate_loop_completes_with_the_same_bits(num_points: int) -> None:
    counted = MemoryFaults()
    expected, num = run_accelerate(counted)
    assert num == 4
    for at in sample(len(counted.allocations), num_points):
        faults = MemoryFaults({at}, counted.allocations)
        found, num = run_accelerate(faults)
        assert faults.num_raised == 1
        assert num == 4
        assert_same_tensors(found, expected, f"allocation {at}")
