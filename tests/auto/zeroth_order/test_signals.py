"""Real signals at any time of a step, and two threads at once: weights stay right."""

from __future__ import annotations

import copy
import random
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.errors import ConflictError
from tests.auto.zeroth_order.test_failures import Run
from tests.auto.zeroth_order.test_step import EPSILON, RATE, Losses, batches_of
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainMeZO


def passes_that_run() -> list[str]:
    """Return what runs after a while: a thread may have begun as its run was given up."""
    end = time.monotonic() + 20
    while _passes() and time.monotonic() < end:
        time.sleep(1e-3)
    return _passes()


def _passes() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("pyao-pass")]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers on this system")
@pytest.mark.parametrize("num", [6, pytest.param(200, marks=pytest.mark.thorough)])
def test_a_signal_at_any_time_of_a_step(num: int) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    warm = Run()
    warm.step()
    begin = time.perf_counter()
    warm.step()
    takes_s = time.perf_counter() - begin
    warm.check()
    generator = random.Random(1)
    before = signal.signal(signal.SIGALRM, interrupt)
    num_interrupted = 0
    try:
        for _ in range(num):
            run = Run(0.9 * generator.randrange(2))
            run.step()
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, takes_s))
                run.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupted += 1
                run.drop_micro_batches()
            assert passes_that_run() == []
            run.step()
            run.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted


def test_two_models_on_two_threads() -> None:
    errors: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            model = tiny_model("llama")
            plain_model, batch = copy.deepcopy(model), batches_of(1)[0]
            plain = PlainMeZO(plain_model, EPSILON, seed=seed)
            settings = ZerothOrderSettings(epsilon=EPSILON, seed=seed)
            with ZerothOrder(model, settings) as made:
                for _ in range(3):
                    made.accumulate(model, lambda model: model(**batch).loss)
                    found = made.end_step(RATE)
                    assert found == plain.step(Losses([batch]), RATE)
            for p, q in zip(plain_model.parameters(), model.parameters(), strict=True):
                assert torch.equal(p, q)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_write_in_evaluation_is_refused_and_does_not_last() -> None:
    model = tiny_model("llama").eval()
    batch = tiny_batch(0)
    with torch.no_grad():
        expected = model(**batch).logits
    layer = model.model.layers[1].mlp

    def write(module: Any, args: Any) -> None:
        layer.down_proj.weight.mul_(2)

    with ZerothOrder(model) as made:
        handle = layer.act_fn.register_forward_pre_hook(write)
        for called in (lambda: model(**batch), lambda: layer(torch.ones(1, 2, 32))):
            with pytest.raises(ConflictError, match=r"down_proj\.weight.*num_resident"):
                called()
        handle.remove()
        assert torch.equal(model(**batch).logits, expected)
        with torch.inference_mode():
            assert torch.equal(model(**batch).logits, expected)
        made.flush()
