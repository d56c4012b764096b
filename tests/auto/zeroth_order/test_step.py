"""Zeroth-order steps over visiting weights are those of a plain MeZO, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao.auto.zeroth_order.step import ZerothOrder, zeroth_order_step
from hf_pyao.engine.zeroth_order.perturbation import ZerothOrderSettings
from hf_pyao.errors import ConfigError, ConflictError
from tests.helpers import ARCHITECTURES, tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainMeZO, PlainPackedMeZO

EPSILON, RATE = 1e-2, 1e-3


class Losses:
    """The model's own loss on batches, one after the other."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self.batches = batches

    def __call__(self, model: nn.Module) -> list[torch.Tensor]:
        return [model(**batch).loss for batch in self.batches]


def batches_of(num: int) -> list[dict[str, Any]]:
    return [tiny_batch(number) for number in range(num)]


def check(
    model: nn.Module,
    num_steps: int,
    *,
    num_resident: int = 0,
    momentum: float = 0.0,
    resume_at: int | None = None,
    micro_batches: int = 1,
    transfer_dtype: str | None = None,
    **options: Any,
) -> ZerothOrder:
    """Train *model* plainly and a copy by visits; compare weights, gradients and an evaluation."""
    model.train()
    ours = copy.deepcopy(model)
    batches = batches_of(micro_batches)
    plain: Any
    if transfer_dtype is None:
        plain = PlainMeZO(model, EPSILON, momentum, seed=5)
    else:
        plain = PlainPackedMeZO(model, EPSILON, momentum, seed=5)
    torch.manual_seed(1)
    expected = [plain.step(Losses(batches), RATE) for _ in range(num_steps)]
    random_state = torch.get_rng_state()

    settings = ZerothOrderSettings(
        epsilon=EPSILON, momentum=momentum, seed=5, transfer_dtype=transfer_dtype
    )
    torch.manual_seed(1)
    made = ZerothOrder(ours, settings, num_resident=num_resident, **options)
    found = []
    for number in range(num_steps):
        if number == resume_at:
            state, weights = made.state_dict(), copy.deepcopy(ours.state_dict())
            made.close()
            ours = copy.deepcopy(model)
            ours.load_state_dict(weights)
            made = ZerothOrder(ours, settings, num_resident=num_resident, **options)
            made.load_state_dict(state)
        for batch in batches:
            made.accumulate(ours, lambda model, batch=batch: model(**batch).loss)
        found.append(made.end_step(RATE))
    assert torch.equal(torch.get_rng_state(), random_state)
    # T5's attention gets its learned bias as mask, and torch takes another kernel, with other
    # bits, for a mask that requires gradients: as in the plain model, and never in ours.
    with torch.no_grad():
        evaluated = ours.eval()(**batches[0]).loss
    made.close()
    assert found == expected
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert q.grad is None
    with torch.no_grad():
        if transfer_dtype is not None:
            for name, p in model.named_parameters():
                p.copy_(plain.read(name, p.detach().clone()))
        assert torch.equal(model.eval()(**batches[0]).loss, evaluated)
    return made


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_each_architecture(architecture: str) -> None:
    check(tiny_model(architecture, dropout=0.2), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["opt", "llama", "gpt2", "gemma3_text", "bart", "falcon"])
@pytest.mark.parametrize("num_resident", [0, 2])
def test_twenty_steps_with_a_resume(architecture: str, num_resident: int) -> None:
    model = tiny_model(architecture, dropout=0.2)
    check(model, 20, num_resident=num_resident, resume_at=9)


@pytest.mark.parametrize("num_resident", range(4))
def test_any_number_of_layers_stays(num_resident: int) -> None:
    made = check(tiny_model("llama", dropout=0.1), 3, num_resident=num_resident)
    assert len(made.blocks) == 3 - num_resident


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dtype_and_momentum(dtype: torch.dtype, momentum: float) -> None:
    model = tiny_model("opt", dropout=0.1, dtype=dtype)
    check(model, 4, momentum=momentum, resume_at=2, micro_batches=2)


def test_frozen_weights_visit_and_stay_as_they_are() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name or "norm" in name)
    check(model, 3)


def test_uploads_and_copies_back_are_counted() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    made = ZerothOrder(model, ZerothOrderSettings())
    batch = tiny_batch(0)
    per_block = made.blocks[0].nbytes
    for number in range(3):
        before = made.figures()
        zeroth_order_step(model, lambda model: model(**batch).loss, made, learning_rate=RATE)
        after = made.figures()
        assert after["num_offloads"] - before["num_offloads"] == (6 if number else 0)
    assert after["num_late_uploads"] == 0
    # Each block once a pass, and the first one for the step that comes.
    assert after["num_uploads"] == 3 * 2 * 6 + 1
    of_weights = sum(each.nbytes for each in made.blocks[0].weights)
    assert 2 * 6 * of_weights <= after["offloaded_bytes"] <= 2 * 6 * per_block
    made.close()


def test_evaluation_and_files_see_updated_weights() -> None:
    model = tiny_model("opt").eval()
    plain_model = copy.deepcopy(model)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    batch = tiny_batch(0)
    with ZerothOrder(model, ZerothOrderSettings(epsilon=EPSILON, seed=5)) as made:
        for _ in range(2):
            plain.step(Losses([batch]), RATE)
            zeroth_order_step(model, lambda model: model(**batch).loss, made, learning_rate=RATE)
            with torch.no_grad():
                assert torch.equal(model(**batch).logits, plain_model(**batch).logits)
        plain.step(Losses([batch]), RATE)
        zeroth_order_step(model, lambda model: model(**batch).loss, made, learning_rate=RATE)
        for (name, p), q in zip(
            model.state_dict().items(), plain_model.state_dict().values(), strict=True
        ):
            assert torch.equal(p, q), name
        with torch.no_grad():
            ids = batch["input_ids"][:, :3]
            ours = model.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(ours, plain_model.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("fails_at", ["plus", "minus", "both"])
def test_a_pass_that_fails_changes_nothing(fails_at: str) -> None:
    model = tiny_model("llama", dropout=0.1)
    plain_model = copy.deepcopy(model)
    batch = tiny_batch(0)
    plain = PlainMeZO(plain_model, EPSILON, seed=5)
    made = ZerothOrder(model, ZerothOrderSettings(epsilon=EPSILON, seed=5))
    calls: list[int] = []

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(1)
        wanted = {"plus": [1], "minus": [2], "both": [1, 2]}[fails_at]
        if len(calls) in wanted:
            raise ValueError("no")

    for number in range(3):
        state = torch.get_rng_state()
        if number == 1:
            with pytest.raises(ValueError, match="no"):
                handle = model.model.layers[1].register_forward_hook(fail)
                made.accumulate(model, lambda model: model(**batch).loss)
            handle.remove()
        torch.set_rng_state(state)
        expected = plain.step(Losses([batch]), RATE)
        torch.set_rng_state(state)
        made.accumulate(model, lambda model: model(**batch).loss)
        assert made.end_step(RATE) == expected
    made.close()
    for (name, p), q in zip(plain_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    model = tiny_model("opt")
    before = copy.deepcopy(model.state_dict())
    with ZerothOrder(model, ZerothOrderSettings()) as made:
        zeroth_order_step(model, lambda model: torch.tensor(torch.nan), made, learning_rate=RATE)
        assert made.num_skipped_steps == 1
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[name]), name


def test_what_is_refused() -> None:
    model = tiny_model("opt")
    with pytest.raises(ConfigError, match="host_memory_gib"):
        ZerothOrder(model, host_memory_gib=1e-6)
    with ZerothOrder(model) as made:
        with pytest.raises(ConfigError, match="one number"):
            made.accumulate(model, lambda model: torch.ones(2))
        with pytest.raises(ConfigError, match="micro-batch"):
            made.end_step(RATE)
    with pytest.raises(ConflictError, match="closed"):
        made.flush()
    with pytest.raises(ConfigError, match="requires gradients"):
        ZerothOrder(tiny_model("opt").requires_grad_(False))
