"""``verify_recompute``: a second run that gives backward other bits is found before a step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.recompute import segments
from hf_pyao.engine.recompute.verification import (
    NUM_FIRST_FORWARDS,
    SecondRunCheck,
    SecondRuns,
)
from hf_pyao.errors import RecomputationError

EVERYTHING = PyAOConfig(policy="all", min_bytes=256, keep_last_layers=0)
SIZES: dict[str, Any] = {"vocab_size": 96, "use_cache": False}
CONFIGS = {
    "llama": lambda: LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **SIZES
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, **SIZES
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=32, **SIZES
    ),
    "mixtral": lambda: MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **SIZES
    ),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "each layer": {"checkpoint_every": 1},
    "two layers": {"checkpoint_every": 2},
    "two layers, nested": {"checkpoint_every": 2, "checkpoint_nested": True},
    "tiles": {"mlp_tiles": 4},
    "tiles in layers": {"mlp_tiles": 2, "checkpoint_every": 1},
    "rebuilt": {"recompute_modules": ["mlp_act", "mlp_norm"]},
    "long context": {"long_context": True, "mlp_tiles": 2},
}


class World:
    """State outside of the model that a module goes by: how often it ran."""

    def __init__(self, module: nn.Module, factor: float = 0.1) -> None:
        self.num_runs = 0
        self.factor = factor
        own = module.forward

        def forward(hidden: torch.Tensor, *args: Any) -> Any:
            self.num_runs += 1
            return own(hidden * (1 + self.factor * self.num_runs), *args)

        module.forward = forward  # type: ignore[method-assign]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]()).train()


def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def hooks_are_removed() -> Iterator[None]:
    before = dict(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks)
    yield
    assert dict(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks) == before


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in CONFIGS for way in WAYS if kind != "mixtral" or "layer" in way],
)  # a mixture's experts are one module: no tiles, no such roles
def test_equal_second_runs_raise_no_alarm(kind, way, dtype):
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    config = replace(EVERYTHING, verify_recompute="always", **WAYS[way])

    with attach(model, config) as offloader:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                model(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        check: SecondRunCheck = offloader._guard._check
        assert check.num_checked >= 3
        assert not check.unsteady_layers


@pytest.mark.usefixtures("hooks_are_removed")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "rebuilt"])
def test_a_layer_that_goes_by_the_world_is_named_before_the_optimizer_steps(way):
    model = model_of("llama")
    world = World(model.model.layers[1].mlp, factor=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)

    with attach(model, replace(EVERYTHING, **WAYS[way])):
        loss = model(input_ids=ids(), labels=ids()).loss
        world.factor = 0.1
        loss.backward()
        world.factor = 0.0
        with pytest.raises(RecomputationError, match="layers.1") as caught:
            optimizer.step()

        assert "optimizer has not stepped" in str(caught.value)
        assert all(map(torch.equal, before, weights(model)))
        optimizer.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()  # runs once from now on
        optimizer.step()


def test_a_layer_that_is_rebuilt_from_changed_memory_is_named():
    """What ``.data`` changes has no version: the replay reads other bytes than forward did."""
    model = model_of("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = model.model.layers[1].post_attention_layernorm

    with attach(model, replace(EVERYTHING, recompute_modules=["mlp_norm", "mlp_act"])):
        loss = model(input_ids=ids(), labels=ids()).loss
        norm.weight.data.mul_(1.5)
        loss.backward()
        with pytest.raises(RecomputationError, match="layers.1"):
            optimizer.step()


@pytest.mark.parametrize("way", ["each layer", "two layers, nested", "tiles"])
def test_a_micro_batch_is_not_repeated_and_its_gradients_are_discarded(way):
    model = model_of("llama")
    world = World(model.model.layers[1].mlp, factor=0.0)
    num_runs = []

    def forward_and_backward() -> None:
        num_runs.append(1)
        model(input_ids=ids(), labels=ids()).loss.backward()

    with attach(model, replace(EVERYTHING, **WAYS[way])) as ours:
        ours.run_micro_batch(forward_and_backward)
        world.factor = 0.1
        with pytest.raises(RecomputationError, match=r"layers\.1.*discarded"):
            ours.run_micro_batch(forward_and_backward)

    assert len(num_runs) == 2
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by_context", [False, True])
def test_what_was_compared_is_read_by_detaching(by_context):
    model = model_of("gpt2")
    World(model.transformer.h[2].mlp)
    config = replace(EVERYTHING, checkpoint_every=1)

    def run() -> None:
        with contextlib.ExitStack() as stack:
            ours = attach(model, config)
            if by_context:
                stack.enter_context(ours)
            model(input_ids=ids(), labels=ids()).loss.backward()
            ours.detach()

    with pytest.raises(RecomputationError, match=r"h\.2"):
        run()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.transformer.h[2]._forward_hooks


class Recurrent(GradientCheckpointingLayer):
    """Its kernel saves memory that it has not written whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.rnn(x)[0]


class Seeded(torch.autograd.Function):
    """Saves a seed and an offset that it has not written, as attention kernels without dropout."""

    junk = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Seeded.junk += 1
        seed = torch.full((2,), Seeded.junk, dtype=torch.uint64)
        ctx.save_for_backward(seed, torch.tensor(-Seeded.junk))
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return 3 * grad


class Attention(GradientCheckpointingLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Seeded.apply(x).sin()


@pytest.mark.parametrize("layer", [Recurrent, Attention])
def test_what_a_kernel_leaves_unwritten_is_no_difference(layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), layer(), layer()).train()
    with attach(model, replace(EVERYTHING, checkpoint_every=1, verify_recompute="always")):
        for length in (3, 4, 9, 5):
            junk = [torch.randn(n) for n in range(1, 300, 7)]  # fills memory that is used again
            del junk
            model(torch.randn(2, length, 6)).square().sum().backward()


def test_an_optimizer_that_steps_in_backward_takes_no_wrong_gradient():
    model = model_of("llama")
    World(model.model.layers[1].mlp)
    last = model.model.layers[2].mlp.down_proj.weight
    wrong = model.model.layers[1].mlp.down_proj.weight
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in (last, wrong)}
    before = {p: p.detach().clone() for p in optimizers}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    with attach(model, replace(EVERYTHING, checkpoint_every=1)):
        with pytest.raises(RecomputationError, match="layers.1"):
            model(input_ids=ids(), labels=ids()).loss.backward()

    assert not torch.equal(last, before[last])  # its gradient was right
    assert torch.equal(wrong, before[wrong])


# ---- which forwards ------------------------------------------------------------------------------


def num_checked_in(num_forwards: int, prepare: Callable[[Any], None], mode: str) -> int:
    model = model_of("gpt2")
    config = replace(EVERYTHING, checkpoint_every=1, verify_recompute=mode)
    with attach(model, config) as offloader:
        prepare(offloader)
        for _ in range(num_forwards):
            model(input_ids=ids(), labels=ids()).loss.backward()
        return offloader._guard._check.num_checked


@pytest.mark.parametrize(
    ("mode", "expected"), [("off", 0), ("always", 6), ("auto", NUM_FIRST_FORWARDS)]
)
def test_modes_say_which_forwards_are_checked(mode, expected):
    assert num_checked_in(6, lambda _: None, mode) == expected


def test_19_of_1000_forwards_are_checked_and_the_first_ones_at_most_are_dearer():
    second_runs = SecondRuns(SecondRunCheck("auto"), "segment")

    found = [second_runs.of_forward(number) for number in range(1000)]

    checked = [each for each in found if each is not None]
    assert len(checked) == NUM_FIRST_FORWARDS + 16
    assert sum(each.runs_twice for each in checked) == 1


def test_nothing_is_read_in_steps_that_are_not_checked(monkeypatch):
    reads: list[int] = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t.numel()), own(t))[1])
    model = model_of("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with attach(model, replace(EVERYTHING, checkpoint_every=1)):
        for _ in range(NUM_FIRST_FORWARDS + 3):
            model(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(reads) == NUM_FIRST_FORWARDS


# ---- layers whose kernels do not give the same bits twice ----------------------------------------


class Noisy:
    """Adds noise as sums in whatever order would, other noise in each run."""

    def __init__(self, module: nn.Module, size: float) -> None:
        own = module.forward
        generator = torch.Generator().manual_seed(0)

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(hidden.shape, generator=generator) * size
            return own(hidden * (1 + noise))

        module.forward = forward  # type: ignore[method-assign]


@pytest.fixture
def kernels_may_be_unsteady(monkeypatch):
    """As on an accelerator."""
    monkeypatch.setattr(segments, "may_be_unsteady", lambda devices: True)


@pytest.mark.usefixtures("kernels_may_be_unsteady")
def test_an_unsteady_layer_is_compared_with_a_bound(caplog):
    model = model_of("llama")
    Noisy(model.model.layers[1].mlp, 1e-7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with attach(model, replace(EVERYTHING, checkpoint_every=1, verify_recompute="always")) as ours:
        for _ in range(4):
            model(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        assert ours._guard._check.unsteady_layers == ("model.layers.1",)
    assert "do not give the same bits twice" in caplog.text


@pytest.mark.usefixtures("kernels_may_be_unsteady")
def test_an_unsteady_layer_that_differs_by_more_than_rounding_is_wrong():
    model = model_of("llama")
    Noisy(model.model.layers[1].mlp, 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with attach(model, replace(EVERYTHING, checkpoint_every=1)):
        model(input_ids=ids(), labels=ids()).loss.backward()
        with pytest.raises(RecomputationError, match="layers.1"):
            optimizer.step()


@pytest.mark.usefixtures("kernels_may_be_unsteady")
@pytest.mark.parametrize("way", ["two layers", "two layers, nested", "long context"])
def test_a_rehearsal_changes_no_bit(way):
    def train(config: PyAOConfig | None) -> list[torch.Tensor]:
        model = model_of("gpt2")  # with dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offloader = None if config is None else attach(model, config)
        torch.manual_seed(3)
        for _ in range(2):
            model(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert offloader is None or not offloader._guard._check.unsteady_layers
        return weights(model)

    settings = {**WAYS[way], "mlp_tiles": "off", "head_loss": "off"}
    assert all(map(torch.equal, train(None), train(replace(EVERYTHING, **settings))))
