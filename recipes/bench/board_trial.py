"""What the board measures beside ``pyao bench``: values of gradients, and the memory of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from hf_pyao.plan.documents.bench import REFERENCE, BenchRow
from hf_pyao.tools.bench import worker
from hf_pyao.tools.bench.measure import Bench, deterministic
from hf_pyao.tools.bench.memory import DeviceMemory
from hf_pyao.tools.bench.models import make_batch
from hf_pyao.tools.bench.peers import Installed
from hf_pyao.tools.bench.setup import BenchSetup, Trial

Gradients = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class OtherAlgorithm(Installed):
    """A method whose step is no forward and its backward: it has no gradients to compare."""

    algorithm: str = ""
    """What the step is."""
    device_weight_bytes: int | None = None
    """Weights on the device over a step."""


def serve(connection: Connection, setup: BenchSetup, trials: Sequence[Trial]) -> None:
    """Measure *trials* for the board, as the harness's own ``serve``."""
    worker.serve(connection, setup, trials, BoardBench)


class BoardBench(Bench):
    """A bench that compares each method's gradients with those of the model without it."""

    _expected: Gradients | None = None

    def measure(self, trial: Trial) -> BenchRow:
        """Measure *trial*'s method, after the gradients without it."""
        batch = make_batch(self.model, self.setup, trial.micro_batch, self.device)
        with self.installed(REFERENCE) as (nothing, _):
            self._expected = self._gradients(nothing, batch)
        return super().measure(trial)

    def further_fields(self, installed: Installed, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the memory of a step, and by how much its gradients differ."""
        found: dict[str, Any] = {
            "step_peak_bytes": peak_of_step(
                self.device, lambda: self.forward_and_backward(installed, batch)
            )
        }
        self.model.zero_grad(set_to_none=True)
        if isinstance(installed, OtherAlgorithm):
            return found | {
                "algorithm": installed.algorithm,
                "device_weight_bytes": installed.device_weight_bytes,
                "gradient_norm": None,
                "gradient_digest": None,
            }
        gradients = self._gradients(installed, batch)
        if gradients is not None and self._expected is not None:
            found["gradient_error"] = largest_error(gradients, self._expected)
        return found

    def _gradients(self, installed: Installed, batch: dict[str, Any]) -> Gradients | None:
        """Return what a step leaves in ``.grad``, by name, in host memory.

        None where an operation of it has no deterministic kernel.
        """
        torch.manual_seed(self.setup.seed)
        try:
            with deterministic(self.device):
                self.forward_and_backward(installed, batch)
            return {
                name: parameter.grad.to("cpu", copy=True)
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            }
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            return None
        finally:
            self.model.zero_grad(set_to_none=True)


def peak_of_step(device: torch.device, run: Callable[[], object]) -> int | None:
    """Run *run*; return the most bytes that were allocated in it above those before it.

    On an accelerator these are the caching allocator's own figures. A CPU's allocator keeps none:
    there torch's profiler writes down each allocation and each release. It sees all tensors of the
    process, whoever made them, in forward and in backward, compiled or not. Memory that torch does
    not allocate is not among them, nor is the release of what was allocated before *run*.

    Returns:
        Bytes; None where the device's allocator tells none.
    """
    if device.type == "cpu":
        return _peak_on_a_cpu(run)
    memory = DeviceMemory(device)
    memory.synchronize()
    before_bytes = memory.allocated_bytes()
    memory.reset_peaks()
    run()
    memory.synchronize()
    peak_bytes = memory.peak_allocated_bytes()
    return None if peak_bytes is None or before_bytes is None else peak_bytes - before_bytes


def _peak_on_a_cpu(run: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    allocations = [event for event in results.events() if event.name() == "[memory]"]
    held_bytes = peak_bytes = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def largest_error(gradients: Gradients, expected: Gradients) -> float:
    """Return the largest relative error of a gradient in the Euclidean norm; 0 if all bits agree.

    A gradient that is missing, or that nobody expects, is wholly wrong: 1.
    """
    worst = 0.0
    for name in {*gradients, *expected}:
        if name not in gradients or name not in expected:
            return 1.0
        right = expected[name].double()
        difference = (gradients[name].cpu().double() - right).norm()
        size = float(right.norm())
        worst = max(worst, float(difference) / size if size else float(difference != 0))
    return worst
