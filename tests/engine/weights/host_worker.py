"""One process that loads a model, streams it and trains: ``-m tests.engine.weights.host_worker``.

Arguments: the folder of the model, the file for what was seen. The kernel counts the process's
memory, which tells masters, activations and anything forgotten alike.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode

MIB = 2**20
ACTIVATIONS_BYTES = 48 * MIB
"""Of the host budget, what the masters leave for activations."""


def resident_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def forget_peak() -> int:
    """Let the kernel count the peak anew; return the bytes now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def step(model: Any, batch: torch.Tensor) -> float:
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    small = torch.ones(4, requires_grad=True)
    small.square().sum().backward()  # what is set up once
    before = forget_peak()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    budget_bytes = frozen_bytes + ACTIVATIONS_BYTES
    config = PyAOConfig(
        stream_weights=0,
        policy="all",
        min_bytes=0,
        window=2 * MIB,
        keep_last_layers=0,
        host_memory_gib=budget_bytes / 2**30,
    )
    offloader: Any = attach(model, config)
    loaded_peak = resident_bytes("VmHWM") - before
    masters = {block.memory.untyped_storage()._cdata for block in offloader.weights.blocks}
    ledger = MemoryLedger(
        lambda storage: offloader.link.tiers.owns(storage) or storage._cdata in masters
    )
    batch = torch.randint(3, 1000, (1, 512), generator=torch.Generator().manual_seed(0))
    losses = [step(model, batch)]  # pages of the allocator, and the pool
    forget_peak()
    ledger.note([*model.parameters(), *model.buffers(), batch])
    with NotingMode(ledger):
        losses.append(step(model, batch))
    trained_peak = resident_bytes("VmHWM") - before
    facts = {
        "stored_bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
        "loaded_peak_bytes": loaded_peak,
        "trained_peak_bytes": trained_peak,
        "device_peak_bytes": ledger.peak_bytes,
        "budget_bytes": budget_bytes,
        "masters_bytes": offloader.weights.nbytes,
        "offloaded_bytes": offloader.metrics()["offloaded_bytes"],
        "kept_bytes": offloader.metrics().get("kept_bytes"),
        "losses": losses,
    }
    output.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
