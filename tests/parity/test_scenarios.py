"""What users do besides forward, backward, step: bit for bit the same with and without hf_pyao."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    MAIN,
    FunctionLayer,
    Stack,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
    train,
)

FIRST, SECOND = tiny_batch(1, padding=2), tiny_batch(2, length=11)
Outcome = dict[str, torch.Tensor]
CONFIGS = (EVERYTHING, replace(EVERY_LAYER, window=2048))
SEGMENTS = (replace(EVERY_LAYER, checkpoint_every=2), replace(EVERY_LAYER, checkpoint_every=3))
"""Gradients enter in the middle of segments too, and micro-batches are in flight."""


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False, **options).loss
    return loss


def gradients_after(model: nn.Module, *losses: torch.Tensor) -> Outcome:
    found = {f"loss {index}": loss.detach().clone() for index, loss in enumerate(losses)}
    return found | gradients_of(model)


def check(
    scenario: Callable[[Any], Outcome],
    model: nn.Module,
    configs: tuple[PyAOConfig, ...] = CONFIGS,
    *,
    is_moving: bool = True,
) -> None:
    """Run *scenario* on copies of *model*, plain and attached, and compare what it returns."""
    copies = [copy.deepcopy(model) for _ in configs]
    torch.manual_seed(7)
    expected = scenario(model)
    state = torch.get_rng_state()
    for attached, config in zip(copies, configs, strict=True):
        with attach(attached, config) as offloader:
            torch.manual_seed(7)
            found = scenario(attached)
            what = f"window {config.window}"
            assert_same_tensors(found, expected, what)
            assert torch.equal(torch.get_rng_state(), state), f"{what}: random stream was touched"
            attached.zero_grad()
            offloader.engine.end_forward()
            assert offloader.host_pool.settle() == 0, f"{what}: buffers are still busy"
            assert bool(offloader.totals().get("offloaded_bytes")) == is_moving, what
            assert bool(offloader.engine.num_packs) == is_moving, what


# ---- backward in every shape
# -----------------------------------------------------------------------


def accumulate_in_one_graph(model: nn.Module) -> Outcome:
    first, second = loss_of(model, FIRST), loss_of(model, SECOND)
    (first + 2 * second).backward()
    return gradients_after(model, first, second)


def two_forwards_then_backward_in_order(model: nn.Module) -> Outcome:
    first, second = loss_of(model, FIRST), loss_of(model, SECOND)
    first.backward()
    second.backward()
    return gradients_after(model, first, second)


def two_forwards_then_backward_reversed(model: nn.Module) -> Outcome:
    first, second = loss_of(model, FIRST), loss_of(model, SECOND)
    second.backward()
    first.backward()
    return gradients_after(model, first, second)


def backward_twice(model: nn.Module) -> Outcome:
    loss = loss_of(model, FIRST)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_after(model, loss)


def backward_twice_with_another_step_between(model: nn.Module) -> Outcome:
    kept = loss_of(model, FIRST)
    kept.backward(retain_graph=True)
    loss = loss_of(model, SECOND)
    loss.backward()
    kept.backward()
    return gradients_after(model, kept, loss)


def one_backward_over_two_micro_batches(model: nn.Module) -> Outcome:
    kept = loss_of(model, FIRST)
    kept.backward(retain_graph=True)
    loss = loss_of(model, SECOND)
    (kept + loss).backward(retain_graph=True)
    (kept * loss).backward()
    return gradients_after(model, kept, loss)


def backward_from_the_middle_first(model: nn.Module) -> Outcome:
    outputs = model(**FIRST, use_cache=False, output_hidden_states=True)
    middle = outputs.hidden_states[1].square().mean()
    middle.backward(retain_graph=True)
    outputs.loss.backward()
    return gradients_after(model, middle, outputs.loss)


def only_part_of_the_graph(model: nn.Module) -> Outcome:
    outputs = model(**FIRST, use_cache=False, output_hidden_states=True)
    middle = outputs.hidden_states[2].square().mean()
    middle.backward()
    found = gradients_after(model, middle)
    del outputs, middle
    loss = loss_of(model, SECOND)
    loss.backward()
    return found | {f"then {name}": value for name, value in gradients_after(model, loss).items()}


def hidden_states_in_the_loss(model: nn.Module) -> Outcome:
    outputs = model(**FIRST, use_cache=False, output_hidden_states=True)
    loss = outputs.loss + sum(state.square().mean() for state in outputs.hidden_states)
    loss.backward()
    return gradients_after(model, loss)


def gradients_by_autograd_grad(model: nn.Module) -> Outcome:
    loss = loss_of(model, FIRST)
    named = dict(model.named_parameters())
    some = [name for name in named if "1" in name or "norm" in name or "ln" in name]
    first = torch.autograd.grad(loss, [named[name] for name in some], retain_graph=True)
    everything = torch.autograd.grad(loss, list(named.values()))
    found = {f"some {name}": value for name, value in zip(some, first, strict=True)}
    return found | dict(zip(named, everything, strict=True))


def gradients_of_hidden_states(model: nn.Module) -> Outcome:
    outputs = model(**FIRST, use_cache=False, output_hidden_states=True)
    states = list(outputs.hidden_states[:-1])
    found = torch.autograd.grad(outputs.loss, states)
    return {f"state {index}": value for index, value in enumerate(found)}


def retained_gradients_and_tensor_hooks(model: nn.Module) -> Outcome:
    outputs = model(**FIRST, use_cache=False, output_hidden_states=True)
    seen: Outcome = {}
    outputs.hidden_states[1].retain_grad()
    outputs.hidden_states[2].register_hook(lambda gradient: seen.update(state=gradient.clone()))
    outputs.loss.backward()
    return seen | {"retained": outputs.hidden_states[1].grad} | gradients_after(model, outputs.loss)


BACKWARDS = (
    accumulate_in_one_graph,
    two_forwards_then_backward_in_order,
    two_forwards_then_backward_reversed,
    backward_twice,
    backward_twice_with_another_step_between,
    one_backward_over_two_micro_batches,
    backward_from_the_middle_first,
    only_part_of_the_graph,
    hidden_states_in_the_loss,
    gradients_by_autograd_grad,
    gradients_of_hidden_states,
    retained_gradients_and_tensor_hooks,
)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("scenario", BACKWARDS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("model_type", MAIN)
def test_backward_passes(model_type: str, scenario: Callable[[Any], Outcome]) -> None:
    check(scenario, tiny_model(model_type, dropout=0.1), (*CONFIGS, *SEGMENTS))


@pytest.mark.parametrize("model_type", MAIN)
def test_double_backward(model_type: str) -> None:
    def gradient_penalty(model: nn.Module) -> Outcome:
        loss = loss_of(model, FIRST)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        (loss + penalty).backward()
        return gradients_after(model, loss, penalty)

    # Fused attention has no second derivative.
    check(gradient_penalty, tiny_model(model_type, attention="eager"))


def test_a_layer_that_runs_a_backward_pass_in_its_forward() -> None:
    def force(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(x @ layer.weight).square().sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.sigmoid(x + gradient)

    def step(model: nn.Module) -> Outcome:
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        loss = model(x).square().sum()
        loss.backward()
        return gradients_after(model, loss) | {"input": x.grad}

    check(step, Stack(force, force, force))


# ---- what is between the steps ------------------------------------------------------------------


def generate_and_evaluate_between(model: Any) -> Outcome:
    found = {}
    for step, batch in enumerate((FIRST, SECOND)):
        loss = loss_of(model, batch)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        model.eval()
        prompt = FIRST["input_ids"][:, :4]
        with torch.no_grad():
            found[f"evaluation {step}"] = loss_of(model, SECOND)
        found[f"tokens {step}"] = model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.train()
    return found | gradients_of(model)


def evaluate_between_forward_and_backward(model: nn.Module) -> Outcome:
    loss = loss_of(model, FIRST)
    model.eval()
    with torch.no_grad():
        evaluation = loss_of(model, SECOND)
    model.train()
    with torch.inference_mode():
        inference = loss_of(model, SECOND).clone()
    loss.backward()
    return gradients_after(model, loss, evaluation) | {"inference": inference.clone()}


def loss_computed_outside(model: nn.Module) -> Outcome:
    logits = model(FIRST["input_ids"], attention_mask=FIRST["attention_mask"], use_cache=False)[0]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), FIRST["input_ids"].flatten())
    loss.backward()
    return gradients_after(model, loss)


def with_a_cache(model: nn.Module) -> Outcome:
    loss = model(**FIRST, use_cache=True).loss
    loss.backward()
    return gradients_after(model, loss)


def gradient_in_eval_mode_then_training(model: nn.Module) -> Outcome:
    model.eval()
    loss = loss_of(model, FIRST)
    loss.backward()
    model.train()
    again = loss_of(model, SECOND)
    again.backward()
    return gradients_after(model, loss, again)


BETWEEN = (
    generate_and_evaluate_between,
    evaluate_between_forward_and_backward,
    loss_computed_outside,
    with_a_cache,
    gradient_in_eval_mode_then_training,
)


@pytest.mark.parametrize("scenario", BETWEEN, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("model_type", MAIN)
def test_what_happens_around_a_step(model_type: str, scenario: Callable[[Any], Outcome]) -> None:
    check(scenario, tiny_model(model_type, dropout=0.1))


def test_nothing_is_offloaded_without_training() -> None:
    def look(model: Any) -> Outcome:
        found = {}
        with torch.no_grad():
            found["no_grad in training mode"] = loss_of(model, FIRST)
        with torch.inference_mode():
            found["inference mode"] = loss_of(model, FIRST).clone()
        model.eval()
        found["eval mode"] = loss_of(model, FIRST).detach()
        found["tokens"] = model.generate(FIRST["input_ids"], max_new_tokens=3, do_sample=False)
        return {name: value.clone() for name, value in found.items()}

    check(look, tiny_model("llama"), is_moving=False)


# ---- which parameters learn ---------------------------------------------------------------------

STEPS = ((FIRST,), (SECOND, FIRST), (SECOND,))


def trained(model: nn.Module, autocast: torch.dtype | None = None) -> Outcome:
    """Return losses, gradients and parameters of three optimizer steps."""
    trajectory = train(model, STEPS, autocast=autocast)
    found = {f"loss {index}": loss for index, loss in enumerate(trajectory.losses)}
    for step, gradients in enumerate(trajectory.gradients):
        found |= {f"gradient {step} of {name}": value for name, value in gradients.items()}
    return found | trajectory.parameters


def freeze(model: nn.Module, *parts: str) -> nn.Module:
    frozen = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    assert frozen
    for parameter in frozen:
        parameter.requires_grad_(False)
    return model


FROZEN = {
    "embeddings": ("embed", "wte", "wpe"),
    "lower half": ("embed", "wte", "wpe", "layers.0.", "layers.1.", "h.0.", "h.1."),
    "matrices": ("proj", "fc", "c_attn"),
    "norms": ("norm", "ln_"),
}
each_autocast = pytest.mark.parametrize(
    "autocast", [None, torch.bfloat16], ids=["fp32", "autocast"]
)


@pytest.mark.sampled(every=5)
@each_autocast
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("model_type", MAIN)
def test_frozen_parameters(model_type: str, frozen: str, autocast: torch.dtype | None) -> None:
    model = freeze(tiny_model(model_type, tie_word_embeddings=False), *FROZEN[frozen])
    # Of a frozen lower half nothing is saved; what is left to move is in the last layer.
    configs = (replace(EVERY_LAYER, window=2048 if autocast else "layer"),)
    check(lambda model: trained(model, autocast), model, configs)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", MAIN)
def test_tied_weights(model_type: str) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    check(trained, model, (*CONFIGS, *SEGMENTS))


# peft asks for checkpointing under the name it had before transformers 5.23.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@each_autocast
@pytest.mark.parametrize("model_type", MAIN)
def test_lora(model_type: str, autocast: torch.dtype | None) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        target_modules={"gpt2": ["c_attn", "c_fc"]}.get(model_type, ["q_proj", "v_proj"]),
        r=2,
        lora_dropout=0.1,
        init_lora_weights=False,
        fan_in_fan_out=model_type == "gpt2",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(tiny_model(model_type), config)
    check(lambda model: trained(model, autocast), model)


# ---- which layers run ---------------------------------------------------------------------------


def test_layers_dropped_at_random() -> None:
    def steps(model: nn.Module) -> Outcome:
        losses = []
        for seed in range(6):
            losses.append(loss_of(model, tiny_batch(seed)))
            losses[-1].backward()
        return gradients_after(model, *losses)

    check(steps, tiny_model("opt", layerdrop=0.5))


@pytest.mark.parametrize("model_type", MAIN)
def test_one_layer_object_that_runs_three_times(model_type: str) -> None:
    def steps(model: nn.Module) -> Outcome:
        first = accumulate_in_one_graph(model)
        then = accumulate_in_one_graph(model)
        return first | {f"then {name}": value for name, value in then.items()}

    model = tiny_model(model_type)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    for index in (1, 2):
        layers[index] = layers[0]
    check(steps, model)


def test_lengths_and_batch_sizes_that_vary() -> None:
    def steps(model: nn.Module) -> Outcome:
        losses = []
        for size, length in ((1, 3), (4, 16), (2, 2), (3, 7), (1, 16)):
            losses.append(loss_of(model, tiny_batch(size, size=size, length=length)))
            losses[-1].backward()
        return gradients_after(model, *losses)

    check(steps, tiny_model("llama"))
