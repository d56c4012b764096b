"""Out of memory at any allocation: the run completes with the same bits, or ends with a clear error."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from hf_pyao import Offloader, PyAOConfig, attach
from hf_pyao.engine.runtime.saved_tensor import KeptTensor, SavedStorage
from hf_pyao.plan.measure.segment_memory import MeasuredGrowth
from hf_pyao.text import Labels
from tests.helpers import EVERY_LAYER, EVERYTHING, assert_same_tensors, tiny_batch, tiny_model
from tests.helpers.memory_faults import MemoryFaults, sample

OFF = PyAOConfig(policy="off", min_bytes=0)
RECOMPUTING = replace(EVERY_LAYER, recompute_modules=("pointwise",))
CHUNKED = replace(EVERYTHING, head_loss="chunked")

CASES: dict[str, tuple[str, PyAOConfig]] = {
    "gpt2 all": ("gpt2", EVERYTHING),
    "opt off": ("opt", OFF),
    "llama chunked loss": ("llama", CHUNKED),
    "gpt2 recomputing": ("gpt2", RECOMPUTING),
    "opt far ahead": ("opt", replace(EVERYTHING, window=2**20)),
    "llama all layers": ("llama", EVERY_LAYER),
}
NUM_MICRO_BATCHES = 2


def loop(
    model: nn.Module, run: Callable[[Callable[[], Any]], Any], faults: TorchDispatchMode
) -> dict[str, torch.Tensor]:
    """Train two steps of two micro-batches, the second step with *faults*."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = {}
    for step in range(2):
        for index in range(NUM_MICRO_BATCHES):
            batch = tiny_batch(2 * step + index)

            def micro_batch(batch: Any = batch, is_disturbed: bool = step == 1) -> torch.Tensor:
                with faults if is_disturbed else contextlib.nullcontext():
                    loss = model(**batch, use_cache=False).loss / NUM_MICRO_BATCHES
                    loss.backward()
                return loss.detach()

            losses[f"loss {step} {index}"] = run(micro_batch).clone()
        optimizer.step()
        optimizer.zero_grad()
    return losses | {"rng": torch.get_rng_state()} | parameters_of(model)


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    model_type: str, config: PyAOConfig, faults: TorchDispatchMode
) -> tuple[dict[str, torch.Tensor], Offloader]:
    model = tiny_model(model_type, dropout=0.1)
    with attach(model, config) as offloader:
        try:
            return loop(model, offloader.run_micro_batch, faults), offloader
        finally:
            assert_clean(offloader)


def assert_clean(offloader: Offloader) -> None:
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert [each for each in gc.get_objects() if type(each) in (SavedStorage, KeptTensor)] == []
    assert offloader.host_pool.settle() == 0
    assert offloader.link.waiting_bytes == 0
    assert offloader.engine.mover.ahead_bytes == 0


@pytest.fixture(autouse=True)
def _few_objects(small_heap: None) -> None:
    gc.collect()


def check_points(name: str, num_points: int, cases: Mapping[str, Any] = CASES) -> None:
    model_type, config = cases[name]
    counted = MemoryFaults()
    expected, _ = train(model_type, config, counted)
    for at in sample(len(counted.allocations), num_points):
        faults = MemoryFaults({at}, counted.allocations)
        found, offloader = train(model_type, config, faults)
        assert faults.num_raised == 1
        assert _len_torch_dispatch_stack() == 0
        assert_same_tensors(found, expected, f"{name}, allocation {at}")
        if config.policy != "auto":  # which on a CPU does nothing
            assert offloader.totals()["num_micro_batches"] == 2 * NUM_MICRO_BATCHES


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_run_completes_with_the_same_bits_at_any_allocation(name: str) -> None:
    check_points(name, 10**6 if name == "gpt2 all" else 100)


@pytest.mark.parametrize(
    ("settings", "num_rungs", "num_recomputing"),
    [
        ({"policy": "all", "keep_last_layers": 0}, 2, 1),
        ({"policy": "all", "keep_last_layers": 0, "checkpoint_every": 1}, 1, 0),
        ({"policy": "auto", "checkpoint_every": 1}, 2, 0),
    ],
)
def test_nothing_is_recomputed_by_itself_in_layers_that_run_again(
    settings: dict[str, Any], num_rungs: int, num_recomputing: int
) -> None:
    model = tiny_model("gpt2").train()
    config = PyAOConfig(**settings)
    with attach(model, config) as offloader:
        ladder = offloader.micro_batches.tightening
        told = list(iter(lambda: ladder.tighter(torch.OutOfMemoryError()), None))
    assert len(told) == num_rungs
    assert sum("is recomputed" in sentence for sentence in told) == num_recomputing


def test_the_last_message_counts_what_the_last_try_did() -> None:
    """A part of which there are no bytes is not named: no try may have recomputed anything."""
    from hf_pyao.auto.retry.failure_message import MemoryFailure, Remedies
    from hf_pyao.metrics import MicroBatchStats

    def figures(**counts: int) -> str:
        stats = MicroBatchStats(would_hold_bytes=2048, **counts)
        failure = MemoryFailure("", "", "", None, None, stats)
        return failure.explain(
            Remedies.of(PyAOConfig().effective(), Labels()), "nothing tighter is left"
        )

    assert "Of the 2.0 KiB that the layers had saved in the last try, 2.0 KiB were offloaded." in (
        figures(offloaded_bytes=2048)
    )
    found = figures(offloaded_bytes=1024, recomputed_bytes=1024)
    assert "1.0 KiB were offloaded, 1.0 KiB were to be recomputed." in found
    assert "The layers had saved nothing yet." in figures()
    assert "0 bytes" not in figures() + found


def test_the_last_message_has_what_was_measured_beside_what_was_predicted() -> None:
    from hf_pyao.auto.retry.failure_message import MemoryFailure, Remedies

    growth = MeasuredGrowth({"head": 3 << 20, "optimizer": 5 << 20}, {"head": 2 << 20})
    remedies = Remedies(head_loss="chunked", measured_memory=lambda: str(growth))
    failure = MemoryFailure("layer 1", "", "", 4 << 20, None)
    words = (
        "A step was measured to take 3.0 MiB in head (predicted: 2.0 MiB), 5.0 MiB in optimizer."
    )
    assert words in failure.explain(remedies, "nothing tighter is left")
