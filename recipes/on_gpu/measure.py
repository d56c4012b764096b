"""Measures rows on the device: builds the model, trains a few steps, returns figures by name."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.machine.states import Mode
from hf_pyao.auto.offloader import Offloader
from hf_pyao.tools.bench.checksum import GradientSink
from hf_pyao.tools.bench.memory import DeviceMemory, HostMemory, pick_device
from hf_pyao.tools.bench.methods import find_method
from hf_pyao.tools.bench.models import build_model, make_batch
from hf_pyao.tools.bench.setup import BenchSetup
from hf_pyao.tools.estimate.model_specs import parse_model
from on_gpu.rows import BUCKET_GIB, HOST_MEMORY_GIB, WAYS, Row

GIB = 2**30
MOST_WARMUP = 30
"""Micro-batches until a plan of ``auto`` has to stand."""

SETTLING_SAMPLES = 8
"""Micro-batch at which ``auto`` measures, where the row's own one is as large as a plan allows."""

UNSETTLED = (Mode.MEASURING, Mode.TIMING, Mode.LISTENING, Mode.RECORDING, Mode.CHECKING)
"""Modes in which a micro-batch is not yet what ``auto`` comes to."""

METRICS = (
    *("offloaded_bytes", "reloaded_bytes", "transfer_ms", "stall_forward_ms"),
    *("stall_backward_ms", "overlap_efficiency", "num_slots"),
)
"""Of hf_pyao's own figures, those that a row keeps."""

Figures = dict[str, Any]


class Lab:
    """A device, and the model that was built on it last."""

    def __init__(self, device: torch.device, *, is_smoke: bool = False) -> None:
        self.device = device
        self.is_smoke = is_smoke
        """Whether sizes are small, to try the program."""
        self.memory = DeviceMemory(device)
        self.host = HostMemory(device)
        self._built: tuple[tuple[Any, ...], Any] | None = None

    @classmethod
    def on(cls, device: str, *, is_smoke: bool) -> Lab:
        """Return the lab of the device called *device*, as ``pyao bench --device`` takes it."""
        torch.set_float32_matmul_precision("highest")  # float32 shall mean no TF32
        return cls(pick_device(device), is_smoke=is_smoke)

    def model(self, row: Row) -> Any:
        """Return *row*'s model with random weights, built on the device, in training mode."""
        if self._built is None or self._built[0] != row.setup:
            self.drop_model()
            setup = BenchSetup(model=parse_model(row.model), dtype=row.dtype, sequence_length=2)
            model = build_model(setup, self.device)
            if row.lora_rank is not None:
                model = _with_adapters(model, row.lora_rank)
            self._built = (row.setup, model)
        return self._built[1]

    def drop_model(self) -> None:
        """Let go of the model, and of the device's memory."""
        self._built = None
        self.clean()

    def clean(self) -> None:
        """Give back what nobody uses; pinned memory is kept, as pinning takes long."""
        self.memory.release_caches(keep_pinned=True)

    def finish(self) -> None:
        """Wait until the device has done everything."""
        self.memory.synchronize()


def _with_adapters(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def measure(row: Row, lab: Lab) -> Figures:
    """Return what *row* takes: times in ms, memory in bytes.

    Raises:
        MethodUnavailable: what it compares with cannot run here.
        torch.OutOfMemoryError: it does not fit.
    """
    model = lab.model(row)
    lab.memory.cap(row.cap_gib)
    ballast_bytes = int((row.ballast_gib + BUCKET_GIB * (row.engine == "zero2")) * GIB)
    if lab.is_smoke:
        ballast_bytes = 0
    ballast = torch.empty(ballast_bytes, dtype=torch.uint8, device=lab.device)
    lab.host.reset_peaks()
    way = WAYS[row.way]
    try:
        with attention_of(row.attention), _Training(row, model, lab) as training:
            return training.figures()
    finally:
        del ballast
        model.zero_grad(set_to_none=True)
        if row.way.endswith("streamed"):
            del model
            lab.drop_model()  # its weights are on the host now
        if way.settings is None and way.peer not in ("none", "checkpoint"):
            lab.memory.release_caches()  # pinned by others, in sizes that nobody asks for again
        lab.memory.cap(None)


class _Training:
    """A model with a way to train installed on it."""

    def __init__(self, row: Row, model: Any, lab: Lab) -> None:
        self.row = row
        self.model = model
        self.lab = lab
        shape = BenchSetup(model=parse_model(row.model), sequence_length=row.tokens)
        self.batch = make_batch(model, shape, row.micro_batch, lab.device)
        self._stack = contextlib.ExitStack()
        self.offloader: Offloader | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def __enter__(self) -> _Training:
        """Install it."""
        with self._stack:
            way = WAYS[self.row.way]
            install = find_method(way.peer).install
            self._installed = self._stack.enter_context(install(self.model, self.lab.device))
            if way.settings is not None:
                config = config_of(self.row)
                self.offloader = self._stack.enter_context(
                    attach(self.model, config, device=self.lab.device)
                )
            releases = self.row.engine == "zero2"
            self._stack.callback(GradientSink(self.model, release=releases).close)
            if self.row.engine == "adamw":
                trained = [each for each in self.model.parameters() if each.requires_grad]
                is_fused = self.lab.device.type == "cuda"
                self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=is_fused)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Take it off."""
        self.optimizer = None
        self._stack.__exit__(None, None, None)

    def figures(self) -> Figures:
        """Warm up, time steps, and return what they took."""
        row, memory = self.row, self.lab.memory
        warmups_ms: list[float] = []
        full, is_large = self.batch, row.cap_gib is not None and row.way.startswith("auto")
        if is_large:  # everything is offloaded until there is a plan, which need not fit in full
            self.batch = {key: value[:SETTLING_SAMPLES] for key, value in full.items()}
        while len(warmups_ms) < row.num_warmup or (
            not self._has_settled() and len(warmups_ms) < MOST_WARMUP
        ):
            warmups_ms.append(self._timed())
        if is_large:  # its first forward plans for it
            self.batch = full
            warmups_ms += [self._timed() for _ in range(row.num_warmup)]
        before_bytes = memory.allocated_bytes()
        memory.reset_peaks()
        retries = _num_alloc_retries(self.lab.device)
        times_ms = [self._timed() for _ in range(row.num_steps)]
        peak_bytes, reserved_bytes = memory.peak_allocated_bytes(), memory.peak_reserved_bytes()
        step_ms = statistics.median(times_ms)
        found: Figures = {
            "step_ms": step_ms,
            "fastest_ms": min(times_ms),
            "slowest_ms": max(times_ms),
            "tokens_per_s": row.micro_batch * row.tokens / step_ms * 1e3,
            "allocated_bytes": peak_bytes,
            "reserved_bytes": reserved_bytes,
            "growth_bytes": _difference(peak_bytes, before_bytes),
            "after_forward_bytes": self._after_forward_bytes(),
            "pinned_bytes": _pinned_bytes(self.lab.device),
            "num_alloc_retries": _num_alloc_retries(self.lab.device) - retries,
            "rss_bytes": self.lab.host.rss_bytes(),
            "num_warmup": len(warmups_ms),
            "longest_warmup_ms": max(warmups_ms, default=None),
        }
        if self.offloader is None:
            return found | dict(self._installed.metrics())
        metrics = self.offloader.metrics()
        auto = self.offloader.auto
        ring = None if self.offloader.weights is None else self.offloader.weights.ring
        return found | {
            **{key: metrics[key] for key in METRICS if key in metrics},
            "num_uploads": None if ring is None else ring.num_uploads,
            "mode": None if auto is None else auto.driver.state.mode.name.lower(),
            "described": self.offloader.describe(),
        }

    def _has_settled(self) -> bool:
        auto = None if self.offloader is None else self.offloader.auto
        return auto is None or auto.driver.state.mode not in UNSETTLED

    def _timed(self) -> float:
        self.lab.finish()
        start = time.perf_counter()
        self._step()
        self.lab.finish()
        return (time.perf_counter() - start) * 1e3

    def _step(self, between: Callable[[], None] = lambda: None) -> None:
        with self._installed.step():
            # Logits live on during backward, as in a loop by hand, and as is predicted.
            outputs = self.model(**self.batch, use_cache=False)
            between()
            outputs.loss.backward()
            del outputs
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def _after_forward_bytes(self) -> int | None:
        """Return what a forward leaves on the device, once its copies are done."""
        found: list[int | None] = []

        def read() -> None:
            self.lab.finish()
            found.append(self.lab.memory.allocated_bytes())

        before_bytes = self.lab.memory.allocated_bytes()
        if self.row.part != "M" or before_bytes is None:
            return None  # a step more, which only these rows need
        self._step(read)
        return _difference(found[0], before_bytes)


def config_of(row: Row) -> PyAOConfig:
    """Return the configuration of a row that attaches hf_pyao."""
    return PyAOConfig(
        **{"host_memory_gib": HOST_MEMORY_GIB, **(WAYS[row.way].settings or {}), **row.settings}
    )


@contextlib.contextmanager
def attention_of(kernel: str) -> Iterator[None]:
    """Let torch choose cuDNN's attention, or do without it with *kernel* ``"flash"``."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def _pinned_bytes(device: torch.device) -> int | None:
    """Return the most bytes in pinned tensors; what is cached for the next rows does not count."""
    if device.type != "cuda":
        return None
    found: int | None = torch.cuda.host_memory_stats().get("active_bytes.peak")
    return found


def _num_alloc_retries(device: torch.device) -> int:
    """Return how often the allocator had to give back segments, which waits for the device."""
    if device.type != "cuda":
        return 0
    found: int = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return found


def _difference(value: int | None, base: int | None) -> int | None:
    return None if value is None or base is None else value - base
