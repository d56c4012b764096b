"""Host memory of streamed weights: by the kernel's count, and by the slabs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import HostPool
from hf_pyao.engine.stores.mapped_files import MappedFiles
from tests.engine.weights.test_streaming import llama, ring_of, streamed
from tests.helpers import tiny_batch, train
from tests.helpers.quantised import quantise_
from tests.helpers.ranks import REPOSITORY

MIB = 2**20
ELSEWHERE_BYTES = 48 * MIB
"""Libraries that load late, threads, workspaces of products."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ---- by the kernel's count -----------------------------------------------------------------------


def save_model(folder: Path, num_layers: int) -> None:
    """Save a model of 25 MiB a layer, in bfloat16."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    model.save_pretrained(folder)


@on_linux
@pytest.mark.thorough
def test_loading_and_training_stay_within_the_stored_bytes_and_the_budget(tmp_path: Path) -> None:
    save_model(tmp_path, 14)
    output = tmp_path / "facts.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
        # What is freed goes back to the system, so that the kernel's count is of what is in use.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    module = "tests.engine.weights.host_worker"
    done = subprocess.run(
        [sys.executable, "-m", module, tmp_path, output],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(output.read_text())
    stored_bytes = facts["stored_bytes"]
    assert stored_bytes > 300 * MIB
    assert facts["masters_bytes"] > 0.9 * stored_bytes
    assert facts["loaded_peak_bytes"] <= 1.05 * stored_bytes
    allowed_bytes = facts["device_peak_bytes"] + facts["budget_bytes"] + ELSEWHERE_BYTES
    assert facts["trained_peak_bytes"] <= allowed_bytes
    assert facts["offloaded_bytes"] > 0
    assert 3 * facts["device_peak_bytes"] <= stored_bytes, "weights are three times the device"
    assert facts["losses"] == facts["resident_losses"]
    assert facts["losses"][0] != facts["losses"][1]
    assert facts["adapters_are_equal"]


@on_linux
def test_pages_of_a_file_are_let_go_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    content = torch.arange(2 * MIB, dtype=torch.int32)
    content.numpy().tofile(path)
    os.sync()  # pages that are not written yet cannot be let go
    mapped = torch.from_file(str(path), shared=False, size=content.numel(), dtype=torch.int32)
    own = torch.ones(MIB)
    files = MappedFiles()
    assert int(mapped.sum()) == int(content.sum())
    before = pages_of(path)
    files.let_go(mapped[MIB:])
    files.let_go(own)
    assert pages_of(path) <= before - 3.5 * MIB
    assert torch.equal(mapped, content)
    mapped[-1] = 7  # a page of this process's own, which must not be lost
    files.let_go(mapped)
    assert mapped[-1] == 7
    assert own.sum() == MIB


def pages_of(path: Path) -> int:
    """Return the bytes of a mapped file that are in this process's memory, by the kernel."""
    nbytes, is_meant = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            is_meant = line.endswith(str(path))
        elif is_meant and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) * 1024
    return nbytes


def test_where_the_system_says_nothing_of_mappings_nothing_is_let_go(tmp_path: Path) -> None:
    tensor = torch.ones(MIB)
    MappedFiles(tmp_path).let_go(tensor)
    assert tensor.sum() == MIB


# ---- by the slabs --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "nested nf4", "int8"])
def test_the_weights_of_a_layer_are_one_slab_of_their_size(kind: str) -> None:
    if kind in ("float32", "bfloat16"):
        model: Any = llama(dtype=getattr(torch, kind))
    else:
        pytest.importorskip("bitsandbytes")
        model = llama(hidden_size=64, intermediate_size=128)
        model = quantise_(model, kind)
        model.requires_grad_(False)
        model.base_model.model.lm_head.weight.requires_grad_()
    with streamed(model) as offloader:
        for block in ring_of(offloader).blocks:
            assert block.memory is not None
            storage = block.memory.untyped_storage()
            masters = [p for weight in block.weights if (p := weight.ref()) is not None]
            assert len(masters) > 3
            assert {p.untyped_storage()._cdata for p in masters} == {storage._cdata}
            needed = sum(p.nbytes for p in masters)
            assert needed <= storage.nbytes() <= needed + 512 * len(masters)


class CountingPool(HostPool):
    """Notes the most bytes that were reserved at a time, of slabs and of whatever else."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, pin=False)
        self.budget_bytes = capacity_bytes
        self.exact_bytes = 0
        self.most_bytes = 0
        source: Any = self._source
        for name in ("reserve", "reserve_exactly"):
            setattr(source, name, self._counted(getattr(source, name), name))

    def _counted(self, own: Any, name: str) -> Any:
        def reserve(*args: int) -> torch.Tensor | None:
            memory: torch.Tensor | None = own(*args)
            if memory is not None:
                self.exact_bytes += memory.untyped_storage().nbytes()
                self.most_bytes = max(self.most_bytes, self.exact_bytes)
            return memory

        return reserve


def test_the_budget_covers_masters_and_activations_together() -> None:
    needed = streamed_bytes()
    for spare in (0, 4_096, 20_000, 2**16):
        pool = CountingPool(needed + spare)
        model = llama()
        config = PyAOConfig(policy="all", min_bytes=0, keep_last_layers=0, stream_weights=0)
        with attach(model, config, host_pool=pool) as offloader:
            train(model, [[tiny_batch(0)]])
            assert pool.most_bytes <= pool.budget_bytes
            assert pool.most_bytes >= needed
            assert (offloader.totals()["offloaded_bytes"] > 0) == (spare > 0)


def streamed_bytes() -> int:
    with streamed(llama()) as offloader:
        assert offloader.weights is not None
        return offloader.weights.nbytes
