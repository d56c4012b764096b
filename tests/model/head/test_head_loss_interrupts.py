"""An interrupt at any line of the head loss leaves nothing behind once it is uninstalled."""

from __future__ import annotations

import collections
import copy
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import hf_pyao
from hf_pyao.model.head.head_loss import install_head_loss
from tests.helpers.head_loss_models import gradients, make_batch, make_model

pytestmark = [
    # PEFT uses the older of two names, which transformers 5.23 warns about.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning"),
]

ROOT = Path(hf_pyao.__file__).parent
FILES = {
    str(path)
    for folder in ("losses", "head", "patching")
    for path in (ROOT / "model" / folder).glob("*.py")
}


def make(kind: str) -> Any:
    """Return a tied model, or one with LoRA on its head."""
    if kind == "tied":
        return make_model("gpt2", torch.float64, n_layer=1)
    model: Any = make_model("llama", torch.float64, num_hidden_layers=1)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))


def life(model: nn.Module) -> None:
    """Install, train a step, read the logits, uninstall."""
    handle = install_head_loss(model, "chunked", chunk_tokens=40)
    try:
        outputs = model(**make_batch(), use_cache=False)
        outputs.loss.backward()
        outputs.logits.sum()
    finally:
        handle.uninstall()


class Interrupter:
    """Counts the lines of the head loss that run, and interrupts at some of them."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        self.lines: list[tuple[str, int]] = []
        self._at = at

    def run(self, work: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 in self._at:
                raise KeyboardInterrupt
        return self._line


def left_behind(model: nn.Module) -> list[str]:
    """Name what is on the modules that was not there before."""
    return [
        f"{type(module).__name__}.{name}"
        for module in model.modules()
        for name in module.__dict__
        if name == "forward" or "pyao" in name
    ]


def moments(kind: str) -> list[int]:
    """Return the first, the middle and the last time that each line runs."""
    model = make(kind)
    life(model)  # what happens only once in a process
    interrupter = Interrupter()
    interrupter.run(lambda: life(model))
    times = collections.defaultdict(list)
    for moment, line in enumerate(interrupter.lines):
        times[line].append(moment)
    return sorted({t for all_ in times.values() for t in (all_[0], all_[len(all_) // 2], all_[-1])})


def check(kind: str, moments: list[tuple[int, ...]]) -> None:
    """Interrupt at each of *moments*; afterwards the model is plain, and trains right."""
    fresh = make(kind)
    expected = copy.deepcopy(fresh)
    expected(**make_batch()).loss.backward()
    wanted = gradients(expected)
    for at in moments:
        model = copy.deepcopy(fresh)
        interrupter = Interrupter(at)
        with pytest.raises(KeyboardInterrupt):
            interrupter.run(lambda: life(model))
        where = "{}:{}".format(*interrupter.lines[at[0]])
        assert torch.is_grad_enabled(), where
        assert not torch.is_autocast_enabled("cpu"), where
        assert torch._C._is_torch_function_enabled(), where
        inside = [name for name in left_behind(model) if not name.startswith(type_of(model))]
        assert len(at) > 1 or not inside, f"{where}: at once {inside}"
        # One more life, as the user's next step is, on what the interrupt has left.
        model.zero_grad()
        handle = install_head_loss(model, "chunked", chunk_tokens=40)
        loss = model(**make_batch()).loss
        handle.uninstall()
        assert not left_behind(model), where
        assert handle.metrics()["head_loss_num_chunked"] > 0, where
        loss.backward()
        assert_close(gradients(model), wanted, where)


def type_of(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert torch.allclose(got[name], grad, rtol=1e-9, atol=1e-12), f"{where}: {name}"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Reading the logits is worth a warning, every time anew."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_an_interrupt_at_some_lines(kind: str) -> None:
    check(kind, [(at,) for at in moments(kind)[::17]])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_an_interrupt_at_every_line(kind: str) -> None:
    check(kind, [(at,) for at in moments(kind)])


@pytest.mark.thorough
@pytest.mark.parametrize("gap", [1, 2, 5])
def test_two_interrupts(gap: int) -> None:
    check("tied", [(at, at + gap) for at in moments("tied")[::3]])


def test_nothing_is_left_after_an_interrupt_of_uninstalling_and_another_try() -> None:
    model = make("tied")
    interrupter = Interrupter()
    handle = install_head_loss(model, "chunked")
    interrupter.run(handle.uninstall)
    for at in range(len(interrupter.lines)):
        handle = install_head_loss(model, "chunked")
        with pytest.raises(KeyboardInterrupt):
            Interrupter((at,)).run(handle.uninstall)
        handle.uninstall()
        assert not left_behind(model), interrupter.lines[at]


@pytest.mark.thorough
def test_another_handle_after_an_interrupt_of_installing() -> None:
    # The first handle was never returned: nobody can uninstall it, and other settings may be asked.
    model = make("tied")
    interrupter = Interrupter()
    interrupter.run(lambda: install_head_loss(model, "chunked").uninstall())
    for at in range(len(interrupter.lines)):
        model = make("tied")
        with pytest.raises(KeyboardInterrupt):
            Interrupter((at,)).run(lambda: install_head_loss(model, "chunked"))
            raise KeyboardInterrupt  # past its end
        handle = install_head_loss(model, "chunked")
        handle.uninstall()
        assert not left_behind(model)
