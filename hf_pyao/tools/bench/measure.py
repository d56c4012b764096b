"""Measures one method: one compared step, warm-up, timed steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hf_pyao.plan.documents.bench import BenchRow, StepTimes
from hf_pyao.tools.bench.checksum import GradientDigest, GradientSink
from hf_pyao.tools.bench.memory import DeviceMemory, HostMemory
from hf_pyao.tools.bench.methods import Installed, find_method
from hf_pyao.tools.bench.models import make_batch
from hf_pyao.tools.bench.pack_clock import PackClock
from hf_pyao.tools.bench.setup import BenchSetup, Trial


class Bench:
    """A model on its device, ready to be measured with one method after another.

    Args:
        model: from :func:`~hf_pyao.tools.bench.models.build_model`; no method leaves a trace in it.
        setup: what all trials have in common.
        device: where the model is.
    """

    def __init__(self, model: Any, setup: BenchSetup, device: torch.device) -> None:
        self.model = model
        self.setup = setup
        self.device = device
        self.memory = DeviceMemory(device)
        self.host = HostMemory(device)
        self._ballast = torch.empty(
            int(setup.ballast_gib * 2**30), dtype=torch.uint8, device=device
        )

    def measure(self, trial: Trial) -> BenchRow:
        """Measure *trial*'s method at its micro-batch.

        Raises:
            MethodUnavailable: the method cannot run here.
            torch.OutOfMemoryError: the micro-batch does not fit.
        """
        method = find_method(trial.method)
        self.host.reset_peaks()
        rss_bytes = self.host.rss_bytes()
        start_bytes = self.memory.allocated_bytes()
        batch = make_batch(self.model, self.setup, trial.micro_batch, self.device)
        with self.installed(trial.method) as (installed, sink):
            compared = self._compared_step(installed, sink, batch)
            after_forward_bytes = None
            for _ in range(self.setup.num_warmup):
                after_forward_bytes = self._step(installed, batch)
            self.memory.reset_peaks()
            with _pack_clock(installed, trial) as clock:
                times_ms = [self._timed_step(installed, batch) for _ in range(self.setup.num_steps)]
            step = StepTimes.of(times_ms, self.setup.num_warmup)
            tokens = trial.micro_batch * self.setup.sequence_length
            peak_rss_bytes = self.host.peak_rss_bytes()
            peak_bytes = self.memory.peak_allocated_bytes()
            reserved_bytes = self.memory.peak_reserved_bytes()
            return BenchRow(
                method=trial.method,
                label=method.label,
                micro_batch=trial.micro_batch,
                step=step,
                tokens_per_s=tokens / step.median_ms * 1e3,
                start_allocated_bytes=start_bytes,
                after_forward_bytes=_difference(after_forward_bytes, start_bytes),
                peak_allocated_bytes=peak_bytes,
                peak_reserved_bytes=reserved_bytes,
                peak_rss_bytes=peak_rss_bytes,
                rss_growth_bytes=_difference(peak_rss_bytes, rss_bytes),
                pinned_bytes=self.host.pinned_bytes(),
                metrics=installed.metrics() | _pack_time(clock, self.setup.num_steps),
                **(compared | self.further_fields(installed, batch)),
            )

    def further_fields(self, installed: Installed, batch: dict[str, Any]) -> dict[str, Any]:
        """Return further fields of the row, measured behind the timed steps: none."""
        return {}

    def try_steps(self, trial: Trial, num_steps: int = 2) -> None:
        """Run a few steps, to see whether they fit.

        Raises:
            MethodUnavailable: the method cannot run here.
            torch.OutOfMemoryError: the micro-batch does not fit.
        """
        batch = make_batch(self.model, self.setup, trial.micro_batch, self.device)
        with self.installed(trial.method) as (installed, _):
            for _ in range(num_steps):
                self._step(installed, batch)
            self.memory.synchronize()

    def clean(self, *, keep_pinned: bool = False) -> None:
        """Leave the model as it was, and give unused memory back.

        With *keep_pinned* torch keeps pinned memory for the next to ask: pinning is slow.
        """
        self.model.zero_grad(set_to_none=True)
        self.memory.release_caches(keep_pinned=keep_pinned)

    @contextmanager
    def installed(self, method: str) -> Iterator[tuple[Installed, GradientSink]]:
        """Install *method*, and take it off again."""
        sink = GradientSink(self.model, release=self.setup.gradients == "release")
        try:
            with find_method(method).install(self.model, self.device) as installed:
                yield installed, sink
        finally:
            sink.close()
            self.model.zero_grad(set_to_none=True)

    def _compared_step(
        self,
        installed: Installed,
        sink: GradientSink,
        batch: dict[str, Any],
    ) -> dict[str, Any]:
        """Run the step whose loss and gradients are compared; return them as a row's fields.

        Every method starts it from the same seed, and on deterministic kernels, so that equal
        results are equal bit for bit.
        """
        digest = GradientDigest()
        sink.digest = digest
        torch.manual_seed(self.setup.seed)
        try:
            with deterministic(self.device):
                loss = self.forward_and_backward(installed, batch)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            return {"reason": f"not compared: {str(error).splitlines()[0]}"}
        finally:
            sink.digest = None
            self.model.zero_grad(set_to_none=True)
        return {
            "loss": loss.item(),
            "gradient_norm": digest.norm(),
            "gradient_digest": digest.hexdigest(),
        }

    def forward_and_backward(
        self,
        installed: Installed,
        batch: dict[str, Any],
        between: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Run a step and return its loss; the gradients are in ``.grad``.

        *between* is called after its forward, where the method tells them apart.
        """
        with installed.step():
            if installed.run is not None:
                return installed.run(batch)
            loss = self._loss(batch)
            between()
            torch.autograd.backward(loss)
        return loss

    def _step(self, installed: Installed, batch: dict[str, Any]) -> int | None:
        """Run forward and backward; return the device memory between them, if it was told."""
        allocated_bytes: list[int | None] = [None]

        def read_memory() -> None:
            self.memory.synchronize()
            allocated_bytes[0] = self.memory.allocated_bytes()

        self.forward_and_backward(installed, batch, read_memory)
        self.model.zero_grad(set_to_none=True)
        return allocated_bytes[0]

    def _timed_step(self, installed: Installed, batch: dict[str, Any]) -> float:
        """Run forward and backward on a drained device; return the time in milliseconds."""
        self.memory.synchronize()
        start = time.perf_counter()
        self.forward_and_backward(installed, batch)
        self.memory.synchronize()
        elapsed_ms = (time.perf_counter() - start) * 1e3
        self.model.zero_grad(set_to_none=True)
        return elapsed_ms

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.setup.autocast is not None:
            autocast = torch.autocast(self.device.type, getattr(torch, self.setup.autocast))
        with autocast:
            # The other outputs (the logits) go at once, as in Trainer.compute_loss.
            loss: torch.Tensor = self.model(**batch).loss
        return loss


def _pack_clock(installed: Installed, trial: Trial) -> AbstractContextManager[PackClock | None]:
    if installed.engine is None or not trial.times_packs:
        return nullcontext()
    return PackClock(installed.engine)


def _pack_time(clock: PackClock | None, num_steps: int) -> dict[str, float]:
    return {} if clock is None else {"pack_ms": clock.elapsed_ms / num_steps}


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels alone on an accelerator; those of a CPU are so by themselves."""
    if device.type == "cpu":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    # Not warn_only: attention kernels would then choose their faster, non-deterministic form.
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


def _difference(value: int | None, base: int | None) -> int | None:
    return None if value is None or base is None else value - base
