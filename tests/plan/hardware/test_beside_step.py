"""Memory beside a step, against what torch itself allocates where a CPU can tell."""

from __future__ import annotations

import pytest
import torch

from hf_pyao.plan.hardware.beside_step import (
    FOR_LOOP,
    FOREACH,
    FUSED,
    blas_workspace_bytes,
    ddp_buckets,
    implementation_of,
    optimizer_requests,
    zero_bucket,
)
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.predict.optimizer_step import requested_bytes
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode

ADA, HOPPER = KernelSettings(46, 89), KernelSettings(132, 90)
SHAPES = ((300, 70), (64, 64), (1000, 3), (5,))


def test_cublas_takes_8_mib_and_a_bit_and_32_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert blas_workspace_bytes(ADA) == 2 * 4096 * 1024 + 8 * 16 * 1024 == 8_519_680
    assert blas_workspace_bytes(HOPPER) == 2**25
    assert blas_workspace_bytes(ADA, ":16:8") == 8 * 16 * 1024
    assert blas_workspace_bytes(ADA, ":4096:2:16:8") == 8_519_680
    settled = ADA._replace(is_deterministic=True)
    assert blas_workspace_bytes(settled) == 8 * 4096 * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert blas_workspace_bytes(settled) == 8 * 16 * 1024


def test_buckets() -> None:
    assert ddp_buckets(100, is_view=False).nbytes == 100
    assert ddp_buckets(100, is_view=True).nbytes == 0
    assert zero_bucket().nbytes == 10**9
    assert zero_bucket(4, 10, overlaps=True).nbytes == 80


def peak_beside(optimizer: torch.optim.Optimizer) -> int:
    """Return what a step of *optimizer* makes at once, its states being there."""
    optimizer.step()
    ledger = MemoryLedger()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [p.grad for p in held]
    held += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    ledger.note(held)
    before = ledger.live_bytes
    with NotingMode(ledger):
        optimizer.step()
    return ledger.peak_bytes - before


def trained() -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for each in found:
        each.grad = torch.ones_like(each)
    return found


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("implementation", [FOREACH, FOR_LOOP, FUSED])
@pytest.mark.parametrize("name", ["adamw", "adam with decay", "sgd", "sgd with decay"])
def test_an_optimizers_step_makes_what_the_table_has(implementation: str, name: str) -> None:
    parameters = trained()
    how = {"foreach": implementation == FOREACH, "fused": implementation == FUSED}
    has_moments, decays = name.startswith("adam"), "decay" in name
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, **how)
    elif has_moments:
        optimizer = torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1, **how)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1 * decays, **how)
    requests = optimizer_requests(
        [each.nbytes for each in parameters],
        implementation,
        has_moments=has_moments,
        decays_gradients=decays,
    )
    expected = requested_bytes(requests)
    assert sum(each > 0 for each in requests) == sum(each < 0 for each in requests)
    scalars = 8 * 8 * len(SHAPES)  # numbers of steps, learning rates
    assert expected <= peak_beside(optimizer) <= expected + scalars


def test_a_live_optimizer_is_foreach_on_cuda_unless_it_says_otherwise() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = trained()
    assert implementation_of(torch.optim.Adam(parameters)) == FOREACH
    assert implementation_of(torch.optim.Adam(parameters, fused=True)) == FUSED
    assert implementation_of(torch.optim.AdamW(parameters, foreach=False)) == FOR_LOOP
    assert implementation_of(Own(parameters)) == FUSED, "what is not torch's is not known"
