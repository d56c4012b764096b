"""What the GPU day asks beside steps: facts, bits, workspaces, a trace, the host's part."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gzip
import json
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import available_host_bytes
from hf_pyao.engine.transfer.stream_transport import StreamTransport
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.plan.hardware.attention_workspaces import ATTENTION, AttentionShape
from hf_pyao.plan.hardware.device_speed import measure_device
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.link_speed import measure_link
from hf_pyao.tools.bench.worker import describe_device
from on_gpu.measure import Figures, Lab, attention_of, measure
from on_gpu.rows import Row

GIB, MIB = 2**30, 2**20

# ---- A: facts ------------------------------------------------------------------------------------


def device_facts(lab: Lab) -> Figures:
    """Return the device's name, memory, context and driver, and the link's generation and width."""
    found = describe_device(lab.device)
    context_bytes = lab.memory.context_bytes()
    query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm,power.limit"
    program = shutil.which("nvidia-smi")
    if program is not None:
        command = [program, f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        values = said.stdout.strip().split(", ")
        found["nvidia_smi"] = dict(zip(query.split(","), values, strict=False))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return found | {"context_bytes": context_bytes, "locked_memory_limit": list(locked)}


def host_memory(lab: Lab) -> Figures:
    """Pin 1 GiB eight times, then 24 more: seconds for each, and what the host has left."""
    size, counts = (MIB, (1, 2, 3)) if lab.is_smoke else (GIB, (1, 8, 32))
    found: Figures = {"available_bytes_0": available_host_bytes(), **_meminfo("0")}
    pinned: list[torch.Tensor] = []
    start = time.perf_counter()
    for count in counts:
        while len(pinned) < count:
            pinned.append(torch.empty(size, dtype=torch.uint8, pin_memory=lab.device.type != "cpu"))
        found[f"seconds_for_{count}"] = time.perf_counter() - start
        found |= _meminfo(f"{count}")
    if lab.device.type == "cuda":
        pinned.clear()
        memory = torch.empty(4 * size, dtype=torch.uint8)
        start = time.perf_counter()
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        found["seconds_to_register_4"] = time.perf_counter() - start
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return found


def _meminfo(when: str) -> Figures:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    pairs = [line.split()[:2] for line in lines if line.startswith(("MemTotal", "MemAvailable"))]
    return {f"{name.rstrip(':')}_{when}": int(kib) * 1024 for name, kib in pairs}


def link_speeds(lab: Lab) -> Figures:
    """Return the link's speeds alone, in both directions at once, and under a product."""
    if lab.is_smoke:
        return {}
    found: Figures = dataclasses.asdict(measure_link(lab.device))
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=lab.device)
    on_device = torch.empty(GIB, dtype=torch.uint8, device=lab.device)
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    streams = [torch.Stream(lab.device) for _ in range(2)]
    for name, copies in (("d2h", ((host, on_device),)), ("h2d", ((on_device, host),))):
        lab.finish()
        for _ in range(20):
            matrix @ matrix
        start = time.perf_counter()
        for stream, (target, source) in zip(streams, copies, strict=False):
            with stream:
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        found[f"{name}_under_product_gib_per_s"] = 1 / (time.perf_counter() - start)
        lab.finish()
    return found


def device_speeds(lab: Lab) -> Figures:
    """Return the speed of products in bf16, and of copies within the device's memory."""
    if lab.is_smoke:
        return {}
    found: Figures = dataclasses.asdict(measure_device(lab.device))
    for size in (4096, 8192):
        one = torch.randn(size, size, dtype=torch.bfloat16, device=lab.device)
        elapsed_ms = timed_ms(lab, partial(torch.matmul, one, one))
        found[f"bf16_{size}_tflop_per_s"] = 2 * size**3 / elapsed_ms / 1e9
    return found


def timed_ms(lab: Lab, run: Callable[[], object], *, num_runs: int = 10) -> float:
    """Return the median time of *run*, after one that warms up."""
    times_ms = []
    for _ in range(num_runs + 1):
        lab.finish()
        start = time.perf_counter()
        run()
        lab.finish()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times_ms[1:])


# ---- C: bits -------------------------------------------------------------------------------------

_TOKENS = "vocab_size=512,pad_token_id=0,bos_token_id=1,eos_token_id=2"
SMALL: Mapping[str, str] = {
    "opt": "opt:hidden_size=256,word_embed_proj_dim=256,ffn_dim=1024,num_hidden_layers=4,"
    f"num_attention_heads=4,max_position_embeddings=512,{_TOKENS}",
    "gpt2": f"gpt2:n_embd=256,n_layer=4,n_head=4,n_positions=512,attn_pdrop=0.0,{_TOKENS}",
    "llama": "llama:hidden_size=256,intermediate_size=512,num_hidden_layers=4,"
    f"num_attention_heads=4,num_key_value_heads=2,{_TOKENS}",
}
_STREAMED: dict[str, Any] = {"policy": "all", "stream_weights": 0}
COMPARED: Mapping[str, tuple[dict[str, Any], bool]] = {
    "all, a layer ahead": ({"policy": "all", "window": "layer", "min_bytes": 0}, False),
    "all, 1 MiB ahead": ({"policy": "all", "window": MIB, "min_bytes": 0}, False),
    # Room for cuBLAS's workspaces and not for all that is saved; no layer may run again instead.
    "auto": (
        {"policy": "auto", "profile_steps": 2, "device_memory_gib": 0.11, "checkpoint_every": 0},
        False,
    ),
    "segments of two layers": ({"policy": "all", "checkpoint_every": 2}, False),
    "chunked loss": ({"policy": "off", "head_loss": "chunked"}, False),
    "long context": ({"policy": "all", "long_context": True}, False),
    "LoRA, weights streamed": (_STREAMED, True),
    "LoRA, streamed, segments": ({**_STREAMED, "checkpoint_every": 2}, True),
    "LoRA, embeddings and head too": ({**_STREAMED, "stream_embeddings": "on"}, True),
}
"""Name -> settings, and whether adapters are trained."""

OTHER_ROUNDING = ("chunked loss", "long context")
"""Ways whose gradients round otherwise by design: HEAD_LOSS.md, LONG_SEQUENCES.md."""

NUM_COMPARED = 6
"""Micro-batches, the last of which is compared: ``auto`` follows a plan by then."""


@dataclasses.dataclass
class Trained:
    """What a few micro-batches gave, on the host."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    rng_state: torch.Tensor


def same_bits(
    lab: Lab, architecture: str, way: str, *, is_deterministic: bool, tokens: int = 256
) -> Figures:
    """Train a small model with and without hf_pyao, from the same weights and random numbers.

    On deterministic kernels everything has to be equal. On others (cuDNN's attention) losses do,
    and gradients may differ by twice as much as three plain runs among each other.
    """
    settings, has_adapters = COMPARED[way]
    row = Row(
        part="C",
        model=SMALL[architecture],
        way="nothing",
        micro_batch=4,
        tokens=tokens,
        dtype="bfloat16" if lab.device.type != "cpu" else "float32",
        lora_rank=8 if has_adapters else None,
    )
    lab.drop_model()
    with deterministic(lab, is_deterministic):
        model = lab.model(row)
        # One plain run is enough where kernels are deterministic: a second one checks that.
        plain = [
            _train(copy.deepcopy(model), lab, tokens) for _ in range(2 if is_deterministic else 3)
        ]
        config = PyAOConfig(**{"host_memory_gib": 4.0, **settings})
        with attach(model, config, device=lab.device) as offloader:
            ours = _train(model, lab, tokens)
            mode = None if offloader.auto is None else offloader.auto.driver.state.mode.name
            offloaded_bytes = offloader.metrics().get("offloaded_bytes", 0)
    lab.drop_model()
    spread = max(_distance(one, two) for one in plain for two in plain)
    distance = min(_distance(ours, each) for each in plain)
    are_losses_equal = any(ours.losses == each.losses for each in plain)
    is_rng_equal = torch.equal(ours.rng_state, plain[0].rng_state)
    allowed = 2e-2 if way in OTHER_ROUNDING else 2 * spread
    is_right = is_rng_equal and distance <= allowed
    return {
        "is_right": is_right and (are_losses_equal or way in OTHER_ROUNDING),
        "are_losses_equal": are_losses_equal,
        "are_gradients_equal": any(_are_equal(ours, each) for each in plain),
        "is_rng_equal": is_rng_equal,
        "distance": distance,
        "spread_of_plain_runs": spread,
        "mode": mode,
        "offloaded_bytes": offloaded_bytes,
    }


def _train(model: Any, lab: Lab, tokens: int) -> Trained:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    losses = []
    for _ in range(NUM_COMPARED):
        model.zero_grad(set_to_none=True)
        ids = torch.randint(3, 512, (4, tokens), generator=generator).to(lab.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
    lab.finish()
    gradients = {
        name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None
    }
    is_cpu = lab.device.type == "cpu"
    state = torch.get_rng_state() if is_cpu else torch.get_device_module(lab.device).get_rng_state()
    return Trained(losses, gradients, state)


def _are_equal(one: Trained, other: Trained) -> bool:
    return one.gradients.keys() == other.gradients.keys() and all(
        torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items()
    )


def _distance(one: Trained, other: Trained) -> float:
    """Return the largest relative distance of a gradient; 0 if all bits are equal.

    What is nothing but rounding, as the gradients of biases of keys are, counts as little as it is
    beside the largest gradient.
    """
    if one.gradients.keys() != other.gradients.keys():
        return float("inf")
    sizes = {name: float(each.double().norm()) for name, each in other.gradients.items()}
    least = max(max(sizes.values()) * 1e-3, 1e-30)
    return max(
        float((gradient.double() - other.gradients[name].double()).norm()) / max(sizes[name], least)
        for name, gradient in one.gradients.items()
    )


@contextlib.contextmanager
def deterministic(lab: Lab, is_on: bool) -> Iterator[None]:
    """Use deterministic kernels, which cuDNN's attention is none of; or torch's own choice."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on and lab.device.type != "cpu")
    try:
        with attention_of("flash" if is_on else "cudnn"):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)


def watched_bits(lab: Lab, way: str, tokens: int) -> Figures:
    """Return what :func:`same_bits` does, torch's CUDA sanitizer watching every operation.

    From then on it watches all that this process does.

    Raises:
        RuntimeError: it found an access that is not ordered; the message says which.
    """
    watching = contextlib.ExitStack()
    if torch.cuda.is_available():
        from torch.cuda import _sanitizer

        if not _sanitizer.cuda_sanitizer.enabled:
            _sanitizer.enable_cuda_sanitizer()
        # It takes set_, which makes a tensor a view of a storage, for a write to that memory.
        views = re.compile(r"aten::set_$|" + _sanitizer.FACTORY_FUNCTION_REGEX.pattern)
        watching.enter_context(mock.patch.object(_sanitizer, "FACTORY_FUNCTION_REGEX", views))
    watching.enter_context(mock.patch.object(StreamTransport, "_event", _unseen_event))
    try:
        with watching:
            return same_bits(lab, "llama", way, is_deterministic=True, tokens=tokens)
    except Exception as error:
        errors = getattr(error, "errors", None)
        if not errors:
            raise
        raise RuntimeError("; ".join(map(_words_of, errors))) from error


class _Unseen(torch.Event):
    """An event that the host never sees come: streams wait for it in any case.

    The sanitizer knows the waits of streams. It does not know that a copy which the host has seen
    done needs none.
    """

    def query(self) -> bool:
        """Return False."""
        return False


def _unseen_event(_: StreamTransport, device: torch.device) -> torch.Event:
    return _Unseen(device, enable_timing=True)


def _words_of(error: Any) -> str:
    """Return what torch's sanitizer found, in a line."""
    found = []
    for access in (error.current_access, error.previous_access):
        frames = [f"{Path(each.filename).name}:{each.lineno}" for each in access.stack_trace[-8:]]
        operator = access.operator.partition("(")[0]
        found.append(f"{operator} on stream {access.stream} ({' '.join(frames)})")
    return f"{found[0]} is not ordered behind {found[1]}"


# ---- E: what attention allocates inside ----------------------------------------------------------

SHAPES = (
    *((16, 32, 32, 512, 64, 0.0), (16, 16, 16, 512, 80, 0.0), (8, 32, 8, 512, 64, 0.0)),
    *((1, 32, 8, 32768, 128, 0.0), (16, 16, 16, 512, 80, 0.1)),
)
"""Batch, heads, key heads, tokens, width of a head, dropout."""

KERNELS = ("flash", "cudnn")


def workspace(lab: Lab, kernel: str, shape: tuple[int, int, int, int, int, float]) -> Figures:
    """Return what one call of attention allocates above its results, and what is predicted."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[kernel]
    batch, heads, key_heads, tokens, width, dropout = shape
    if lab.is_smoke:
        batch, tokens, backend = 1, 32, SDPBackend.MATH

    def made(num_heads: int) -> torch.Tensor:
        size = (batch, tokens, num_heads, width)
        drawn = torch.randn(size, dtype=torch.bfloat16, device=lab.device)
        return drawn.transpose(1, 2).requires_grad_()  # as models do: others are copied first

    query, key, value = made(heads), made(key_heads), made(key_heads)
    found: Figures = {}
    options: dict[str, Any] = {"is_causal": True, "dropout_p": dropout}
    if key_heads != heads:
        options["enable_gqa"] = True
    with sdpa_kernel([backend]):
        for _ in range(2):  # the first makes plans and handles
            out = F.scaled_dot_product_attention(query, key, value, **options)
            kept = out
            gradient = torch.randn_like(out)
            out.backward(gradient)
        query.grad = key.grad = value.grad = None
        del out, kept
        forward, out = _above(
            lab, lambda: F.scaled_dot_product_attention(query, key, value, **options)
        )
        assert out is not None
        backward, _ = _above(lab, lambda: out.backward(gradient))
    found["ran"] = type(out.grad_fn).__name__
    node = "flash" if "Flash" in found["ran"] else "cudnn" if "Cudnn" in found["ran"] else None
    found |= {"forward_bytes": forward, "backward_bytes": backward}
    if node is not None:
        capability = torch.cuda.get_device_capability(lab.device)
        processors = torch.cuda.get_device_properties(lab.device).multi_processor_count
        settings = KernelSettings(processors, capability[0] * 10 + capability[1])
        call = AttentionShape(
            *(batch, heads, key_heads, tokens, tokens, width, width, 2),
            has_dropout=int(dropout > 0),
        )
        operator = f"_scaled_dot_product_{node}_attention"
        for name, suffix in (("forward", ""), ("backward", "_backward")):
            parts = ATTENTION[operator + suffix](call, settings)
            found[f"predicted_{name}_bytes"] = sum(parts.values())
    return found


def _above(lab: Lab, run: Callable[[], Any]) -> tuple[int | None, Any]:
    """Return the most bytes that *run* holds above what is there before and after it."""
    lab.finish()
    lab.memory.reset_peaks()
    before_bytes = lab.memory.allocated_bytes()
    result = run()
    lab.finish()
    peak_bytes, after_bytes = lab.memory.peak_allocated_bytes(), lab.memory.allocated_bytes()
    if before_bytes is None or peak_bytes is None or after_bytes is None:
        return None, result
    return peak_bytes - max(before_bytes, after_bytes), result


# ---- I: a trace ----------------------------------------------------------------------------------


def traced_step(lab: Lab, row: Row, trace: Path) -> Figures:
    """Profile *row* and write its trace; say how much of the copies compute hides."""
    activities = sorted(torch.profiler.supported_activities(), key=str)
    plain = measure(row, lab)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        measure(dataclasses.replace(row, num_warmup=1, num_steps=1), lab)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        text = path.read_bytes()
    trace.write_bytes(gzip.compress(text, 6))
    return hidden_copies(json.loads(text)["traceEvents"]) | {"step_ms": plain["step_ms"]}


def hidden_copies(events: Sequence[Mapping[str, Any]]) -> Figures:
    """Return how long copies and kernels of a trace ran, and copies beside kernels, in ms."""

    def spans(kind: str) -> list[tuple[float, float]]:
        found = [each for each in events if each.get("cat") == kind and each.get("ph") == "X"]
        return sorted((each["ts"], each["ts"] + each["dur"]) for each in found)

    copies = [
        (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("cat") == "gpu_memcpy" and "DtoD" not in each["name"]
    ]
    kernels = merged(spans("kernel"))
    hidden = sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in copies
        for first, last in kernels
    )
    copied = sum(end - start for start, end in copies)
    busy = sum(end - start for start, end in kernels)
    whole = kernels[-1][1] - kernels[0][0] if kernels else 0.0
    return {
        "copies_ms": copied / 1e3,
        "kernels_ms": busy / 1e3,
        "gaps_ms": (whole - busy) / 1e3,
        "hidden_share": hidden / copied if copied else None,
    }


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return sorted *spans* with those that overlap joined."""
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


# ---- J: the host's part --------------------------------------------------------------------------

TINY_LAYERS = (
    "llama:hidden_size=256,intermediate_size=512,num_hidden_layers=24,num_attention_heads=4,"
    f"num_key_value_heads=4,{_TOKENS}"
)


def host_cost(lab: Lab) -> Figures:
    """Return the host's time for each saved tensor: tiny layers, so that the device waits."""
    shape: dict[str, Any] = {"part": "J", "model": TINY_LAYERS, "micro_batch": 1, "tokens": 64}
    nothing = measure(Row(way="nothing", num_steps=2 if lab.is_smoke else 20, **shape), lab)
    found: Figures = {"nothing_ms": nothing["step_ms"]}
    for name, settings in (("layer", {"window": "layer"}), ("window", {"window": 4 * MIB})):
        row = Row(
            way="all",
            num_steps=2 if lab.is_smoke else 20,
            settings={"min_bytes": 0, **settings},
            **shape,
        )
        took = measure(row, lab)
        found[f"{name}_ms"] = took["step_ms"]
        extra_us = (took["step_ms"] - nothing["step_ms"]) * 1e3
        found[f"{name}_us_a_tensor"] = extra_us / max(1, took["num_slots"])
    return found


# ---- M: others' figures that are no steps --------------------------------------------------------


def loss_chunk(lab: Lab, chunk: tuple[int, int, int] = (256, 248320, 2048)) -> Figures:
    """Return time and memory of one chunk of the loss, forward and backward, and of torch's own."""
    tokens, vocab, width = (8, 64, 16) if lab.is_smoke else chunk
    options: dict[str, Any] = {"device": lab.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, requires_grad=True, **options)
    weight = torch.randn(vocab, width, requires_grad=True, **options)
    labels = torch.randint(0, vocab, (tokens,), device=lab.device)

    def ours() -> None:
        chunked_linear_cross_entropy(hidden, weight, labels, chunk_tokens=tokens).backward()

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight).float(), labels).backward()

    found: Figures = {}
    for name, run in (("ours", ours), ("torch", plain)):
        found[f"{name}_ms"] = timed_ms(lab, run)
        hidden.grad = weight.grad = None
        lab.memory.reset_peaks()
        run()
        found[f"{name}_peak_bytes"] = lab.memory.peak_allocated_bytes()
        hidden.grad = weight.grad = None
    return found
