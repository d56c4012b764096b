"""Ctrl-C at a moment that the clock chooses, in trainings with Trainer."""

from __future__ import annotations

import copy
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch

from hf_pyao import PyAOTrainer, PyAOTrainingArguments
from hf_pyao.attachment import offloader_of
from tests.helpers import assert_same_tensors, gradients_of, tiny_batch, tiny_model

SECONDS = 15.0

CHOICES: dict[str, list[Any]] = {
    "recompute_modules": [[], ["pointwise"], ["*"]],
    "codec": ["identity", "bitmask"],
    "window": ["layer", "2048"],
    "keep_last_layers": [0, 1],
}


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt after *seconds*, wherever Python is by then."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.train()
    torch.manual_seed(1)
    model(**tiny_batch(7), use_cache=False).loss.backward()
    return gradients_of(model)


def train_interrupted(rng: random.Random, folder: Path) -> Any:
    """Start a training, interrupt it, and return its model."""
    model = tiny_model("llama", dropout=0.1)
    given = {f"activation_offload_{name}": rng.choice(of) for name, of in CHOICES.items()}
    arguments = PyAOTrainingArguments(
        output_dir=str(folder),
        max_steps=10_000,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        activation_offload=True,
        activation_offload_min_bytes=0,
        activation_offload_host_memory_gib=0.1,
        **{name: value for name, value in given.items() if value != []},
    )
    examples = [{name: part[0] for name, part in tiny_batch(seed).items()} for seed in range(8)]
    trainer = PyAOTrainer(model=model, args=arguments, train_dataset=examples)
    with interrupted_after(rng.uniform(0.02, 0.5)):
        trainer.train()
    return model


def check_nothing_left(model: Any) -> None:
    offloader = offloader_of(model.model)
    if offloader is not None:
        offloader.detach()  # the interrupt came in the few lines of Trainer's between
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _python_dispatch._get_current_dispatch_mode() is None
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
        assert not module._forward_pre_hooks_with_kwargs
    assert offloader is None or offloader.host_pool.settle() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_moments_that_the_clock_chooses(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    deadline = time.monotonic() + SECONDS
    num_interrupts = 0
    while time.monotonic() < deadline or num_interrupts < 3:
        model = train_interrupted(rng, tmp_path)
        num_interrupts += 1
        torch.set_grad_enabled(True)  # torch's own no_grad() may have been interrupted
        check_nothing_left(model)
        plain = copy.deepcopy(model)
        assert_same_tensors(gradients(model), gradients(plain), f"interrupt {num_interrupts}")
