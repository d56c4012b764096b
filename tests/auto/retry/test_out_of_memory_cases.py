"""Worst cases around a micro-batch that does not fit: what is undone, and what ends the run."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from hf_pyao import OutOfDeviceMemoryError, PyAOConfig, attach
from hf_pyao.engine.runtime.policy import OffloadAll, RecomputeSelected
from hf_pyao.errors import PyAOError
from tests.auto.retry.test_out_of_memory import assert_clean
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    Batch,
    Stack,
    assert_same_tensors,
    gradients_of,
    linear_relu,
    num_hooks,
    tiny_batch,
    tiny_model,
)
from tests.helpers.interrupts import Interrupter
from tests.helpers.memory_faults import EVER, MemoryFaults, sample
from tests.helpers.simulation.transport import SimulatedTransport

OFF = PyAOConfig(policy="off", min_bytes=0)
BATCH = tiny_batch(0, padding=2)


@pytest.fixture(autouse=True)
def _few_objects(small_heap: None) -> None:
    gc.collect()


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Bomb:
    """Goes off a number of times, at the calls of :meth:`check` that are counted.

    It counts in what a function closes over, which is not put back for a second try.
    """

    def __init__(self, *at: int, error: Callable[[], BaseException] = out_of_memory) -> None:
        self.at = at
        self.error = error
        calls: list[None] = []
        self._note = lambda: calls.append(None)
        self._count = lambda: len(calls)

    @property
    def count(self) -> int:
        return self._count()

    def check(self) -> None:
        self._note()
        if self.count in self.at:
            raise self.error()


class BombNode(torch.autograd.Function):
    """Passes on what it gets; its backward checks a bomb."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bomb: Bomb) -> torch.Tensor:
        ctx.bomb = bomb
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.bomb.check()
        return gradient, None


def plant(model: Any, bomb: Bomb, *, layer: int = 0, in_backward: bool = True) -> Any:
    """Put *bomb* in front of a layer of a Llama; the layers behind it have gradients then."""

    def wire(module: nn.Module, args: Any) -> Any:
        if not in_backward:
            bomb.check()
            return None
        return (BombNode.apply(args[0], bomb), *args[1:])

    model.model.layers[layer].register_forward_pre_hook(wire)
    return model


def step(model: nn.Module, batch: Batch = BATCH) -> torch.Tensor:
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(num_micro_batches: int = 1, model_type: str = "llama") -> dict[str, torch.Tensor]:
    """Return what the gradients are to be."""
    model = tiny_model(model_type, dropout=0.1)
    torch.manual_seed(3)
    for index in range(num_micro_batches):
        step(model, tiny_batch(index))
    return gradients_of(model)


# ---- what it runs under then ---------------------------------------------------------------------


@pytest.mark.thorough
def test_the_plan_becomes_tighter_step_by_step_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = plant(tiny_model("llama", dropout=0.1), Bomb(1, 2, 3, 5))
    expected = gradients(2)
    with attach(model, OFF) as offloader:
        torch.manual_seed(3)
        policies = []
        engine = offloader.engine
        use = engine.use
        engine.use = lambda policy: (policies.append(policy), use(policy))[1]  # type: ignore[method-assign]
        offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))
        assert [type(policy) for policy in policies] == [OffloadAll, RecomputeSelected, OffloadAll]
        assert engine.link.limit_bytes == 0
        metrics = offloader.metrics()
        assert metrics["offloaded_bytes"] == metrics["reloaded_bytes"] > 0
        with pytest.raises(OutOfDeviceMemoryError, match="nothing tighter is left"):
            offloader.run_micro_batch(lambda: step(model, tiny_batch(1)))
        offloader.run_micro_batch(lambda: step(model, tiny_batch(1)))
        assert len(policies) == 3
        assert_clean(offloader)
        assert len(offloader.report_extra["out_of_memory"]) == 3
    del expected
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "in the backward of layer 'model.layers.0'" in warnings[0]
    assert "no room for 2.00 GiB more" in warnings[0]
    assert "everything that the layers save is offloaded" in warnings[0]
    assert "recomputed" in warnings[1]


def test_one_that_never_ends_is_ended() -> None:
    class Own:
        def tighter(self, error: torch.OutOfMemoryError) -> str | None:
            return "nothing changes"

    model = plant(tiny_model("llama"), Bomb(*range(100)))
    with attach(model, EVERYTHING) as offloader:
        offloader.micro_batches.tightening = Own()
        with pytest.raises(OutOfDeviceMemoryError, match="nothing tighter is left after 8 tries"):
            offloader.run_micro_batch(lambda: step(model))
        assert_clean(offloader)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [2048, "layer", 2**20])
@pytest.mark.parametrize("seed", range(6))
def test_every_wait_is_there_under_each_rung(seed: int, window: int | str) -> None:
    expected = gradients(3)
    model = plant(tiny_model("llama", dropout=0.1), Bomb(1, 3, 5), layer=seed % 3)
    config = replace(EVERYTHING, window=window)
    with attach(model, config, transport=SimulatedTransport(seed)) as offloader:
        torch.manual_seed(3)
        for index in range(3):
            offloader.run_micro_batch(lambda index=index: step(model, tiny_batch(index)))  # type: ignore[misc]
        assert_same_tensors(gradients_of(model), expected, "under a late link")
        assert len(offloader.report_extra["out_of_memory"]) == 3
        assert offloader.link.limit_bytes == 0
        assert_clean(offloader)


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", EVERYTHING),
        ("gpt2", OFF),
        ("gpt2", replace(EVERYTHING, head_loss="chunked")),
        ("llama", replace(EVERY_LAYER, checkpoint_every=2, mlp_tiles=2)),
        ("llama", replace(EVERY_LAYER, checkpoint_every=2, checkpoint_nested=True)),
    ],
)
@pytest.mark.sampled(every=1)
def test_without_room_at_all_it_ends_and_plain_training_goes_on(
    model_type: str, config: PyAOConfig
) -> None:
    model = tiny_model(model_type, dropout=0.1)
    expected = gradients(model_type=model_type)
    modules = [(name, type(module)) for name, module in model.named_modules()]
    hooks = num_hooks(model)
    faults = MemoryFaults(EVER)

    def micro_batch() -> None:
        with faults:
            step(model, tiny_batch(0))

    offloader = attach(model, config)
    step(model, tiny_batch(1))
    before = gradients_of(model)
    state = torch.get_rng_state()
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        offloader.run_micro_batch(micro_batch)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value, PyAOError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    text = str(caught.value)
    assert "nothing tighter is left" in text
    assert "device_memory_gib" in text
    assert "gradient accumulation" in text
    assert_clean(offloader)
    assert_same_tensors(gradients_of(model), before, "as before it")
    assert torch.equal(torch.get_rng_state(), state)
    offloader.detach()
    assert num_hooks(model) == hooks
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert _len_torch_dispatch_stack() == 0
    model.zero_grad()
    torch.manual_seed(3)
    step(model, tiny_batch(0))
    assert_same_tensors(gradients_of(model), expected, "plain training")


def test_the_error_is_not_taken_for_one_to_try_smaller_batches_for() -> None:
    from accelerate.utils.memory import should_reduce_batch_size

    model = plant(tiny_model("llama"), Bomb(*range(10)))
    assert should_reduce_batch_size(out_of_memory())
    with attach(model, EVERYTHING) as offloader:
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            offloader.run_micro_batch(lambda: step(model))
    assert not should_reduce_batch_size(caught.value)


def test_no_tensor_of_a_failed_try_is_alive_in_the_next() -> None:
    model = tiny_model("llama", dropout=0.1)
    alive: list[weakref.ref[torch.Tensor]] = []
    tries = []

    def micro_batch() -> None:
        gc.disable()
        try:
            tries.append([ref() for ref in alive if ref() is not None])
            outputs = model(**BATCH, use_cache=False)
            alive.extend([weakref.ref(outputs.logits), weakref.ref(outputs.loss)])
            try:
                if len(tries) == 1:
                    raise out_of_memory()
            except torch.OutOfMemoryError as error:
                kept = error  # a cycle: frame, error, traceback, frame
                raise RuntimeError("seen") from kept
        except RuntimeError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__  # noqa: B904
            raise
        finally:
            gc.enable()
        outputs.loss.backward()

    with attach(model, EVERYTHING) as offloader:
        offloader.run_micro_batch(micro_batch)
        assert tries == [[], []]
        assert_clean(offloader)


# ---- what cannot be undone -----------------------------------------------------------------------


def test_zero_grad_in_the_micro_batch_ends_the_run() -> None:
    model = plant(tiny_model("llama"), Bomb(2))
    with attach(model, EVERYTHING) as offloader:
        step(model)

        def micro_batch() -> None:
            model.zero_grad()
            step(model)

        with pytest.raises(OutOfDeviceMemoryError, match=r"let go of gradients .* zero_grad"):
            offloader.run_micro_batch(micro_batch)


@pytest.mark.parametrize("names", [("",), ("lm_head",), ("layers.2",)])
def test_gradients_that_the_micro_batch_itself_changes_end_the_run(names: tuple[str, ...]) -> None:
    bomb = Bomb(2)
    model = plant(tiny_model("llama"), bomb)
    changed = [p for n, p in model.named_parameters() if any(part in n for part in names)]

    def micro_batch() -> None:
        for parameter in changed:
            if parameter.grad is not None:
                parameter.grad.zero_()
        step(model)

    with attach(model, EVERYTHING) as offloader:
        step(model)
        with pytest.raises(OutOfDeviceMemoryError, match="did not write|not by one backward"):
            offloader.run_micro_batch(micro_batch)
        assert_clean(offloader)


def test_a_head_gradient_that_is_cleared_before_backward_fails_ends_the_run() -> None:
    # What was changed looks like what backward has added to; the next try tells.
    model = tiny_model("llama")
    bomb = Bomb(1)

    def micro_batch() -> None:
        if (gradient := model.lm_head.weight.grad) is not None:
            gradient.zero_()
        BombNode.apply(model(**BATCH, use_cache=False).loss, bomb).backward()

    with attach(model, EVERYTHING) as offloader:
        step(model)
        with pytest.raises(OutOfDeviceMemoryError, match="did not write the gradients"):
            offloader.run_micro_batch(micro_batch)


@pytest.mark.parametrize("layer", [0, 2])
def test_gradients_that_lie_in_one_buffer_end_the_run(layer: int) -> None:
    # They share a version: one that was added to makes all look so.
    model = tiny_model("llama")
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = buffer.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    bomb = Bomb(1)
    if layer:
        model.lm_head.register_forward_pre_hook(lambda _, args: (BombNode.apply(args[0], bomb),))
    else:
        plant(model, bomb)
    with attach(model, EVERYTHING) as offloader:
        with pytest.raises(OutOfDeviceMemoryError, match="one buffer|not by one backward"):
            offloader.run_micro_batch(lambda: step(model))


def test_an_optimizer_step_in_the_micro_batch_ends_the_run() -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = Bomb(1)

    def micro_batch() -> None:
        step(model)
        optimizer.step()
        faults.check()

    with attach(model, EVERYTHING) as offloader:
        with pytest.raises(OutOfDeviceMemoryError, match="parameters were changed"):
            offloader.run_micro_batch(micro_batch)


def test_out_of_memory_in_an_optimizer_step_is_not_ours() -> None:
    model = tiny_model("llama")
    with attach(model, EVERYTHING) as offloader:
        offloader.run_micro_batch(lambda: step(model))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(torch.OutOfMemoryError) as caught, MemoryFaults(EVER):
            optimizer.step()
        assert not isinstance(caught.value, OutOfDeviceMemoryError)
        assert_clean(offloader)


def test_hooks_that_take_up_gradients_end_the_run_in_backward_alone() -> None:
    expected = gradients()
    for in_backward in (False, True):
        model = plant(tiny_model("llama", dropout=0.1), Bomb(1), in_backward=in_backward)
        handle = model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
        with attach(model, EVERYTHING) as offloader:
            torch.manual_seed(3)
            if in_backward:
                with pytest.raises(OutOfDeviceMemoryError, match="hooks on parameters"):
                    offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))
            else:
                offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))
                assert_same_tensors(gradients_of(model), expected, "in forward")
        handle.remove()


Writes = Callable[[Any, nn.Module], Any]

WRITES_OTHERS: dict[str, tuple[bool, Writes]] = {
    "not": (False, lambda model, other: step(model)),
    "in its graph": (
        True,
        lambda model, other: (model(**BATCH).loss + other(torch.ones(1, 4)).sum()).backward(),
    ),
    "in a graph before": (
        True,
        lambda model, other: (other(torch.ones(1, 4)).sum().backward(), step(model)),
    ),
}


@pytest.mark.parametrize("how", WRITES_OTHERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_another_model_that_it_may_have_written_end_the_run(
    how: str, in_backward: bool
) -> None:
    ends, function = WRITES_OTHERS[how]
    ends &= in_backward or how == "in a graph before"
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()  # what others have from before is no matter
    model = plant(tiny_model("llama"), Bomb(1, 3), in_backward=in_backward)
    with attach(model, EVERYTHING) as offloader:
        if ends:
            with pytest.raises(OutOfDeviceMemoryError, match=r"outside of the model"):
                offloader.run_micro_batch(lambda: function(model, other))
        else:
            offloader.run_micro_batch(lambda: function(model, other))
        offloader.run_micro_batch(lambda: function(model, other), writes_only_this_model=True)
        assert_clean(offloader)


def test_backwards_of_recordings_for_a_tighter_plan_write_nothing_of_others() -> None:
    class Recording:
        def tighter(self, error: torch.OutOfMemoryError) -> str:
            leaf = torch.ones((), requires_grad=True)
            torch.autograd.grad(leaf * 1, leaf)
            return "it is tighter"

    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    model = plant(tiny_model("llama"), Bomb(1, 2), in_backward=False)
    with attach(model, EVERYTHING) as offloader:
        offloader.micro_batches.tightening = Recording()
        offloader.run_micro_batch(lambda: step(model))
        assert_clean(offloader)


# ---- what is undone ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_gradients_that_were_added_to_come_out_right(num_before: int, layer: int) -> None:
    expected = gradients(num_before + 1)
    model = plant(
        tiny_model("llama", dropout=0.1), Bomb(num_before + 1, num_before + 2), layer=layer
    )
    with attach(model, OFF) as offloader:
        torch.manual_seed(3)
        for index in range(num_before + 1):
            kept = [p.grad for p in model.parameters()]
            offloader.run_micro_batch(lambda index=index: step(model, tiny_batch(index)))  # type: ignore[misc]
            if num_before and index:
                assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
        assert_same_tensors(gradients_of(model), expected, "added once")
    hooks = [p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)


@pytest.mark.parametrize("at", [1, 2])
def test_a_second_backward_in_the_micro_batch(at: int) -> None:
    def both(model: nn.Module) -> None:
        loss = model(**BATCH, use_cache=False).loss
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    reference = tiny_model("llama", dropout=0.1)
    torch.manual_seed(3)
    both(reference)
    model = plant(tiny_model("llama", dropout=0.1), Bomb(at, at + 5))
    with attach(model, EVERYTHING) as offloader:
        torch.manual_seed(3)
        # With two backward passes it is not known who wrote what: other models here have gradients.
        offloader.run_micro_batch(lambda: both(model), writes_only_this_model=True)
        assert_same_tensors(gradients_of(model), gradients_of(reference), f"at {at}")
        assert_clean(offloader)
        model.zero_grad()
        step(model)  # so that both add to what is there
        with pytest.raises(OutOfDeviceMemoryError, match="not by one backward alone"):
            offloader.run_micro_batch(lambda: both(model), writes_only_this_model=True)


@pytest.mark.thorough
def test_two_forwards_and_their_sum() -> None:
    def both(model: nn.Module) -> None:
        first = model(**tiny_batch(0), use_cache=False).loss
        (first + 2 * model(**tiny_batch(1), use_cache=False).loss).backward()

    reference = tiny_model("llama", dropout=0.1)
    torch.manual_seed(3)
    both(reference)
    for at in (1, 2):
        for in_backward in (False, True):
            model = plant(tiny_model("llama", dropout=0.1), Bomb(at), in_backward=in_backward)
            with attach(model, EVERYTHING) as offloader:
                torch.manual_seed(3)
                offloader.run_micro_batch(lambda model=model: both(model))  # type: ignore[misc]
                assert_same_tensors(gradients_of(model), gradients_of(reference), f"at {at}")
                assert_clean(offloader)
                assert offloader.totals()["num_micro_batches"] == 1


class Normed(nn.Module):
    """A model with batch norm in its layers, a counter that forward exchanges, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(linear_relu, linear_relu)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.bomb = Bomb()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + random.random() + float(numpy.random.rand()) + torch.rand(()))
        self.count = self.count + 1
        hidden = self.stack(x)
        self.bomb.check()
        return hidden.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [1, 3])
def test_buffers_and_every_random_number_come_back(at: int) -> None:
    def run(model: Normed, around: Callable[[Callable[[], Any]], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        x = torch.randn(8, 4)
        for _ in range(3):
            around(lambda: model(x).backward())
        return gradients_of(model) | {n: b.clone() for n, b in model.named_buffers()}

    expected = run(Normed(), lambda function: function())
    assert expected["norm.num_batches_tracked"] == 3
    model = Normed()
    model.bomb = Bomb(at)
    config = PyAOConfig(min_bytes=0, layers=("stack.layers.*",))
    with attach(model, config) as offloader:
        found = run(model, offloader.run_micro_batch)
        assert_same_tensors(found, expected, "with batch norm")


def test_a_large_buffer_that_changes_ends_the_run() -> None:
    model = Normed()
    model.register_buffer("late", torch.zeros(2**18 + 1))
    x = torch.randn(8, 4)

    def micro_batch() -> None:
        model.late.add_(1)
        model(x).backward()

    with attach(model, PyAOConfig(min_bytes=0, layers=("stack.layers.*",))) as offloader:
        offloader.run_micro_batch(micro_batch)
        model.bomb = Bomb(1)
        with pytest.raises(OutOfDeviceMemoryError, match="'late' was changed in place"):
            offloader.run_micro_batch(micro_batch)


class Graph(nn.Module):
    """Sums neighbours by a sparse buffer; its table has sparse gradients."""

    def __init__(self, bomb: Bomb) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 4, sparse=True)
        self.stack = Stack(linear_relu, linear_relu)
        self.register_buffer("edges", (torch.rand(5, 5) > 0.4).float().to_sparse())
        self.bomb = bomb

    def forward(self) -> torch.Tensor:
        x = torch.sparse.mm(self.edges, self.table(torch.arange(5)))
        return BombNode.apply(self.stack(x), self.bomb).square().sum()  # type: ignore[no-any-return]


def test_sparse_buffers_and_gradients() -> None:
    model, plain = Graph(Bomb(2)), Graph(Bomb())
    with attach(model, PyAOConfig(min_bytes=0, layers=("stack.layers.*",))) as offloader:
        for _ in range(3):
            offloader.run_micro_batch(lambda: model().backward(), writes_only_this_model=True)
            plain().backward()
    found, expected = gradients_of(model), gradients_of(plain)
    dense = [{n: g.to_dense() for n, g in each.items()} for each in (found, expected)]
    assert_same_tensors(*dense, "sparse")


# ---- who else is there ---------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 3])
def test_out_of_memory_in_a_hook_on_a_parameter_ends_the_run(fails_at: int) -> None:
    """The hook may take gradients away, or step by them, by means that no version tells."""
    model = tiny_model("llama", dropout=0.1)
    bomb = Bomb(fails_at)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.register_hook(lambda gradient: bomb.check())
    with attach(model, EVERYTHING) as offloader:
        with pytest.raises(OutOfDeviceMemoryError, match="hooks on parameters"):
            offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_out_of_memory_in_a_users_hook(kind: str) -> None:
    expected = gradients()
    model = tiny_model("llama", dropout=0.1)
    bomb = Bomb(2)
    layers = model.model.layers
    for layer in layers:
        getattr(layer, f"register_{kind}_hook")(lambda *_: bomb.check())
    with attach(model, EVERYTHING) as offloader:
        torch.manual_seed(3)
        offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))
        assert bomb.count > 2
        assert_same_tensors(gradients_of(model), expected, kind)
        assert_clean(offloader)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_interrupt_in_the_second_try(in_backward: bool, num_before: int) -> None:
    expected = gradients(num_before + 1)
    model = tiny_model("llama", dropout=0.1)
    errors: list[Callable[[], BaseException]] = [out_of_memory, KeyboardInterrupt]
    bomb = Bomb(num_before + 1, num_before + 2, error=lambda: errors.pop(0)())
    plant(model, bomb, in_backward=in_backward)
    with attach(model, EVERYTHING) as offloader:
        torch.manual_seed(3)
        for index in range(num_before):
            step(model, tiny_batch(index))
        state = torch.get_rng_state()
        before = gradients_of(model)
        kept = [p.grad for p in model.parameters()]
        with pytest.raises(KeyboardInterrupt):
            offloader.run_micro_batch(lambda: step(model, tiny_batch(num_before)))
        if num_before:  # in no gradient's place stands anything else
            assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
        assert not any(p._backward_hooks for p in model.parameters())
        for name, parameter in model.named_parameters():  # the user starts the micro-batch again
            parameter.grad = before[name].clone() if name in before else None
        torch.set_rng_state(state)
        offloader.run_micro_batch(lambda: step(model, tiny_batch(num_before)))
        assert_same_tensors(gradients_of(model), expected, "after the interrupt")
        gc.collect()
        assert_clean(offloader)


def bombed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(BombNode.apply(x @ layer.weight, layer.bomb))


def run_interrupted(at: int | None, expected: dict[str, torch.Tensor]) -> Interrupter:
    """Interrupt a micro-batch that runs again, at a line of the package; check what comes after."""
    model = Stack(bombed, linear_relu, linear_relu)
    model.layers[0].bomb = Bomb(2)
    x = torch.linspace(-1, 1, 16).view(4, 4)
    interrupter = Interrupter(at)
    with attach(model, EVERYTHING) as offloader:

        def micro_batch() -> None:
            model(x).square().sum().backward()

        offloader.run_micro_batch(micro_batch)
        kept = [p.grad for p in model.parameters()]
        with interrupter, contextlib.suppress(KeyboardInterrupt):
            offloader.run_micro_batch(micro_batch, writes_only_this_model=True)
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            assert parameter.grad is gradient
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks
        if not interrupter.has_raised:
            assert_same_tensors(gradients_of(model), expected, "not interrupted")
    gc.collect()
    assert_clean(offloader)
    model.layers[0].bomb.at = ()
    model.zero_grad()
    for _ in range(2):
        model(x).square().sum().backward()
    assert_same_tensors(gradients_of(model), expected, "detached")
    return interrupter


@pytest.mark.parametrize("num_points", [12, pytest.param(400, marks=pytest.mark.thorough)])
def test_an_interrupt_at_any_line(num_points: int) -> None:
    model = Stack(linear_relu, linear_relu, linear_relu)
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for _ in range(2):
        model(x).square().sum().backward()
    expected = gradients_of(model)
    count = run_interrupted(None, expected).count
    assert count > 1000
    for at in sample(count, num_points):
        run_interrupted(at, expected)


def test_the_host_being_full_is_not_out_of_device_memory() -> None:
    model = tiny_model("llama", dropout=0.1)
    config = replace(EVERYTHING, host_memory_gib=1e-6)
    with attach(model, config) as offloader:
        torch.manual_seed(3)
        offloader.run_micro_batch(lambda: step(model, tiny_batch(0)))
        assert "out_of_memory" not in offloader.report_extra
        assert offloader.metrics()["kept_bytes/host memory full"] > 0
        assert_same_tensors(gradients_of(model), gradients(), "with a full host")


def test_a_loop_that_does_not_use_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = plant(tiny_model("llama"), Bomb(1))
    with pytest.raises(torch.OutOfMemoryError) as caught, attach(model, EVERYTHING):
        step(model)
    assert not isinstance(caught.value, OutOfDeviceMemoryError)
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "in the backward of layer 'model.layers.0'" in message
    assert "run_micro_batch" in message


@pytest.mark.parametrize(
    ("config", "lever"),
    [
        (OFF, "policy='all', for the"),
        (replace(EVERYTHING, host_memory_gib=1e-6), "a larger host_memory_gib, for the"),
        (EVERYTHING, "keep_last_layers=0, for the"),
        (EVERY_LAYER, "a smaller micro-batch, with as many more"),
    ],
)
def test_the_message_names_the_biggest_lever(config: PyAOConfig, lever: str) -> None:
    model = plant(tiny_model("llama"), Bomb(2))
    with attach(model, config) as offloader:
        step(model)
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            offloader.run_micro_batch(lambda: (model.zero_grad(), step(model)))
    assert f"The biggest lever: {lever}" in str(caught.value)


def test_other_errors_pass_untouched() -> None:
    model = plant(tiny_model("llama"), Bomb(1, error=lambda: ValueError("boom")))
    with attach(model, EVERYTHING) as offloader:
        with pytest.raises(ValueError, match="boom"):
            offloader.run_micro_batch(lambda: step(model))
        assert "out_of_memory" not in offloader.report_extra


def test_nested_micro_batches_and_a_detached_model() -> None:
    expected = gradients()
    model = plant(tiny_model("llama", dropout=0.1), Bomb(1, 3, 4, 5, 6, 7, 8))
    offloader = attach(model, EVERYTHING)
    torch.manual_seed(3)
    run = offloader.run_micro_batch
    run(lambda: run(lambda: step(model, tiny_batch(0))))
    assert_same_tensors(gradients_of(model), expected, "nested")
    with pytest.raises(OutOfDeviceMemoryError, match="nothing tighter"):
        run(lambda: run(lambda: step(model)))
    offloader.detach()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(lambda: step(model))
    assert not isinstance(caught.value, OutOfDeviceMemoryError)


@pytest.mark.thorough
def test_policy_pyao_does_not_loosen_the_plan_again() -> None:
    model = plant(tiny_model("llama", dropout=0.1), Bomb(1))
    config = replace(EVERYTHING, policy="pyao", profile_steps=2)
    with attach(model, config) as offloader:
        offloader.run_micro_batch(lambda: step(model))
        tighter = offloader.engine.policy
        for _ in range(4):
            offloader.run_micro_batch(lambda: step(model))
        assert offloader.engine.policy is tighter


@pytest.fixture(autouse=True)
def _python_random() -> Iterator[None]:
    state, of_numpy = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(state)
    numpy.random.set_state(of_numpy)
