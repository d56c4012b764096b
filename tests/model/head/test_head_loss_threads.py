"""Several threads on one model with a head loss: one at a time is without its logits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.head.head_loss import install_head_loss
from tests.helpers.head_loss_models import gradients, make_batch, pair

NUM_THREADS = 3
TIMEOUT_S = 60


def in_threads(work: Callable[[int], Any], num_threads: int = NUM_THREADS) -> list[Any]:
    """Return what ``work(i)`` gives in threads of their own, all at a time; raise what it raises."""
    results: list[Any] = [None] * num_threads

    def run(i: int) -> None:
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_second_of_two_forwards_has_the_models_own_loss(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, own = pair(name, torch.float64)
    handle = install_head_loss(mine, "chunked", chunk_tokens=16)
    loss_function, second = mine.loss_function, []

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        if not second:
            second.append(None)
            (second[0],) = in_threads(lambda _: mine(**make_batch(2, 7)).loss, 1)
        loss: Tensor = loss_function(*args, **kwargs)
        return loss

    mine.loss_function = slow
    first = mine(**make_batch(1, 9)).loss
    torch.testing.assert_close(first, own(**make_batch(1, 9)).loss, rtol=1e-12, atol=0)
    assert torch.equal(second[0], own(**make_batch(2, 7)).loss)
    (first + second[0]).backward()
    (own(**make_batch(1, 9)).loss + own(**make_batch(2, 7)).loss).backward()
    for key, grad in gradients(own).items():
        torch.testing.assert_close(gradients(mine)[key], grad, rtol=1e-9, atol=1e-12)
    metrics = handle.metrics()
    assert (metrics["head_loss_num_chunked"], metrics["head_loss_num_own"]) == (1, 1)
    assert "another thread was under way" in caplog.text
    assert not any("forward" in module.__dict__ for module in list(mine.modules())[1:])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_backwards_at_a_time(name: str) -> None:
    mine, own = pair(name, torch.float64)
    install_head_loss(mine, "chunked", chunk_tokens=16)
    parameters = list(mine.parameters())

    def work(i: int) -> list[list[Tensor]]:
        found = []
        for step in range(4):
            loss = mine(**make_batch(seed=10 * step + i)).loss
            found.append(list(torch.autograd.grad(loss, parameters)))
        return found

    got = in_threads(work)
    for i in range(NUM_THREADS):
        for step in range(4):
            loss = own(**make_batch(seed=10 * step + i)).loss
            expected = torch.autograd.grad(loss, list(own.parameters()))
            for mine_grad, wanted in zip(got[i][step], expected, strict=True):
                torch.testing.assert_close(mine_grad, wanted, rtol=1e-9, atol=1e-12)


def test_other_uses_of_the_model_meanwhile() -> None:
    model, own = pair("llama", torch.float64)
    handle = install_head_loss(model, "chunked", chunk_tokens=16)
    batch, inside, done = make_batch(), threading.Event(), threading.Event()
    loss_function = model.loss_function

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        inside.set()
        assert done.wait(TIMEOUT_S)
        loss: Tensor = loss_function(*args, **kwargs)
        return loss

    model.loss_function = slow

    def work(i: int) -> Any:
        if i == 0:
            return model(**batch).loss
        assert inside.wait(TIMEOUT_S)
        assert "forward" in model.lm_head.__dict__, "exchanged by the other thread"
        try:
            hidden = torch.ones(1, 2, 32, dtype=torch.float64)
            with torch.no_grad():
                evaluated = model(input_ids=batch["input_ids"]).logits
            return model(input_ids=batch["input_ids"]).logits, evaluated, model.lm_head(hidden)
        finally:
            done.set()

    loss, (logits, evaluated, head) = in_threads(work, 2)
    expected = own(**batch)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=0)
    assert type(logits) is Tensor
    assert torch.equal(logits, expected.logits)
    assert torch.equal(evaluated, expected.logits)
    assert torch.equal(head, F.linear(torch.ones(1, 2, 32).double(), own.lm_head.weight))
    assert handle.metrics()["head_loss_num_chunked"] == 1


def test_nothing_of_a_failed_forward_reaches_the_next() -> None:
    model, own = pair("llama", torch.float64)
    handle = install_head_loss(model, "chunked", chunk_tokens=16)
    loss_function = model.loss_function
    model.loss_function = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(**make_batch(), num_items_in_batch=7)
    model.loss_function = loss_function
    for _ in range(2):
        torch.testing.assert_close(
            model(**make_batch()).loss, own(**make_batch()).loss, rtol=1e-12, atol=0
        )
    assert handle.metrics()["head_loss_num_chunked"] == 2
