"""One of two ranks that train under FSDP2 with policy auto, case by case.

Called as ``python -m tests.distributed.sharded_worker RANK FOLDER CASE...``.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto import performer
from hf_pyao.auto.offloader import Offloader
from hf_pyao.config import GIB
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.plan.step.resizes import sees_resizes
from hf_pyao.training_engines import local_part
from tests.distributed.audit import RecogniserAudit
from tests.distributed.models import batch_of, build_model, layers_of
from tests.distributed.wrapping import full_parameters
from tests.helpers.ranks import CountedDevice, ends_at_once, join_group, slots_of, write_result

NUM_MEASURED = 2
NUM_STEPS = 20
NUM_COUNTED = 2
"""Steps whose counts are compared. Threads of gloo let go of a collective's tensors when they come to
it, so that a count may be of one buffer too many: the lower one is taken. Without a plan to wait for,
half of the steps are counted."""
NUM_TRACKED = 6
"""How often torch's tracker counts, of which the lowest is taken too."""
LARGER_AT = 7
"""The step from which on rank 0 has batches twice as large, where batches differ."""

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "mixed precision": ({"mp_policy": HALF}, {}),
    "shards on the host": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "resident": ({"reshard_after_forward": False}, {}),
    "no recomputation": ({"mp_policy": HALF}, {"checkpoint_every": 0}),
    "chunked loss": ({"mp_policy": HALF}, {"head_loss": "chunked"}),
    "segments": ({"mp_policy": HALF}, {"checkpoint_every": 1}),
    "batches differ": ({}, {}),
    "the other's batches are larger": ({}, {}),
}
"""By name: arguments of ``fully_shard``, and fields of the configuration."""

LARGER_ON = {"batches differ": 0, "the other's batches are larger": 1}
"""The rank whose batches get larger; the first makes the plans."""

NUM_LATER_STEPS = 6
"""Until another plan is followed: it is heard of, made, proposed, answered and decided on."""

CAPS_KIB = {
    **dict.fromkeys(("plain", "shards on the host", *LARGER_ON), 420),
    "resident": 480,
}
"""Least limits of the device under which a plan offloads or recomputes something."""


def cap_kib(case: str) -> int:
    """Return the limit; with more ranks the parts of parameters that each has are smaller."""
    return CAPS_KIB.get(case, 250) - (30 if dist.get_world_size() > 2 else 0)


def batch(case: str, step: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch of this rank: no two are equal, and some ranks have longer ones."""
    found = batch_of(dist.get_rank(), step)
    if step >= LARGER_AT and dist.get_rank() == LARGER_ON.get(case):
        found = {name: torch.cat([value, value]) for name, value in found.items()}
    return {**found, "use_cache": False}  # type: ignore[dict-item]


def shard(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    for layer in layers_of(model, "llama"):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    layers = layers_of(model, "llama")
    assert len(layers) == 3
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    return model


def step_of(model: nn.Module, step: int, batch: dict[str, torch.Tensor]) -> list[Any]:
    """Train one step; return the loss."""
    torch.manual_seed(step)
    outputs = model(**batch)
    outputs.loss.backward()
    return [outputs.loss.detach().clone()]


def bits_of(model: nn.Module, loss: list[Any]) -> list[Any]:
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    return [each.clone() for each in (*loss, *gradients)]


def counted(
    case: str, model: nn.Module, step: int, device: CountedDevice, offloader: Offloader | None
) -> tuple[int, list[Any]]:
    """Train one step; return the most bytes that were on the device, and the bits."""
    given = batch(case, step)
    ledger = MemoryLedger(None if offloader is None else offloader.link.tiers.owns)
    ledger.note([local_part(each) for each in (*model.parameters(), *model.buffers())])
    with NotingMode(ledger), sees_resizes(ledger.resized), device.counts(ledger):
        loss = step_of(model, step, given)
    return ledger.peak_bytes, bits_of(model, loss)


def tracked(case: str, model: nn.Module) -> int:
    """Return the peak of a plain step that torch's own tracker counts."""
    model.zero_grad()
    tracker, given = FSDPMemTracker(model), batch(case, 0)
    with tracker:
        step_of(model, 0, given)
    peak: Any = tracker.get_tracker_snapshot("peak")
    return max(int(each["Total"]) for each in peak.values())


def num_steps(case: str) -> int:
    return NUM_STEPS + NUM_LATER_STEPS * (LARGER_ON.get(case) == 1)


def train(case: str, config: PyAOConfig | None) -> dict[str, Any]:
    """Train some steps; return what they gave, with hf_pyao if there is a configuration."""
    model = shard(build_model("llama", "full", ""), CASES[case][0])
    offloader = None if config is None else attach(model, config)
    audit = RecogniserAudit()
    found: dict[str, Any] = {}
    device = CountedDevice()
    with (
        audit.watching() if offloader is not None else contextlib.nullcontext(),
        mock.patch.object(performer, "find_off", return_value=None),  # no clock decides here
        mock.patch.object(performer, "loses", return_value=None),
    ):
        if offloader is not None:
            audit.learn(full_parameters(model))
        bits = []
        for step in range(num_steps(case)):
            model.zero_grad()
            run: Callable[[], tuple[int, list[Any]]] = partial(
                counted, case, model, step, device, offloader
            )
            nbytes, newest = run()
            if step >= (NUM_STEPS // 2 if offloader is None else num_steps(case) - NUM_COUNTED):
                found["counted"] = min(nbytes, found.get("counted", nbytes))
            bits.append(newest)
    if offloader is None:
        found["tracked"] = min(tracked(case, model) for _ in range(NUM_TRACKED))
    else:
        plan = offloader.plan
        assert offloader.auto is not None
        found |= {
            "summary": offloader.auto.summary,
            "plan": slots_of(plan),
            "levers": None if plan is None else plan.levers,
            "window": None if plan is None else plan.facts.window_bytes,
            "elements": None if plan is None else plan.facts.num_elements,
            "predicted": None if plan is None else plan.facts.peak_bytes,
            "unpredicted": offloader.auto.report()["plan"]["figures"]["unpredicted_bytes"],
            "changes": [
                [each["forward"], each["to"]] for each in offloader.auto.report()["transitions"]
            ],
            **audit.findings(),
        }
        offloader.detach()
    return found | {"bits": bits}


def compare(case: str) -> dict[str, Any]:
    settings = {
        "policy": "auto",
        "profile_steps": NUM_MEASURED,
        "min_bytes": 0,
        "host_memory_gib": 0.25,
        "device_memory_gib": cap_kib(case) * 1024 / GIB,
        **CASES[case][1],
    }
    chunked = settings["head_loss"] if "head_loss" in settings else None
    reference: PyAOConfig | None = None
    if chunked:  # which has bits of its own: it is compared with the same loss and no offloading
        reference = PyAOConfig(policy="off", head_loss=chunked)
    plain = train_reference(case, reference)
    planned = train(case, PyAOConfig(**settings))
    bits = plain.pop("bits"), planned.pop("bits")
    different = [
        step
        for step, (left, right) in enumerate(zip(*bits, strict=True))
        if len(left) != len(right) or not all(map(torch.equal, left, right))
    ]
    return {"plain": plain, "planned": planned, "different": different, "num": len(bits[0][0])}


def train_reference(case: str, config: PyAOConfig | None) -> dict[str, Any]:
    """Train without plans; with nothing but a head loss, if that is given."""
    if config is None:
        return train(case, None)
    model = shard(build_model("llama", "full", ""), CASES[case][0])
    with attach(model, config):
        bits = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            bits.append(bits_of(model, step_of(model, step, batch(case, step))))
    return {"bits": bits}


def main(folder: Path, cases: list[str]) -> None:
    join_group(folder)
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case] = compare(case)
        except Exception:
            found[case] = {"error": traceback.format_exc()}
    write_result(folder, found)
    dist.barrier()


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), sys.argv[2:])
