"""Which MLPs run in tiles, what is said of the others, and that the model comes out as it was."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.levers import Levers
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.step_program import StepProgram
from tests.helpers import HIDDEN, NUM_LAYERS, gradients_of, tiny_batch, tiny_model

OFF = {"policy": "off"}


def gradients(model: nn.Module, length: int = 8) -> dict[str, Tensor]:
    """Return the gradients of one step."""
    model.zero_grad()
    model(**tiny_batch(length=length)).loss.backward()
    return gradients_of(model)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm(), name


def num_tiles_of(offloader: Any) -> float:
    """Return into how many tiles the last MLP was cut; 0: none was."""
    return float(offloader.mlp_tiles.metrics()["mlp_tiles_num_tiles"])


def state_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return what every module has in it, hooks included."""
    return [
        {name: dict(v) if name.endswith("hooks") else v for name, v in vars(module).items()}
        for module in model.modules()
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_the_model_is_as_before(model_type: str) -> None:
    model = tiny_model(model_type)
    before = state_of(model)
    offloader = attach(model, PyAOConfig(policy="all", min_bytes=0, mlp_tiles=2))
    gradients(model)
    assert num_tiles_of(offloader) == 2
    model.zero_grad()
    offloader.detach()
    after = state_of(model)
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(new[key] is old[key] or new[key] == old[key] for key in old)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_a_copied_and_an_unpickled_model_are_plain(model_type: str) -> None:
    model = tiny_model(model_type)
    expected = gradients(model)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        pickle.dump(model, file)
        loaded = pickle.loads(file.getvalue())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the copies run weights of their own
        for other in (copied, loaded):
            assert_close(gradients(other), expected)
            plain = gradients(other)
            assert all(torch.equal(plain[name], expected[name]) for name in plain)
        assert num_tiles_of(offloader) == 0


@pytest.mark.thorough
def test_a_graph_that_was_built_before_detaching_runs_backward() -> None:
    model = tiny_model("opt")
    expected = gradients(model)
    model.zero_grad()
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)):
        loss = model(**tiny_batch(length=8)).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(found, expected)


@pytest.mark.thorough
def test_the_model_goes_when_it_is_let_go() -> None:
    model = tiny_model("llama")
    offloader = attach(model, PyAOConfig(policy="all", min_bytes=0, mlp_tiles=2))
    gradients(model)
    mlp = weakref.ref(model.model.layers[0].mlp)
    offloader.detach()
    del model, offloader
    gc.collect()
    assert mlp() is None


@pytest.mark.thorough
def test_few_tokens_take_the_plain_path_with_auto() -> None:
    model = tiny_model("llama")
    expected = gradients(model)
    with attach(model, PyAOConfig(**OFF, mlp_tiles="auto")) as offloader:
        found = gradients(model)
        assert num_tiles_of(offloader) == 0
        assert "3 of 3 MLPs" in offloader.describe()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_evaluation_takes_the_plain_path() -> None:
    model = tiny_model("llama")
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        model.eval()
        with torch.no_grad():
            model(**tiny_batch())
        assert num_tiles_of(offloader) == 0


# ---- what is left alone ------------------------------------------------------------------------------


class ConvolutionMLP(nn.Module):
    """Mixes neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.conv(self.up_proj(hidden).transpose(1, 2)).transpose(1, 2)
        return self.down_proj(up)


def with_mlp(kind: Any) -> nn.Module:
    """Return a model, the roles of whose parts are inferred, with other MLPs."""
    model = tiny_model("gemma3_text")
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.mlp = kind()
    return model.train()


class ForeignMLP(ConvolutionMLP):
    """Trains a weight that is another module's."""

    scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(hidden) * ForeignMLP.scale)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ConvolutionMLP, "other tokens"),
        (ForeignMLP, "another module"),
    ],
)
def test_an_mlp_that_mixes_tokens(kind: Any, named: str, caplog: pytest.LogCaptureFixture) -> None:
    model = with_mlp(kind)
    expected = gradients(model)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        found = gradients(model)
        assert num_tiles_of(offloader) == 0
        assert offloader.mlp_tiles is not None
        described = offloader.mlp_tiles.describe()
        assert named in described and "0 of 3 MLPs" in described
    assert_close(found, expected)
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert named in warning.getMessage()


class Centred(nn.Module):
    """An activation that takes the mean of all tokens away."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(hidden - hidden.mean(tuple(range(hidden.dim() - 1)), keepdim=True))


def test_an_activation_that_mixes_tokens_in_a_spread_mlp() -> None:
    model = tiny_model("opt")
    for layer in model.model.decoder.layers:
        layer.activation_fn = Centred()
    expected = gradients(model)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        found = gradients(model)
        assert offloader.mlp_tiles is not None
        assert "does not run in tiles" in offloader.mlp_tiles.describe()
        assert num_tiles_of(offloader) == 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fused_experts_are_left_alone_with_the_reason() -> None:
    """Before transformers 5 experts are modules, and each one is tiled."""
    model = tiny_model("mixtral")
    is_fused = not any(isinstance(module, nn.ModuleList) for module in layer_of(model).modules())
    with attach(model, PyAOConfig(**OFF, mlp_tiles="auto")) as offloader:
        assert is_fused == ("fused" in offloader.describe())
        assert is_fused == (offloader.mlp_tiles is None or not offloader.mlp_tiles.num_tiled)


def layer_of(model: Any) -> nn.Module:
    layer: nn.Module = model.model.layers[0]
    return layer


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)))


class Mixture(nn.Module):
    """Experts that are modules of their own, called with the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, HIDDEN)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            of_expert = (chosen == index).nonzero().squeeze(-1)
            found = expert(rows[of_expert]) * weight[of_expert].unsqueeze(-1)
            result = result.index_add(0, of_expert, found)
        return result.view(hidden.shape)


@pytest.mark.thorough
def test_experts_that_are_modules_run_in_tiles_of_their_tokens() -> None:
    model = with_mlp(Mixture).double()  # products of a few rows have other bits than of more
    expected = gradients(model, 32)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=3)) as offloader:
        found = gradients(model, 32)
        assert offloader.mlp_tiles is not None
        assert offloader.mlp_tiles.num_tiled == 4 * NUM_LAYERS, offloader.describe()
        assert num_tiles_of(offloader) == 3
    assert_close(found, expected)


@pytest.mark.thorough
def test_hooks_of_users_inside_the_mlp(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    shapes: list[torch.Size] = []
    hook = lambda _m, _a, out: shapes.append(out.shape)  # noqa: E731
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(hook)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        gradients(model)
        assert offloader.mlp_tiles is not None and offloader.mlp_tiles.num_tiled == NUM_LAYERS - 1
        assert "module hooks" in offloader.describe()
    assert shapes == [(2, 8, 2 * HIDDEN)]
    handle.remove()
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        for layer in model.model.layers:  # put on later
            layer.mlp.down_proj.register_forward_hook(hook)
        gradients(model)
        assert num_tiles_of(offloader) == 0
    assert "module hooks" in caplog.text
    assert shapes[1:] == [(2, 8, HIDDEN)] * NUM_LAYERS


@pytest.mark.thorough
def test_hooks_of_users_on_the_mlp_itself_see_the_whole() -> None:
    model = tiny_model("llama")
    shapes: list[torch.Size] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _a, out: shapes.append(out.shape))
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        gradients(model)
        assert num_tiles_of(offloader) == 2
    assert shapes == [(2, 8, HIDDEN)]


@pytest.mark.thorough
def test_an_intermediate_tensor_that_somebody_looks_at(caplog: pytest.LogCaptureFixture) -> None:
    """In OPT's layer the MLP is spread: what goes up is computed plainly for whoever needs it."""
    model = tiny_model("opt")
    layers: Any = model.model.decoder.layers
    expected = gradients(model)

    class Looking(nn.Module):
        def forward(self, hidden: Any) -> Tensor:
            assert hidden.max() < 1e9
            return F.relu(hidden)

    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)):
        layers[1].activation_fn = Looking()
        found = gradients(model)
    assert_close(found, expected)
    assert "is needed for max" in caplog.text


class CodedLinear(nn.Linear):
    """Weights of 8 bits, decoded for each call, as in quantised bases."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__(own.in_features, own.out_features, bias=False)
        self.scale = own.weight.detach().abs().amax() / 127
        codes = (own.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


@pytest.mark.thorough
def test_quantised_bases() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, CodedLinear(getattr(layer.mlp, name)))
    expected = gradients(model)
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        found = gradients(model)
        assert num_tiles_of(offloader) == 2, offloader.describe()
    assert_close(found, expected)


# ---- memory, and recordings of steps -----------------------------------------------------------------


def _transient_bytes(tiles: int | str, num_tokens: int = 4096) -> int:
    """Return what an MLP's forward and backward take beside input, output and gradients."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.models.llama.modeling_llama import LlamaMLP

    from hf_pyao.model.tiles.sliced import run_in_slices
    from hf_pyao.plan.options.tile_plan import plan_tiles
    from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode

    hidden_size, inner_size = 256, 1024
    with FakeTensorMode() as fake_mode:
        mlp = LlamaMLP(LlamaConfig(hidden_size=hidden_size, intermediate_size=inner_size))
        mlp.requires_grad_(False)
        hidden = torch.empty(1, num_tokens, hidden_size, requires_grad=True)
        ledger = MemoryLedger()
        ledger.note([hidden, *mlp.parameters()])
        before = ledger.live_bytes
        with NotingMode(ledger, fake_mode):
            plan = plan_tiles(num_tokens, tiles, 0, 0)
            output = run_in_slices(mlp.forward, (hidden,), list, plan)
            forward = ledger.peak_bytes
            grad = torch.empty_like(output)
            (found,) = torch.autograd.grad(output, hidden, grad)
        apart = sum(t.numel() * t.element_size() for t in (output, grad, found))
        assert forward <= ledger.peak_bytes
        return ledger.peak_bytes - before - apart


@pytest.mark.thorough
@pytest.mark.parametrize("tiles", [2, 8, 32])
def test_the_transient_is_that_of_one_tile(tiles: int) -> None:
    whole = _transient_bytes(1)
    parts = _transient_bytes(tiles)
    assert whole > 4 * 4096 * 1024 * 4  # gate, up, activation, product
    assert parts <= (1 / tiles + 0.05) * whole


@pytest.mark.thorough
def test_recordings_of_steps_run_the_tiles() -> None:
    from hf_pyao.auto.recording.model_copy import CopiedStep
    from hf_pyao.auto.recording.seen_forward import seen_forward

    model = tiny_model("llama", intermediate_size=64 * HIDDEN)
    seen = seen_forward((), dict(tiny_batch(size=4, length=64)))
    peaks = {}
    for tiles in ("off", 2, 16):
        recorded, _ = record_fake_step(CopiedStep(model, seen), levers=Levers(mlp_tiles=tiles))
        program = recorded.whole()
        flops = sum(each.flops * each.num_runs for each in program.operations)
        peaks[tiles] = (_peak_bytes(program), flops)
    assert peaks[16][0] < peaks[2][0] < peaks["off"][0]
    mlp_flops = NUM_LAYERS * 3 * 2 * 4 * 64 * HIDDEN * 64 * HIDDEN
    again = mlp_flops * 2 / 3  # forward once more, but for the last of three products
    assert peaks[2][1] - peaks["off"][1] == pytest.approx(again, rel=0.05)
    assert peaks[16][1] == pytest.approx(peaks[2][1], rel=0.01)


def _peak_bytes(program: StepProgram) -> int:
    return predict(program, [False] * len(program.slots), window_bytes=None).peak_bytes


# ---- ways to shard and to compile that are left alone -----------------------------------------------


def test_parameters_that_zero_3_partitions_are_left_alone() -> None:
    model = tiny_model("llama")
    for weight in model.parameters():
        weight.ds_id = 0
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        assert offloader.mlp_tiles is not None and offloader.mlp_tiles.num_tiled == 0
        assert "ZeRO-3" in offloader.describe()


@pytest.mark.thorough
def test_a_layer_that_is_compiled_as_a_whole_is_left_alone() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
        assert offloader.mlp_tiles is not None and offloader.mlp_tiles.num_tiled == 0
        assert "compile its MLP alone" in offloader.describe()


@pytest.mark.thorough
def test_attached_inside_of_autocast() -> None:
    """Autocast keeps casts of weights: those of the proof's tensors are none of them."""
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model)
        with attach(model, PyAOConfig(**OFF, mlp_tiles=2)) as offloader:
            found = gradients(model)
            assert num_tiles_of(offloader) == 2
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name
