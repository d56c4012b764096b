"""Which modules are the layers of a model, and what their parts are called."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_pyao.errors import ConfigError, ConflictError, NoLayersFoundError
from hf_pyao.model.map import architectures
from hf_pyao.model.map.architectures import ModuleMap, register_module_map
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.module_roles import resolve_selections, role_of_submodules
from hf_pyao.model.map.wrappers import named_submodules, unwrap_model
from tests.model.map.models import GATED, HEADS, HIDDEN, INTERMEDIATE, build

pytestmark = [
    # torch (in torch.compile) and transformers (gpt_bigcode) import modules that use a deprecated
    # decorator of torch; PEFT 0.21 reads a name that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


# model_type, path of each stack and its number of layers, class of the stack
ARCHITECTURES: tuple[tuple[str, dict[str, int], str], ...] = (
    ("opt", {"model.decoder.layers": 2}, "OPTDecoder"),
    ("gpt2", {"transformer.h": 2}, "GPT2Model"),
    ("gpt_bigcode", {"transformer.h": 2}, "GPTBigCodeModel"),
    ("llama", {"model.layers": 2}, "LlamaModel"),
    ("mistral", {"model.layers": 2}, "MistralModel"),
    ("qwen2", {"model.layers": 2}, "Qwen2Model"),
    ("qwen3", {"model.layers": 2}, "Qwen3Model"),
    ("gemma", {"model.layers": 2}, "GemmaModel"),
    ("granite", {"model.layers": 2}, "GraniteModel"),
    ("phi3", {"model.layers": 2}, "Phi3Model"),
    ("gpt_neox", {"gpt_neox.layers": 2}, "GPTNeoXModel"),
    ("gemma2", {"model.layers": 2}, "Gemma2Model"),
    ("gemma3_text", {"model.layers": 2}, "Gemma3TextModel"),
    ("mixtral", {"model.layers": 2}, "MixtralModel"),
    ("qwen2_moe", {"model.layers": 2}, "Qwen2MoeModel"),
    ("olmo2", {"model.layers": 2}, "Olmo2Model"),
    ("cohere", {"model.layers": 2}, "CohereModel"),
    ("starcoder2", {"model.layers": 2}, "Starcoder2Model"),
    ("falcon", {"transformer.h": 2}, "FalconModel"),
    ("bloom", {"transformer.h": 2}, "BloomModel"),
    ("gptj", {"transformer.h": 2}, "GPTJModel"),
    ("bart", {"model.encoder.layers": 2, "model.decoder.layers": 3}, "BartModel"),
    ("t5", {"encoder.block": 2, "decoder.block": 2}, "T5ForConditionalGeneration"),
)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.mix(x))


class PlainModel(nn.Module):
    """A model that transformers never saw, with two lists and a uniform dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Identity()])
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(3))})
        self.side = nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.body["blocks"]:
            x = block(x)
        return self.heads[0](x)


@pytest.fixture(autouse=True)
def _forget_registered_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_registered_maps", {})


class TestArchitectures:
    @pytest.mark.parametrize(
        ("model_type", "stacks", "stack_class"),
        [pytest.param(*row, id=row[0]) for row in ARCHITECTURES],
    )
    def test_layers_and_stack(
        self, model_type: str, stacks: dict[str, int], stack_class: str
    ) -> None:
        model = build(model_type)
        found = find_layers(model)
        expected = [f"{path}.{index}" for path, num in stacks.items() for index in range(num)]
        assert [fqn for fqn, _ in found.layers] == expected
        assert all(model.get_submodule(fqn) is layer for fqn, layer in found.layers)
        assert type(found.stack).__name__ == stack_class
        assert list(found.roles) == expected

    @pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama", "bart"])
    def test_base_model_without_head(self, model_type: str) -> None:
        model = build(model_type)
        inner = find_layers(model.base_model)  # type: ignore[arg-type]
        whole = find_layers(model)
        assert [layer for _, layer in inner.layers] == [layer for _, layer in whole.layers]
        assert inner.stack is whole.stack
        assert inner.layers[0][0].endswith(".0")

    @pytest.mark.parametrize("model_type", ["opt", "llama", "bart", "t5", "gemma2", "falcon"])
    def test_order_is_the_order_of_the_forward(self, model_type: str) -> None:
        model = build(model_type).eval()
        found = find_layers(model)
        called: list[str] = []
        for fqn, layer in found.layers:
            layer.register_forward_pre_hook(lambda *_, fqn=fqn: called.append(fqn))
        ids = torch.arange(3, 9).unsqueeze(0)
        extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            model(input_ids=ids, **extra)
        assert called == [fqn for fqn, _ in found.layers]

    def test_vision_tower_counts(self) -> None:
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "image_size": 16,
            "patch_size": 8,
            "projection_dim": HIDDEN,
        }
        config = transformers.LlavaConfig(
            vision_config=vision, text_config={"model_type": "llama", **GATED}, image_token_index=3
        )
        found = find_layers(transformers.LlavaForConditionalGeneration(config))
        kinds = [type(layer).__name__ for _, layer in found.layers]
        assert kinds == ["CLIPEncoderLayer", "LlamaDecoderLayer", "LlamaDecoderLayer"]
        assert type(found.stack).__name__ == "LlavaModel"
        assert found.how == "GradientCheckpointingLayer rule"

    def test_nested_checkpointing_layers_count_once(self) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        class Expert(GradientCheckpointingLayer):
            pass

        class Outer(GradientCheckpointingLayer):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList([Expert(), Expert()])

        shared = Outer()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = Outer()
                self.rest = nn.ModuleList([shared, shared, Outer()])
                self.again = nn.ModuleList([shared])

            def forward(self) -> None:
                pass

        found = find_layers(Model())
        assert [fqn for fqn, _ in found.layers] == ["first", "rest.0", "rest.2"]


class TestWrappers:
    def test_lora(self) -> None:
        base = build("opt")
        layers = [layer for _, layer in find_layers(base).layers]
        config = peft.LoraConfig(target_modules=["q_proj", "fc1"], r=2, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
        found = find_layers(model)
        assert unwrap_model(model) is base
        assert [layer for _, layer in found.layers] == layers
        assert found.layers[1][0] == "model.decoder.layers.1"
        roles = role_of_submodules(layers[0], found.roles_of("model.decoder.layers.0"))
        assert roles["self_attn.q_proj.base_layer"] == "qkv_linear"
        assert roles["self_attn.q_proj.lora_A.default"] == "qkv_linear"
        assert roles["fc1.lora_B.default"] == "mlp_up"
        assert roles["self_attn"] == "core_attn"

    @pytest.mark.thorough
    def test_compiled_parts_keep_plain_names(self) -> None:
        model = build("llama")
        plain = find_layers(model)
        names = [path for path, _ in named_submodules(plain.layers[0][1])]
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer)
        inner_stack = model.model
        model.model = torch.compile(model.model)
        found = find_layers(model)
        assert [fqn for fqn, _ in found.layers] == [fqn for fqn, _ in plain.layers]
        assert [layer for _, layer in found.layers] == list(inner_stack.layers)
        assert all(hasattr(layer, "_orig_mod") for _, layer in found.layers)
        assert found.stack is model.model is not inner_stack
        wrapped = [path for path, _ in named_submodules(found.layers[0][1])]
        assert wrapped == ["", *names]
        assert resolve_selections(["mlp_act"], found)["model.layers.0"] == {"mlp", "mlp.act_fn"}

    @pytest.mark.thorough
    @pytest.mark.parametrize(  # by map, and by the general rule
        ("model_type", "path"), [("gpt2", "transformer.h"), ("gemma2", "model.layers")]
    )
    def test_checkpoint_wrapper_is_the_layer(self, model_type: str, path: str) -> None:
        model = build(model_type)
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        # The order of the two wrappers is not ours to choose: the outer one is the layer.
        layers[0] = torch.compile(checkpoint_wrapper(layers[0]))
        layers[1] = checkpoint_wrapper(layers[1])
        found = find_layers(model)
        assert [layer for _, layer in found.layers] == list(layers)

    def test_deepspeed_engine_outside_compile_and_lora(self) -> None:

        class DeepSpeedEngine(nn.Module):
            __module__ = "deepspeed.runtime.engine"

            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module

        class PipelineLikeEngine(DeepSpeedEngine):
            __module__ = "deepspeed.runtime.other"

        base = build("llama")
        lora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
        assert unwrap_model(PipelineLikeEngine(torch.compile(lora))) is base

    def test_a_users_own_wrapper_of_the_same_name_is_left_alone(self) -> None:
        class PeftModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base_model = build("llama")

            def forward(self) -> None:
                pass

        model = PeftModel()
        assert unwrap_model(model) is model
        assert find_layers(model).layers[0][0] == "base_model.model.layers.0"

    def test_data_parallel_is_refused(self) -> None:
        # On a machine without a GPU DataParallel builds, and only forwards: enough here.
        model = nn.DataParallel(build("llama"))
        with pytest.raises(ConflictError, match="accelerate launch"):
            find_layers(model)
        with pytest.raises(ConflictError, match="CUDA_VISIBLE_DEVICES"):
            unwrap_model(torch.compile(model))

    @pytest.mark.distributed
    @pytest.mark.usefixtures("one_rank")
    def test_ddp_in_both_orders_with_compile(self) -> None:
        base = build("gpt2")
        ddp = nn.parallel.DistributedDataParallel(base)
        assert unwrap_model(torch.compile(ddp)) is base
        assert find_layers(ddp).layers[1][0] == "transformer.h.1"
        compiled = torch.compile(build("gpt2"))
        inner = compiled._orig_mod
        assert unwrap_model(nn.parallel.DistributedDataParallel(compiled)) is inner

    @pytest.mark.distributed
    @pytest.mark.usefixtures("one_rank")
    def test_fsdp1_wrapper_is_the_layer(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        base = build("opt")
        kind = type(find_layers(base).layers[0][1])
        model = FullyShardedDataParallel(
            base,
            auto_wrap_policy=ModuleWrapPolicy({kind}),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        found = find_layers(model)
        assert unwrap_model(model) is base
        assert [fqn for fqn, _ in found.layers] == [f"model.decoder.layers.{i}" for i in (0, 1)]
        assert all(isinstance(layer, FullyShardedDataParallel) for _, layer in found.layers)

    @pytest.mark.distributed
    @pytest.mark.usefixtures("one_rank")
    def test_fsdp2_renamed_classes(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        model = build("gemma2")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = find_layers(model)
        assert type(found.layers[0][1]).__name__ == "FSDPGemma2DecoderLayer"
        assert [fqn for fqn, _ in found.layers] == ["model.layers.0", "model.layers.1"]

        plain = PlainModel()
        for block in plain.body["blocks"]:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh)
        with pytest.raises(NoLayersFoundError, match=r"3 x Block") as error:
            find_layers(plain)
        assert "register_module_map('PlainModel'," in str(error.value)
        register_module_map("PlainModel", ModuleMap(layers=("body.blocks",)))
        assert len(find_layers(plain).layers) == 3


class TestRegistration:
    def test_error_shows_the_call_that_works(self) -> None:
        model = PlainModel()
        with pytest.raises(NoLayersFoundError) as error:
            find_layers(model)
        text = str(error.value)
        assert "  body.blocks: 3 x Block\n" in text
        assert "  heads: 2 x Linear, Identity\n" in text
        assert "  side: 2 x ReLU\n" in text
        call = error.value.message.splitlines()[-1].strip()
        assert call == "register_module_map('PlainModel', ModuleMap(layers=('body.blocks',)))"
        exec(call, {"register_module_map": register_module_map, "ModuleMap": ModuleMap})
        found = find_layers(model)
        assert [fqn for fqn, _ in found.layers] == [f"body.blocks.{i}" for i in range(3)]
        assert found.stack is model
        assert found.how == "explicit map for 'PlainModel'"
        assert found.all_roles == {}

    def test_sequential_of_layers_is_not_the_stack(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(Block(), Block())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.body:  # a hook on the Sequential would never fire
                    x = block(x)
                return x

        register_module_map("Net", ModuleMap(layers=("body",)))
        model = Net()
        found = find_layers(model)
        assert [fqn for fqn, _ in found.layers] == ["body.0", "body.1"]
        assert found.stack is model

    def test_no_list_at_all(self) -> None:
        with pytest.raises(NoLayersFoundError, match=r"put the repeated blocks .* ModuleList"):
            find_layers(nn.Sequential(Block(), Block()))

    def test_map_that_leads_nowhere(self) -> None:
        register_module_map("PlainModel", ModuleMap(layers=("block",)))
        with pytest.raises(NoLayersFoundError, match=r"paths \['block'\] of the explicit map"):
            find_layers(PlainModel())

    def test_suffix_matches_whole_components(self) -> None:
        register_module_map("PlainModel", ModuleMap(layers=("locks",)))
        with pytest.raises(NoLayersFoundError):
            find_layers(PlainModel())

    def test_subclass_and_class_name_win(self) -> None:
        class Derived(PlainModel):
            pass

        register_module_map("PlainModel", ModuleMap(layers=("body.blocks",)))
        assert len(find_layers(Derived()).layers) == 3
        register_module_map("Derived", ModuleMap(layers=("heads",)))
        assert [fqn for fqn, _ in find_layers(Derived()).layers] == ["heads.0", "heads.1"]

    def test_a_map_wins_over_what_is_inferred(self) -> None:
        register_module_map("llama", ModuleMap(layers=("layers",), roles={"all": ("mlp",)}))
        assert find_layers(build("llama")).all_roles == {"all": ("mlp",)}

    @pytest.mark.parametrize("architecture", ["", "  ", None, PlainModel])
    def test_bad_architecture(self, architecture: Any) -> None:
        with pytest.raises(ConfigError, match="model class name"):
            register_module_map(architecture, ModuleMap(layers=("h",)))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"layers": "decoder.layers"}, "expected a list or tuple"),
            ({"layers": ()}, "at least one path"),
            ({"layers": ("decoder.*",)}, "without wildcards"),
            ({"layers": ("h",), "roles": {"mlp_up": "mlp"}}, "expected a list or tuple"),
            ({"layers": ("h",), "roles": {"mlp.up": ("mlp",)}}, "no role name"),
            ({"layers": ("h",), "roles": [("mlp_up", ("mlp",))]}, "and a dict"),
            (
                {"layers": ("h",), "roles": {"mlp_up": ("mlp",), "mlp_act": ("mlp",)}},
                "'mlp_up' and 'mlp_act'",
            ),
            ({"layers": ("h",), "optional": ("mlp",)}, "belong to no role"),
        ],
    )
    def test_malformed_maps(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ModuleMap(**values)

    @pytest.mark.thorough
    def test_plain_models_need_no_transformers(self) -> None:
        code = (
            "import sys\n"
            "from torch import nn\n"
            "from hf_pyao.model.map.architectures import ModuleMap, register_module_map\n"
            "from hf_pyao.model.map.module_map import find_layers\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.h = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])\n"
            "register_module_map('Net', ModuleMap(layers=('h',)))\n"
            "assert len(find_layers(Net()).layers) == 2\n"
            "heavy = {'transformers', 'accelerate', 'peft', 'deepspeed'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr


def llama_with(**map_: Any) -> FoundLayers:
    """Find the layers of a Llama whose second one has no activation module, by a map of roles."""
    model = build("llama")
    del model.model.layers[1].mlp.act_fn  # as Liger's MLP
    register_module_map("llama", ModuleMap(layers=("layers",), **map_))
    return find_layers(model)


class TestRoles:
    @pytest.mark.parametrize(
        ("model_type", "role", "paths"),
        [
            ("opt", "core_attn", {"self_attn"}),
            ("gpt2", "core_attn", {"attn", "attn.attn_dropout"}),
            ("qwen3", "core_attn", {"self_attn", "self_attn.q_norm", "self_attn.k_norm"}),
        ],
    )
    def test_a_role_takes_what_no_other_role_claims(
        self, model_type: str, role: str, paths: set[str]
    ) -> None:
        found = find_layers(build(model_type))
        assert all(each == paths for each in resolve_selections([role], found).values())

    def test_missing_path_is_named(self) -> None:
        with pytest.raises(ConfigError) as error:
            llama_with(roles={"mlp_up": ("mlp.gate_proj", "mlp.up_prj")})
        text = str(error.value)
        for part in ("'model.layers.0'", "'mlp.up_prj'", "'mlp_up'", "did you mean 'mlp.up_proj'"):
            assert part in text

    def test_optional_path_may_be_missing(self) -> None:
        roles = {"mlp_act": ("mlp", "mlp.act_fn")}
        found = llama_with(roles=roles, optional=("mlp.act_fn",))
        assert found.roles_of("model.layers.0") == roles
        assert found.roles_of("model.layers.1") == {"mlp_act": ("mlp",)}
        with pytest.raises(ConfigError, match=r"'model.layers.1' has no sub-module 'mlp.act_fn'"):
            llama_with(roles=roles)

    @pytest.mark.parametrize("word_embed_proj_dim", [HIDDEN, 16])
    def test_opt_350m_style(self, word_embed_proj_dim: int) -> None:
        model = build("opt", do_layer_norm_before=False, word_embed_proj_dim=word_embed_proj_dim)
        assert find_layers(model).all_roles.keys() >= {"attn_norm", "mlp_norm", "mlp_act"}


def select(model_type: str, *names: str) -> frozenset[str]:
    """Return what *names* select in the first layer."""
    found = find_layers(build(model_type))
    return resolve_selections(names, found)[found.layers[0][0]]


class TestSelection:
    def test_path_takes_everything_below(self) -> None:
        below = {
            "mlp",
            *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
        }
        assert select("llama", "mlp") == below

    def test_wildcards_roles_and_paths_together(self) -> None:
        selected = select("llama", "self_attn.[qk]_proj", "mlp_norm")
        assert selected == {"self_attn.q_proj", "self_attn.k_proj", "post_attention_layernorm"}

    def test_star_is_the_whole_layer_and_dot_the_layer_itself(self) -> None:
        layer = find_layers(build("opt")).layers[0][1]
        assert select("opt", "*") == {path for path, _ in layer.named_modules()}
        assert select("opt", ".") == {""}

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("mlp_atc", ["did you mean 'mlp_act'", "Known roles: attn_norm,", "mlp.gate_proj"]),
            ("self_attn.qproj", ["did you mean 'self_attn.q_proj'"]),
            ("self_attn.z*", ["selects nothing", "self_attn.o_proj"]),
            ("model.layers.3.mlp", ["relative to a layer", "write 'mlp'"]),
            ("model.layers.*.self_attn.q_proj", ["write 'self_attn.q_proj'"]),
            ("moe_act", ["did you mean 'mlp_act'?", "mlp.gate_proj"]),
        ],
    )
    def test_unknown_names(self, name: str, parts: list[str]) -> None:
        with pytest.raises(ConfigError) as error:
            select("llama", "mlp_up", name)
        for part in (name, *parts):
            assert part in str(error.value)

    def test_layers_may_differ(self) -> None:
        found = find_layers(build("bart"))
        selected = resolve_selections(["encoder_attn", "fc1"], found)
        assert list(selected) == [fqn for fqn, _ in found.layers]
        assert selected["model.encoder.layers.0"] == {"fc1"}
        cross = {path for path in selected["model.decoder.layers.0"] if path != "fc1"}
        assert {path.split(".")[0] for path in cross} == {"encoder_attn"}
        with pytest.raises(ConfigError, match=r"any of the 5 layers; did you mean 'fc1'"):
            resolve_selections(["fc1", "fc11"], found)
