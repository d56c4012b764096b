"""What can be asked for on the command line, and what is refused."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig

from hf_pyao.errors import ConfigError
from hf_pyao.tools.bench.arguments import SMOKE_MODEL
from hf_pyao.tools.bench.memory import DeviceMemory, HostMemory, pick_device
from hf_pyao.tools.bench.models import build_model, free_memory, make_batch
from hf_pyao.tools.bench.setup import BenchSetup
from hf_pyao.tools.estimate.model_specs import parse_model

SPEC = parse_model(SMOKE_MODEL)


def test_a_model_by_the_config_in_a_folder(tmp_path: Path) -> None:
    LlamaConfig(**SPEC.settings).save_pretrained(tmp_path / "mine")
    spec = parse_model(str(tmp_path / "mine"))
    assert spec.name == "mine"
    model = build_model(
        BenchSetup(model=spec, dtype="float32", sequence_length=16), torch.device("cpu")
    )
    assert model.config.hidden_size == 32


def test_the_cause_of_a_refused_configuration_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("Error of a check:\n  ValueError: 7 is odd.\n  More.")
    monkeypatch.setattr("transformers.AutoConfig.for_model", Mock(side_effect=error))
    assert "Error of a check: ValueError: 7 is odd. Give" in refusal("opt:hidden_size=7")


def refusal(model: str, **changes: Any) -> str:
    """Build *model*, and return the error that says why it cannot be."""
    setup = BenchSetup(model=parse_model(model), **{"sequence_length": 16, **changes})
    with pytest.raises(ConfigError) as refused:
        build_model(setup, torch.device("cpu"))
    return str(refused.value)


def test_an_unknown_setting_is_refused_before_the_default_model_is_built() -> None:
    message = refusal("llama:hiden_size=8,num_hidden_layers=1")
    assert "unknown setting of llama 'hiden_size'; did you mean 'hidden_size'?" in message
    assert "num_hidden_layers" in message
    assert "output_attentions" not in message, "that is every model's, and no size"


@pytest.mark.parametrize("setting", ["rope_theta=5e3", "dtype=float32"])
def test_settings_that_a_config_turns_into_others_are_known(setting: str) -> None:
    setup = BenchSetup(model=parse_model(f"{SMOKE_MODEL},{setting}"), sequence_length=16)
    assert build_model(setup, torch.device("cpu")).training


@pytest.mark.thorough
def test_weights_beyond_the_free_memory_are_refused_unbuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda value: built.append("built") or seed(value))
    monkeypatch.setattr("hf_pyao.tools.bench.models.available_host_bytes", lambda: 12 * 2**30)
    message = refusal("llama:num_attention_heads=32")  # the 7B model that transformers defaults to
    assert "its weights in bfloat16 are 12.6 GiB, and host memory has 12.0 GiB free" in message
    assert built == []


def test_a_device_has_its_free_memory_or_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    driver = SimpleNamespace(mem_get_info=lambda device: (3 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)
    capped = BenchSetup(model=SPEC, memory_cap_gib=2.0)
    assert free_memory(BenchSetup(model=SPEC), device) == (3 * 2**30, "cuda:0")
    assert free_memory(capped, device) == (2 * 2**30, "cuda:0")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert free_memory(BenchSetup(model=SPEC), device) == (None, "cuda:0")


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sequence length is 65, and .* has 64 positions"):
        build_model(BenchSetup(model=SPEC, sequence_length=65), torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat"}, r"unknown dtype 'bfloat'; did you mean 'bfloat16'\?"),
        ({"gradients": "drop"}, "unknown gradients mode 'drop'"),
        ({"sequence_length": 1}, "sequence_length is 1; expected 2 or more"),
        ({"memory_cap_gib": 0.0}, "memory_cap_gib is 0.0; expected more than 0 GiB"),
    ],
)
def test_a_bad_setup_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSetup(**{"model": SPEC, **change})


def test_weights_and_data_follow_the_seed() -> None:
    cpu = torch.device("cpu")
    setups = [
        BenchSetup(model=SPEC, dtype="float32", sequence_length=16, seed=seed) for seed in (1, 1, 2)
    ]
    models = [build_model(setup, cpu) for setup in setups]
    batches = [
        make_batch(model, setup, 2, cpu) for model, setup in zip(models, setups, strict=True)
    ]
    same, other = (
        [torch.equal(models[0].lm_head.weight, models[i].lm_head.weight) for i in (1, 2)],
        [torch.equal(batches[0]["input_ids"], batches[i]["input_ids"]) for i in (1, 2)],
    )
    assert same == other == [True, False]
    assert models[0].training


@pytest.mark.parametrize("total_bytes", [None, 8 * 2**30])
def test_a_device_whose_allocator_takes_no_cap_is_refused_only_if_one_is_asked_for(
    total_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=total_bytes)
    driver = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)
    memory = DeviceMemory(torch.device("xpu", 0))
    memory.cap(None)
    with pytest.raises(ConfigError, match=r"memory_cap_gib is 1.0, .* of xpu:0 takes no cap. Drop"):
        memory.cap(1.0)


def test_a_cap_is_a_fraction_of_the_device_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[tuple[float, torch.device]] = []
    driver = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=8 * 2**30),
        set_per_process_memory_fraction=lambda *call: fractions.append(call),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: driver)
    device = torch.device("cuda", 1)
    memory = DeviceMemory(device)
    for cap_gib in (2.0, 16.0, None):
        memory.cap(cap_gib)
    assert fractions == [(0.25, device), (1.0, device), (1.0, device)]


def test_host_memory_grows_by_what_is_touched() -> None:
    host = HostMemory(torch.device("cpu"))
    before = host.rss_bytes()
    assert before is not None
    host.reset_peaks()
    block = mmap.mmap(-1, 64 * 2**20)  # an allocator may hand out pages that were touched before
    block.write(b"1" * len(block))
    peak = host.peak_rss_bytes()
    assert peak is not None
    assert peak - before > 0.8 * len(block)
    block.close()
    assert host.pinned_bytes() is None


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device is 'cuda', and torch finds none here"):
        pick_device("cuda")
    with pytest.raises(ConfigError, match="device is 'gpu'; expected auto, cpu, cuda"):
        pick_device("gpu")


def test_unified_memory_is_no_device_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert pick_device("auto") == torch.device("cpu")
