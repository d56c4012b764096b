"""One way to train at one length, in a process of its own: what `../long_context.py` compares.

It reads a request (JSON) from its standard input and prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools.bench.memory import DeviceMemory, pick_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from text_data import standard_library
from tokenization import special_ids, tokenize_with_own_bpe

GIB = 2**30
MIB = 2**20
NUM_POINTS = 400
"""Points of a curve."""
SAMPLE_S = 0.01
"""Between two readings of the process's resident memory."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is run."""

    settings: dict[str, Any]
    """Of ``PyAOConfig``; empty: nothing is attached."""
    device: str
    dtype: str
    memory_gib: float
    """What an accelerator's allocator may hold."""
    sequence_length: int
    num_steps: int
    model: dict[str, Any]
    """Of ``LlamaConfig``, without what the tokenizer says."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a way came to."""

    peak_bytes: int
    """Most bytes alive on the device at once, weights and gradients included, by ledger; on an
    accelerator what its allocator counted."""
    resident_bytes: int | None
    """On a CPU: what the process held more than before the step, at most. The host's copies are
    among it there."""
    host_bytes: int
    """Most bytes of offloaded tensors on the host."""
    curve: list[tuple[float, int]]
    """Milliseconds since the last step began, and the bytes alive on the device."""
    forward_ms: float
    step_ms: float
    losses: list[float]
    gradient_norm: float
    said: str
    """What the offloader says of itself."""


def main() -> None:
    """Run what is asked for, and print what it came to."""
    request = Request(**json.loads(sys.stdin.read()))
    print(json.dumps(asdict(run(request))))


def run(request: Request) -> Finding:
    """Train for some steps; return what the last of them came to."""
    device = pick_device(request.device)
    model, ids = _model_and_text(request)
    memory = DeviceMemory(device)
    if device.type != "cpu":
        memory.cap(request.memory_gib)
    model = model.to(device, getattr(torch, request.dtype))
    blocks = [part.to(device) for part in ids]
    config = PyAOConfig.from_dict(request.settings) if request.settings else None
    with attach(model, config) if config is not None else contextlib.nullcontext() as offloader:
        losses = []
        for number, block in enumerate(blocks):
            is_last = number == len(blocks) - 1
            model.zero_grad(set_to_none=True)
            memory.reset_peaks()
            curve = Curve(offloader)
            curve.ledger.note([*model.parameters(), *model.buffers(), block])
            resident = Resident()
            with resident, curve if is_last else contextlib.nullcontext():
                loss = model(input_ids=block, labels=block, use_cache=False).loss
                curve.end_forward()
                loss.backward()
                memory.synchronize()
            losses.append(loss.item())
            norm = _norm(model)
            with torch.no_grad():  # plain descent: no state of an optimizer beside what is shown
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 / max(norm, 1.0) * parameter.grad
            del loss
        totals = {} if offloader is None else offloader.totals()
        said = "" if offloader is None else offloader.describe()
    counted = memory.peak_allocated_bytes()
    return Finding(
        peak_bytes=curve.ledger.peak_bytes if counted is None else counted,
        resident_bytes=resident.most_bytes if counted is None else None,
        host_bytes=int(totals.get("host_peak_bytes", 0)),
        curve=curve.points(),
        forward_ms=curve.forward_ms,
        step_ms=curve.step_ms,
        losses=losses,
        gradient_norm=norm,
        said=said,
    )


def _model_and_text(request: Request) -> tuple[Any, list[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    documents = standard_library(2.0).documents
    tokenizer, tokens = tokenize_with_own_bpe(documents, request.model["vocab_size"])
    needed = request.sequence_length * request.num_steps
    text = torch.from_numpy(tokens.astype("int64"))
    text = text.repeat(-(-needed // len(text)))[:needed]
    torch.manual_seed(request.seed)
    config = LlamaConfig(
        **{**request.model, **special_ids(tokenizer), "vocab_size": len(tokenizer)},
        max_position_embeddings=request.sequence_length,
    )
    model = LlamaForCausalLM(config).train()
    return model, list(text.view(request.num_steps, 1, request.sequence_length))


def _norm(model: torch.nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


class Curve:
    """Notes what is alive on the device over a step, operation by operation."""

    def __init__(self, offloader: Any) -> None:
        self.ledger = MemoryLedger(None if offloader is None else offloader.host_pool.owns)
        self.forward_ms = self.step_ms = 0.0
        self._mode = _Timed(self.ledger)

    def __enter__(self) -> Curve:
        """Begin the step."""
        self._mode.start_s = time.perf_counter()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End it."""
        self._mode.__exit__(*error)
        self.step_ms = self._mode.now_ms()

    def end_forward(self) -> None:
        """Note that backward begins."""
        self.forward_ms = self._mode.now_ms()

    def points(self) -> list[tuple[float, int]]:
        """Return at most :data:`NUM_POINTS` points: of each stretch of time the highest."""
        found = self._mode.points
        if not found:
            return []
        width_ms = max(found[-1][0], 1e-9) / NUM_POINTS
        highest: dict[int, tuple[float, int]] = {}
        for at_ms, nbytes in found:
            place = int(at_ms / width_ms)
            if place not in highest or nbytes > highest[place][1]:
                highest[place] = (round(at_ms, 2), nbytes)
        return [highest[place] for place in sorted(highest)]


class _Timed(NotingMode):
    """Notes the bytes that are alive after each operation, and when."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self.start_s = 0.0
        self.points: list[tuple[float, int]] = []

    def now_ms(self) -> float:
        return (time.perf_counter() - self.start_s) * 1e3

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.points.append((self.now_ms(), self.ledger.live_bytes))
        return result


class Resident:
    """Reads what the process holds, from a thread, as long as it is entered."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Resident:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop."""
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        before = _resident_bytes()
        while not self._is_over.wait(SAMPLE_S):
            self.most_bytes = max(self.most_bytes, _resident_bytes() - before)


def _resident_bytes() -> int:
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
