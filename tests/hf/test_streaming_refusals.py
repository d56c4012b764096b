"""Inputs with which weights cannot be streamed: one clear error each, before data is prepared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import HfArgumentParser, PretrainedConfig, PreTrainedModel

from hf_pyao import (
    PyAOConfig,
    PyAOPlugin,
    PyAOTrainer,
    PyAOTrainerMixin,
    PyAOTrainingArguments,
    attach,
)
from hf_pyao.errors import ConfigError, ConflictError, PyAOError
from tests.helpers import tiny_model
from tests.helpers.adapters import tiny_lora
from tests.hf.test_streamed_weights import is_streamed
from tests.test_ranks import process_group

HOST_GIB = 0.1


class Untouched(torch.utils.data.Dataset[Any]):
    """Data that no one may ask for."""

    def __len__(self) -> int:
        raise AssertionError("data was prepared")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("data was prepared")


class Unmapped(PreTrainedModel):
    """A model without decoder layers that anyone knows."""

    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def compiled() -> nn.Module:
    model = tiny_lora("llama")
    model._compiled_call_impl = lambda *_: None  # as `model.compile()` leaves it
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unknown word": (tiny_lora, {"stream_weights": "some"}, "stream_weights.*'some'"),
    "negative": (tiny_lora, {"stream_weights": -1}, "stream_weights.*-1"),
    "no layers": (Unmapped, {}, "layers"),
    "everything trainable": (lambda: tiny_model("llama"), {}, "no layer has frozen weights"),
    "no room": (tiny_lora, {"host_memory_gib": 1e-6}, r"take 0\.\d+ GiB.*room for 0\.000 GiB"),
    "no room for embeddings": (
        tiny_lora,
        {"stream_weights": 99, "stream_embeddings": "on", "host_memory_gib": 1e-6},
        "weights of 0 layers, embeddings and head .* stream_embeddings='off'",
    ),
    "no bytes": (lambda: tiny_lora("llama").to("meta"), {}, "meta device"),
    "compiled": (compiled, {}, "is compiled"),
}


def by_config(model: nn.Module, settings: dict[str, Any], folder: Path, **more: Any) -> None:
    config = PyAOConfig(**settings)
    args = PyAOTrainingArguments(**arguments(folder), activation_offload=True, **more)
    PyAOTrainer(model=model, args=args, train_dataset=Untouched(), pyao_config=config)


def by_flags(model: nn.Module, settings: dict[str, Any], folder: Path, **more: Any) -> None:
    values = {**arguments(folder), "activation_offload": True, **more}
    values |= {f"activation_offload_{name}": value for name, value in settings.items()}
    line = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    (args,) = HfArgumentParser(PyAOTrainingArguments).parse_args_into_dataclasses(line)
    PyAOTrainer(model=model, args=args, train_dataset=Untouched())


def by_plugin(model: nn.Module, settings: dict[str, Any], folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    PyAOPlugin(**settings).bind(accelerator)
    try:
        accelerator.prepare(model)
    finally:
        accelerator.free_memory()


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", [by_config, by_flags, by_plugin])
def test_it_is_refused_before_data_is_prepared(way: Any, case: str, tmp_path: Path) -> None:
    make, settings, message = CASES[case]
    model = make()
    pointers = [p.data_ptr() for p in model.parameters() if not p.is_meta]
    settings = {"stream_weights": 0, "host_memory_gib": HOST_GIB, "policy": "all", **settings}
    with pytest.raises((PyAOError, ValueError), match=f"(?s){message}") as refused:
        way(model, settings, tmp_path)
    assert len(str(refused.value)) < 900
    assert not is_streamed(model)
    assert pointers == [p.data_ptr() for p in model.parameters() if not p.is_meta]
    if isinstance(refused.value, ConfigError) and way is by_flags:
        assert "activation_offload_stream_weights" in str(refused.value)


@pytest.mark.parametrize("way", [by_config, by_flags])
def test_engines_that_have_the_weights_are_refused(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"stream_weights": 0, "host_memory_gib": HOST_GIB}
    with pytest.raises(PyAOError, match="FSDP"):
        way(tiny_lora("llama"), settings, tmp_path, fsdp="full_shard")
    model = tiny_lora("llama")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PyAOError, match="FSDP"):
        way(model, settings, tmp_path)


def test_the_plugin_refuses_fsdp_before_anything_is_moved() -> None:
    """On a CPU Accelerate ignores its FSDP plugin, so it is put where a launch would have it."""
    accelerator = Accelerator(cpu=True)
    model = tiny_lora("llama")
    PyAOPlugin(stream_weights=0, host_memory_gib=HOST_GIB).bind(accelerator)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    accelerator.state.distributed_type = "FSDP"
    with pytest.raises(PyAOError, match="FSDP"):
        accelerator.prepare(model)
    assert not is_streamed(model)


def test_trl_s_own_adapters_are_checked_with_what_they_will_freeze(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="its trainer is refused")
    peft = pytest.importorskip("peft")
    ours = type("Ours", (PyAOTrainerMixin, trl.SFTTrainer), {})
    for settings, message in (
        ({"host_memory_gib": 1e-6}, "room for 0.000 GiB"),
        ({"host_memory_gib": HOST_GIB, "layers": ("nowhere",)}, "nowhere"),
    ):
        config = PyAOConfig(stream_weights=0, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TRL's own arguments
            args = trl.SFTConfig(**arguments(tmp_path), bf16=False)
        with pytest.raises(PyAOError, match=message):
            ours(
                model=tiny_model("llama"),
                args=args,
                train_dataset=Untouched(),
                peft_config=peft.LoraConfig(r=2, target_modules="all-linear"),
                pyao_config=config,
            )


def test_units_of_fsdp_2_are_named() -> None:
    """Their parameters are DTensors, as those of tensor parallelism are."""
    model = tiny_lora("llama")
    with process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
        with pytest.raises(ConflictError, match="by FSDP2"):
            attach(model, PyAOConfig(stream_weights=0))
