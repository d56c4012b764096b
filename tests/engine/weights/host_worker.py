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
from hf_pyao.plan.step.resizes import sees_resizes

MIB = 2**20
ACTIVATIONS_BYTES = 96 * MIB
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


def loaded(folder: Path) -> Any:
    """Return the model with new adapters, the same each time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()


def step(model: Any, batch: torch.Tensor) -> float:
    """Train for a step; return the loss."""
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    with torch.no_grad():
        for adapter in adapters(model):
            assert adapter.grad is not None
            adapter.sub_(adapter.grad, alpha=0.1)
            adapter.grad = None
    return float(loss.detach())


def adapters(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batch = torch.randint(3, 1000, (1, 128), generator=torch.Generator().manual_seed(0))
    facts, trained = streamed(folder, batch)
    resident = loaded(folder)
    facts["resident_losses"] = [step(resident, batch) for _ in facts["losses"]]
    facts["adapters_are_equal"] = all(map(torch.equal, trained, adapters(resident)))
    output.write_text(json.dumps(facts), encoding="utf-8")


def streamed(folder: Path, batch: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train with streamed weights; return what was counted, and the trained adapters."""
    small = torch.ones(4, requires_grad=True)
    small.square().sum().backward()  # what is set up once
    before = forget_peak()
    model = loaded(folder)
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
    with attach(model, config) as offloader:
        assert offloader.weights is not None
        loaded_peak = resident_bytes("VmHWM") - before
        blocks = offloader.weights.blocks
        masters = {b.memory.untyped_storage()._cdata for b in blocks if b.memory is not None}
        tiers = offloader.link.tiers
        ledger = MemoryLedger(lambda storage: tiers.owns(storage) or storage._cdata in masters)
        losses = [step(model, batch)]  # pages of the allocator, and the pool
        forget_peak()
        ledger.note([*model.parameters(), *model.buffers(), batch])
        with sees_resizes(ledger.resized), NotingMode(ledger):
            losses.append(step(model, batch))
        facts = {
            "stored_bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
            "loaded_peak_bytes": loaded_peak,
            "trained_peak_bytes": resident_bytes("VmHWM") - before,
            "device_peak_bytes": ledger.peak_bytes,
            "budget_bytes": budget_bytes,
            "masters_bytes": offloader.weights.nbytes,
            "offloaded_bytes": offloader.metrics()["offloaded_bytes"],
            "losses": losses,
        }
    return facts, [adapter.detach().clone() for adapter in adapters(model)]


if __name__ == "__main__":
    main()
