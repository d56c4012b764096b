"""``PyAOConfig.layers``: which modules it names; and the advice for models without known layers."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_pyao
from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.errors import ConfigError, ConflictError, NoLayersFoundError
from hf_pyao.model.map import architectures
from hf_pyao.model.map.module_map import find_layers
from tests.helpers import EVERYTHING, assert_same_tensors, gradients_of, tiny_batch, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # Funnel in transformers 4.57.
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning"),
]


@pytest.fixture(autouse=True)
def _forget_registered_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_registered_maps", {})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Net(nn.Module):
    """Single blocks, a list, a list of lists, and one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Block()
        self.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
        self.first = Block()
        self.alias = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("first", "stages.*.*", "last"), "first stages.0.0 stages.0.1 stages.1.0 last"),
        (("last", "first"), "last first"),
        (("stages.1.0", "stages.*.0"), "stages.1.0 stages.0.0"),
        (("stages.[0].?",), "stages.0.0 stages.0.1"),
        (("alias",), "alias"),
        (("first", "alias"), "first"),
        (("stages.*.*.inner",), "stages.0.0.inner stages.0.1.inner stages.1.0.inner"),
    ],
)
def test_names_and_patterns(patterns: tuple[str, ...], names: str) -> None:
    model = Net()
    found = find_layers(model, patterns)
    assert [fqn for fqn, _ in found.layers] == names.split()
    assert all(model.get_submodule(fqn) is layer for fqn, layer in found.layers)
    assert found.stack is model


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        (("frist",), NoLayersFoundError, r"'frist', .*no module of Net; did you mean 'first'"),
        (("stages.*.5",), NoLayersFoundError, r"of 3 components: stages.0.0, stages.0.1"),
        (("stage.*",), NoLayersFoundError, r"did you mean 'stages.[01]'\? Names of 2 components"),
        (("first", "lsat"), ConfigError, r"'lsat', which matches no module .*mean 'last'"),
        (("stages",), ConfigError, r"'stages', a ModuleList: .* Write 'stages.\*'"),
        (("stages.*",), ConfigError, r"'stages.0', a ModuleList: .* Write 'stages.0.\*'"),
        (("first.inner", "first"), ConfigError, r"'first.inner' and 'first', one of which"),
        (("alias", "first.inner"), ConfigError, r"'first.inner' and 'alias', one of which"),
    ],
)
def test_what_cannot_be_layers(
    patterns: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_layers(Net(), patterns)


def test_roles_of_a_map_hold_where_the_named_layers_are_its_own() -> None:
    model, roles = tiny_model("llama"), {"act": ("mlp.act_fn",)}
    register_module_map("llama", ModuleMap(layers=("layers",), roles=roles))
    some = find_layers(model, ("model.layers.0", "model.layers.2"))
    assert some.all_roles == find_layers(model).all_roles == roles
    assert "act" not in find_layers(model, ("model.layers.*.mlp",)).all_roles
    config = dataclasses.replace(
        EVERYTHING, layers=("model.layers.0",), policy="modules", modules=("act",)
    )
    with attach(model, dataclasses.replace(config, keep_last_layers=0)) as offloader:
        model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0


def test_a_part_that_is_attached_is_not_attached_again() -> None:
    model = tiny_model("bart")
    encoder = ("model.encoder.layers.*",)
    with attach(model, dataclasses.replace(EVERYTHING, layers=encoder)) as offloader:
        with pytest.raises(ConflictError, match="or a part of it, is attached already"):
            attach(model, EVERYTHING)
        with pytest.raises(ConflictError, match="or other layers"):
            attach(model.model.encoder, EVERYTHING)  # type: ignore[union-attr, arg-type]
        assert attach(model, offloader.config) is offloader
    with attach(model.model.encoder, EVERYTHING):  # type: ignore[union-attr, arg-type]
        with pytest.raises(ConflictError, match="is attached already"):
            attach(model, EVERYTHING)
        # Another part has nothing to do with it.
        attach(model.model.decoder, EVERYTHING).detach()  # type: ignore[union-attr, arg-type]


# ---- the advice ----------------------------------------------------------------------------------

TINY: dict[str, Any] = {"vocab_size": 64}


def funnel() -> nn.Module:
    config = transformers.FunnelConfig(
        **TINY, block_sizes=[1, 2], d_model=16, n_head=2, d_head=8, d_inner=32, num_decoder_layers=1
    )
    return transformers.FunnelForMaskedLM(config)


def squeezebert() -> nn.Module:
    groups = ("q", "k", "v", "post_attention", "intermediate", "output")
    config = transformers.SqueezeBertConfig(
        **TINY,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        **{f"{name}_groups": 1 for name in groups},
    )
    return transformers.SqueezeBertForMaskedLM(config)


def xlm() -> nn.Module:
    config = transformers.XLMConfig(**TINY, emb_dim=16, n_layers=2, n_heads=2)
    return transformers.XLMWithLMHeadModel(config)


# None of these has layers of transformers' class. Funnel keeps them in lists of lists, XLM
# in one list for each part of a layer.
WITHOUT_KNOWN_LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "funnel": (funnel, 4),
    "xlm": (xlm, 4),
}
"""Name -> model, and how many layers the advice leads to."""


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**tiny_batch(length=12)).loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("name", WITHOUT_KNOWN_LAYERS)
def test_the_advice_works_when_it_is_pasted(name: str) -> None:
    make, num_layers = WITHOUT_KNOWN_LAYERS[name]
    torch.manual_seed(0)
    model = make().train()
    with pytest.raises(NoLayersFoundError) as error:
        attach(model)
    text = str(error.value)
    expected = gradients(copy.deepcopy(model))

    (advised,) = re.findall(r"^  (PyAOConfig\(.*\))$", text, re.MULTILINE)
    layers = eval(advised, {"PyAOConfig": PyAOConfig}).layers
    configs = [dataclasses.replace(EVERYTHING, layers=layers)]
    code = re.findall(r"^  (from hf_pyao .*|register_module_map.*)$", text, re.MULTILINE)
    exec("\n".join(code), {})
    configs.append(EVERYTHING)
    for config in configs:
        ours = copy.deepcopy(model)
        with attach(ours, config) as offloader:
            assert len(offloader.layer_names) == num_layers
            assert_same_tensors(gradients(ours), expected, f"{name}, {config.layers}")
            metrics = offloader.metrics()
            assert offloader.totals()["num_micro_batches"] == 1
            assert metrics["offloaded_bytes"] > metrics["held_bytes"] > 0


def test_a_layer_run_by_its_forward_is_named_as_a_cause() -> None:
    """What the advice cannot foresee, the warning of an idle step tells."""
    model = squeezebert().train()
    config = dataclasses.replace(EVERYTHING, layers=("transformer.encoder.layers.*",))
    with attach(model, config) as offloader, pytest.MonkeyPatch.context() as patch:
        seen: list[str] = []
        patch.setattr("hf_pyao.no_effect.warn", lambda *given: seen.append(given[-1]))
        model(**tiny_batch()).loss.backward()
        offloader.warn_if_idle()
    (text,) = seen
    assert "it may run `layer.forward` itself" in text
    assert "PyAOConfig(layers=...)" in text


def test_lists_in_the_lists_of_a_map_hold_the_layers() -> None:
    register_module_map("Net", ModuleMap(layers=("stages",)))
    found = find_layers(Net())
    assert [fqn for fqn, _ in found.layers] == ["stages.0.0", "stages.0.1", "stages.1.0"]


def test_the_example_in_the_documentation_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", hf_pyao.register_module_map.__doc__ or "", re.S)
    namespace: dict[str, Any] = {}
    exec(re.sub(r"^    ", "", code, flags=re.M), namespace)
    offloader = namespace["offloader"]
    assert offloader.metrics()["offloaded_bytes"] > 0
    assert not offloader.is_attached
