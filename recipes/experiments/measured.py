"""Small models that run here, and the bench harness on an accelerator: rows that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.experiment import Mode, Options, need_accelerator, progress
from experiments.published import NUM_NODES
from experiments.rows import OK, Result, Row
from experiments.systems import ACCUMULATION, GIVEN, MODELS, SYSTEMS, System

MINIATURE_SIZE, MINIATURE_VOCABULARY, MINIATURE_LENGTH = "tiny", 512, 64
MICRO_BATCHES = (1, 2, 4, 8)
COUNTED = (
    "small models in float32 on a CPU: bytes are exact, and no device memory is measured",
    "policy 'all' in the place of 'pyao': the rule has no device to time",
)
MEASURED = (
    "one device, one process: gradients are let go as they are complete, and AdamW is left out"
)
NOTHING = {"policy": "budget", "budget": 0}
"""Settings with which nothing leaves, and all is counted."""


def held_after_forward(
    architecture: str, system: System, micro_batch: int, size: str = MINIATURE_SIZE
) -> dict[str, float]:
    """Run one real step of *system* on the CPU, see :func:`count_step`.

    PyAO's rule has no device to time here: everything leaves that can (policy "all").
    """
    settings: dict[str, Any] = dict(NOTHING)
    if system.is_pyao:
        settings = {**system.settings, "policy": "all"}
    elif system.head_loss != "off":
        settings["head_loss"] = system.head_loss
    return count_step(architecture, settings, micro_batch, size, checkpointing=system.checkpointing)


def count_step(
    architecture: str,
    settings: dict[str, Any],
    micro_batch: int,
    size: str,
    *,
    checkpointing: bool = False,
) -> dict[str, float]:
    """Run one real step on the CPU with hf_pyao's *settings*.

    Returns:
        The engine's counters of bytes, and its times.
    """
    import torch

    from hf_pyao.attachment import attach
    from hf_pyao.config import PyAOConfig

    model = _small_model(architecture, size, checkpointing=checkpointing)
    ids = torch.randint(0, MINIATURE_VOCABULARY, (micro_batch, MINIATURE_LENGTH))
    with attach(model, PyAOConfig(**settings, min_bytes=0)) as offloader:
        model(input_ids=ids, labels=ids).loss.backward()
        return offloader.metrics()


def _small_model(architecture: str, size: str, *, checkpointing: bool = False) -> Any:
    import torch

    from hf_pyao.tools.estimate.fake_step import build_model
    from hf_pyao.tools.estimate.model_sizes import build_config, find_size

    config = build_config(
        architecture, find_size(architecture, size), vocab_size=MINIATURE_VOCABULARY
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    config.use_cache = False
    torch.manual_seed(0)
    return build_model(config, checkpointing=checkpointing, dtype="float32")


def optimizer_bytes(architecture: str, size: str, num_nodes: int) -> tuple[int, int]:
    """Take a step of torch's AdamW with one node's share of the parameters, as ZeRO cuts them.

    Returns:
        Bytes of the share's float32 weights, and of what the optimizer holds for them.
    """
    import torch

    parameters = [p.detach().flatten() for p in _small_model(architecture, size).parameters()]
    flat = torch.cat(parameters)
    share = flat[: -(-flat.numel() // num_nodes)].float().clone().requires_grad_()
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share])
    optimizer.step()
    states = [value for value in optimizer.state[share].values() if torch.is_tensor(value)]
    return share.nbytes, sum(value.nbytes for value in states)


def count_held(options: Options) -> Result:
    """Count what autograd holds after forward, for each model, system and micro-batch."""
    rows = [
        Row(
            **common,
            quantity="held after forward",
            value=counted["held_bytes"] / 1e6,
            detail={
                "offloaded_mb": counted["offloaded_bytes"] / 1e6,
                "host_mb": counted["host_peak_bytes"] / 1e6,
                "link_mb": counted["link_bytes"] / 1e6,
            },
        )
        for _, common, counted in _counted(options)
    ]
    return Result(rows=rows, assumptions=COUNTED)


def count_host(options: Options) -> Result:
    """Count what a node's host holds for a step, by component."""
    size = _size(options)
    optimizer = {model: optimizer_bytes(model, size, NUM_NODES) for model in options.models}
    rows = []
    for model, common, counted in _counted(options):
        weights, states = optimizer[model]
        parts = {
            "float32 weights": weights / 1e6,
            "optimizer states": states / 1e6,
            "activations": counted["host_peak_bytes"] / 1e6,
        }
        value = sum(parts.values())
        rows.append(Row(**common, quantity="peak host memory", value=value, detail=parts))
    return Result(
        rows=rows,
        assumptions=[
            *COUNTED,
            "float32 weights and AdamW's states: of a fifth of the parameters, after a real step "
            "of torch's AdamW; activations: the host pool's peak; the process and its libraries "
            "are not counted",
        ],
    )


def _size(options: Options) -> str:
    return "micro" if options.is_smoke else MINIATURE_SIZE


def _counted(options: Options) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Yield each model, what its rows have in common, and what was counted of a step."""
    size = _size(options)
    for model in options.models:
        for system in progress(GIVEN, model):
            if system is ACCUMULATION:  # its gradients differ; what is counted does not
                continue
            for micro_batch in MICRO_BATCHES[:2] if options.is_smoke else MICRO_BATCHES:
                common = {
                    "model": f"{model}:{size}",
                    "system": system.name,
                    "micro_batch": micro_batch,
                    "unit": "MB",
                }
                yield model, common, held_after_forward(model, system, micro_batch, size)


def benched(
    micro_batches: Sequence[int],
    methods: Mapping[str, str],
    assumptions: Sequence[str] = (MEASURED,),
) -> Mode:
    """Return a mode that measures peaks and times on the accelerator that is here.

    Args:
        micro_batches: which.
        methods: name of the system -> method of ``pyao bench``.
        assumptions: of the result.
    """

    def run(options: Options) -> Result:
        need_accelerator("an accelerator with its driver and torch built for it")
        rows = list(_bench_rows(options, micro_batches, methods))
        return Result(rows=rows, assumptions=assumptions)

    return run


def _bench_rows(
    options: Options, micro_batches: Sequence[int], methods: Mapping[str, str]
) -> Iterator[Row]:
    from hf_pyao.tools.bench.harness import run_bench
    from hf_pyao.tools.bench.setup import BenchSetup, Trial
    from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES
    from hf_pyao.tools.estimate.model_specs import parse_model

    for model in options.models:
        setup = BenchSetup(
            model=parse_model(f"{model}:{PAPER_SIZES[model]}"),
            dtype="float16",
            gradients="release",  # as under ZeRO-2 a gradient leaves when it is complete
        )
        trials = [
            Trial(method=method, micro_batch=micro_batch)
            for micro_batch in micro_batches
            for method in methods.values()
        ]
        report = run_bench(setup, trials, progress=print)
        names = {method: name for name, method in methods.items()}
        for row in report.rows:
            common: dict[str, Any] = {
                "model": MODELS[model],
                "system": names[row.method],
                "micro_batch": row.micro_batch,
                "status": OK if row.status == OK else row.status,
                "note": row.reason,
                "detail": {"metrics": row.metrics, "device": report.device.get("name")},
            }
            peak, step = row.peak_allocated_bytes, row.step
            yield Row(
                **common,
                quantity="peak device memory",
                unit="GB",
                value=None if peak is None else peak / 1e9,
            )
            yield Row(
                **common,
                quantity="step",
                unit="ms",
                value=None if step is None else step.median_ms,
            )


def method_of(system: System) -> str:
    """Return the method of ``pyao bench`` for *system* on one device."""
    if system.settings or system.head_loss != "off":
        settings = system.settings or {"policy": "off", "head_loss": system.head_loss}
        if system.settings:
            settings["profile_steps"] = 1
        given = "pyao:" + ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in settings.items()
        )
        return f"checkpoint+{given}" if system.checkpointing else given
    return "checkpoint" if system.checkpointing else "none"


def methods_of_all() -> dict[str, str]:
    """Return the methods of all systems that one device can tell apart."""
    return {system.name: method_of(system) for system in SYSTEMS if system is not ACCUMULATION}
