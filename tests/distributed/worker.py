"""One rank: runs every scenario of a group with and without hf_pyao and writes what it saw as JSON.

Called as ``python -m tests.distributed.worker FOLDER GROUP`` with RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.audit import RecogniserAudit, bytes_of
from tests.distributed.models import batch_of, layers_of
from tests.distributed.scenarios import GROUPS, Scenario
from tests.distributed.trainer import train
from tests.distributed.wrapping import Prepared, full_parameters, local_gradients, prepare
from tests.helpers.ranks import ends_at_once, join_group, write_result

NUM_STEPS = 2


@dataclass
class Run:
    """What one training run gave."""

    losses: list[torch.Tensor] = field(default_factory=list)
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Gradients of each step; for the Trainer, the final parameters."""
    facts: dict[str, Any] = field(default_factory=dict)


def run(scenario: Scenario, audit: RecogniserAudit | None) -> Run:
    """Train; with hf_pyao, and watched by *audit*, if there is one."""
    if scenario.wrapper == "trainer":
        return Run(*train(scenario, audit))
    prepared = prepare(scenario, offload=audit is not None)
    outcome = Run()
    for step in range(NUM_STEPS):
        if audit is not None:
            audit.learn(full_parameters(prepared.model))
        torch.manual_seed(10 * step + dist.get_rank())
        outcome.losses += one_step(prepared, scenario, step)
        outcome.tensors.append(local_gradients(prepared.model))
        prepared.optimizer.step()
        prepared.optimizer.zero_grad()
    outcome.facts = facts_of(prepared, scenario)
    return outcome


def one_step(prepared: Prepared, scenario: Scenario, step: int) -> list[torch.Tensor]:
    """Compute the gradients of one optimizer step; return the losses of its forwards."""

    def forward(index: int) -> torch.Tensor:
        with prepared.autocast():
            loss: torch.Tensor = prepared.model(**batch_of(dist.get_rank(), index)).loss
        return loss

    losses: list[torch.Tensor] = []
    if scenario.option == "two_forwards":
        losses = [forward(2 * step), forward(2 * step + 1)]
        prepared.backward(losses[0] + 2 * losses[1])
    elif scenario.option == "accumulate":
        for index in range(2):
            with contextlib.nullcontext() if index else prepared.accumulate():
                losses.append(forward(2 * step + index))
                prepared.backward(losses[-1])
    else:
        losses = [forward(step)]
        prepared.backward(losses[0])
    return [loss.detach().clone() for loss in losses]


def facts_of(prepared: Prepared, scenario: Scenario) -> dict[str, Any]:
    """Return what proves that the wrapping took place, and what the engine is left with."""
    parents = {child: parent for parent in prepared.model.modules() for child in parent.children()}
    layers = layers_of(prepared.model, scenario.model)
    facts: dict[str, Any] = {
        "model_class": type(prepared.model).__name__,
        "layer_classes": sorted({type(layer).__name__ for layer in layers}),
        "layer_parents": sorted({type(parents[layer]).__name__ for layer in layers}),
        "world_size": dist.get_world_size(),
    }
    if prepared.offloader is not None:
        facts["metrics"] = prepared.offloader.metrics()
        facts["busy_host_bytes"] = prepared.offloader.host_pool.settle()
    return facts


def compare(scenario: Scenario, reference: Run) -> dict[str, Any]:
    """Run *scenario* with hf_pyao and say how it differs from *reference*."""
    audit = RecogniserAudit()
    with audit.watching():
        outcome = run(scenario, audit)
    pairs = zip(reference.tensors, outcome.tensors, strict=True)
    return {
        **outcome.facts,
        "losses": [loss.item() for loss in reference.losses],
        "offloading_losses": [loss.item() for loss in outcome.losses],
        "num_tensors": sum(map(len, reference.tensors)),
        "digest": digest_of(outcome.tensors),
        "different": [
            f"{name} of step {step}"
            for step, (left, right) in enumerate(pairs)
            for name in sorted(left.keys() | right.keys())
            if not _is_equal(left.get(name), right.get(name))
        ],
        **audit.findings(),
    }


def digest_of(tensors: list[dict[str, torch.Tensor]]) -> str:
    """Return a hash over the bits of all *tensors*."""
    digest = hashlib.sha256()
    for group in tensors:
        for name in sorted(group):
            digest.update(bytes_of(group[name]))
    return digest.hexdigest()


def _is_equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)


def main(folder: Path, group: str) -> None:
    """Run the scenarios of *group*; a failing one is written down and the next one runs."""
    join_group(folder, timeout_s=60)
    results: dict[str, Any] = {}
    references: dict[Scenario, Run] = {}
    for scenario in GROUPS[group]:
        start = time.perf_counter()
        try:
            if scenario.reference not in references:
                references[scenario.reference] = run(scenario.reference, None)
            results[scenario.name] = compare(scenario, references[scenario.reference])
        except Exception:  # the other scenarios still tell something
            results[scenario.name] = {"error": traceback.format_exc()}
        results[scenario.name]["seconds"] = time.perf_counter() - start
    write_result(folder, results)
    dist.barrier()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    with ends_at_once():
        main(Path(sys.argv[1]), sys.argv[2])
