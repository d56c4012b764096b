"""Where copies hide under compute: the guide's inequality, and Megatron's offloaded modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments import published
from experiments.page import bullets, paragraph, source, table
from experiments.predictor import ASSUMPTIONS, SHADER_TFLOP_PER_S, Predictor, use_one_thread
from experiments.rows import PREDICT, Result, Row, one, select
from experiments.runner import Options, progress
from experiments.systems import BASELINE, CHECKPOINTING, MODELS, OFFLOAD_ALL, OFFLOAD_ALL_INT8, PYAO
from hf_pyao.config import PyAOConfig
from hf_pyao.estimate.fake_step import FakeTraining
from hf_pyao.estimate.recorded_step import record_step
from hf_pyao.hardware.presets import Hardware, find_hardware
from hf_pyao.hardware.speeds import GIB
from hf_pyao.integrations.architectures import MODULE_MAPS
from hf_pyao.planning.predict import Prediction, operation_times_ms, predict
from hf_pyao.planning.step_program import FORWARD, OUTSIDE, StepProgram

Read = Callable[[str], dict[str, Any] | None]

LINKS_GB_PER_S = {
    "PCIe 3.0 x8": 6.25,
    "PCIe 3.0 x16": 12.5,
    "PCIe 4.0": 25.0,
    "PCIe 5.0": 50.0,
    "NVLink-C2C": 450.0,
}
"""1e9 bytes a second, each way."""
CARDS = {
    "RTX 4070, tensor cores": ("rtx4070", None),
    "RTX 4070, shaders": ("rtx4070", SHADER_TFLOP_PER_S),
    "H200": ("h200", None),
}
MICRO_BATCH = 4


def transfer_ms(num_bytes: float, gib_per_s: float) -> float:
    """Return how long *num_bytes* are on a link."""
    return num_bytes / GIB / gib_per_s * 1e3


def overlapped_ms(compute_ms: float, num_bytes: float, gib_per_s: float) -> float:
    """Return the guide's step: with perfect overlap the longer of compute and transfer."""
    return max(compute_ms, transfer_ms(num_bytes, gib_per_s))


def break_even_gib_per_s(compute_ms: float, num_bytes: float) -> float:
    """Return the slowest link on which the transfer hides under the compute."""
    return num_bytes / GIB / (compute_ms / 1e3)


def predict_inequality(options: Options) -> Result:
    """Predict where the guide's inequality holds: models, cards and links."""
    use_one_thread()
    rows = list(_guides_own())
    for model in progress(options.models, "the guide's inequality"):
        predictor = Predictor(model, "micro" if options.is_smoke else None)
        for card, (name, tflop_per_s) in CARDS.items():
            hardware = find_hardware(name)
            if tflop_per_s is not None:
                device = dataclasses.replace(hardware.device, tflop_per_s=tflop_per_s)
                hardware = dataclasses.replace(hardware, device=device)
            rows += _inequality(model, predictor, card, hardware, options.is_smoke)
    return Result(rows=rows, assumptions=ASSUMPTIONS)


def _guides_own() -> Iterator[Row]:
    common: dict[str, Any] = {
        "figure": "inequality",
        "model": "the guide's shard, 2 GiB under 20 ms",
    }
    for name, speed in published.GUIDE_LINKS_GIB_PER_S.items():
        yield Row(
            **common,
            system=name,
            quantity="transfer",
            unit="ms",
            value=transfer_ms(published.GUIDE_SHARD_BYTES, speed),
            published=published.GUIDE_TRANSFER_MS[name],
            mode=PREDICT,
        )
    yield Row(
        **common,
        system="break-even",
        quantity="link",
        unit="GiB/s",
        value=break_even_gib_per_s(published.GUIDE_COMPUTE_MS, published.GUIDE_SHARD_BYTES),
        published=published.GUIDE_BREAK_EVEN_GIB_PER_S,
        mode=PREDICT,
    )


def _inequality(
    model: str, predictor: Predictor, card: str, hardware: Hardware, is_smoke: bool
) -> Iterator[Row]:
    program = predictor.program(OFFLOAD_ALL, MICRO_BATCH)
    forward_ms = layer_forward_ms(program, hardware)
    exact = sum(slot.link_bytes for slot in program.slots if slot.layer == 1)
    ratio = 1.0
    if not is_smoke:
        whole = predictor.predicted(OFFLOAD_ALL, MICRO_BATCH)
        ratio = predictor.predicted(OFFLOAD_ALL_INT8, MICRO_BATCH).host_bytes / whole.host_bytes
    plain = at(predictor.program(BASELINE, MICRO_BATCH), hardware, False)
    common: dict[str, Any] = {
        "figure": "inequality",
        "model": MODELS[model],
        "micro_batch": MICRO_BATCH,
        "mode": PREDICT,
    }
    for name, num_bytes in (("identity", exact), ("int8", exact * ratio)):
        yield Row(
            **common,
            system=f"{card}, {name}",
            quantity="slowest link that hides a layer's forward",
            unit="GB/s",
            value=num_bytes / (forward_ms / 1e3) / 1e9,
            detail={"layer_mb": num_bytes / 1e6, "layer_forward_ms": forward_ms},
        )
    for link, gb_per_s in LINKS_GB_PER_S.items():
        linked = hardware.with_link(gb_per_s * 1e9 / GIB)
        found = at(program, linked, True)
        yield Row(
            **common,
            system=f"{card}, identity",
            quantity=f"step with {link} over keeping all",
            unit="x",
            value=found.step_ms / plain.compute_ms,
            detail={
                "guide": overlapped_ms(
                    plain.compute_ms, 2 * found.offloaded_bytes, gb_per_s * 1e9 / GIB
                )
                / plain.compute_ms
            },
        )
    checkpointed = at(predictor.program(CHECKPOINTING, MICRO_BATCH), hardware, False)
    yield Row(
        **common,
        system=f"{card}, checkpointing",
        quantity="step on any link over keeping all",
        unit="x",
        value=checkpointed.step_ms / plain.compute_ms,
    )


def layer_forward_ms(program: StepProgram, hardware: Hardware, layer: int = 1) -> float:
    """Return what a layer's forward takes."""
    times_ms = operation_times_ms(program, hardware.device)
    return sum(
        sum(times_ms[segment.start : segment.end])
        for segment in program.segments
        if segment.phase == FORWARD and segment.layer == layer
    )


def at(
    program: StepProgram,
    hardware: Hardware,
    offloads: bool | Callable[[str], bool],
    window_bytes: int | None = None,
) -> Prediction:
    """Predict *program* with the slots that *offloads* picks by name leaving; all but the last
    layer's."""
    last, least = program.num_layers - 1, int(PyAOConfig().min_bytes)
    leaves = [
        OUTSIDE < slot.layer < last
        and slot.nbytes >= least
        and (offloads(slot.name) if callable(offloads) else offloads)
        for slot in program.slots
    ]
    return predict(
        program, leaves, window_bytes=window_bytes, device=hardware.device, link=hardware.link
    )


def inequality_section(read: Read) -> str:
    """Write the page's part on the guide's inequality."""
    found = read(PREDICT)
    parts = ["## The guide's inequality: where a transfer hides under compute"]
    if found is None:
        return parts[0]
    own = [
        [row["system"], row["quantity"], f"{row['published']:g} {row['unit']}",
         f"{row['value']:.1f} {row['unit']}"]
        for row in found["rows"]
        if row["published"] is not None
    ]  # fmt: skip
    rows = []
    for name in MODELS.values():
        for card in CARDS:
            needs = [
                one(
                    found["rows"],
                    model=name,
                    system=f"{card}, {codec}",
                    quantity="slowest link that hides a layer's forward",
                )["value"]
                for codec in ("identity", "int8")
            ]
            cells = [name, card, *(f"{value:.1f}" for value in needs)]
            for link in LINKS_GB_PER_S:
                row = one(
                    found["rows"],
                    model=name,
                    system=f"{card}, identity",
                    quantity=f"step with {link} over keeping all",
                )
                cells.append(f"{row['value']:.2f} ({row['detail']['guide']:.2f})")
            again = one(found["rows"], model=name, system=f"{card}, checkpointing")
            rows.append([*cells, f"{again['value']:.2f}"])
    parts += [
        paragraph("*Mode: predict.* The guide's own example (a 2 GiB shard under 20 ms) first:"),
        table(["", "", "guide", "ours"], own),
        paragraph(
            "Then each model at micro-batch 4, all of it offloaded layer by layer: the slowest "
            "link (GB/s of 1e9) that hides what a layer saves under its own forward, and the step "
            "over one that keeps all, in brackets by the guide's max(compute, transfer) with all "
            "of a step's copies and compute in one pot."
        ),
        table(["model", "card", "needs", "needs, int8", *LINKS_GB_PER_S, "checkpointing"], rows),
        bullets(
            [
                "The guide's example is arithmetic and comes out; its C2C link is both ways "
                "together, so that one way carries 450.",
                "The bracket is the lower bound: a copy starts when its tensor is saved, and a "
                "layer waits at its end, so that ours is above it where both are near.",
                "int8 needs half the link or less, but for its kernels' time, which is not in it.",
                "Where a column is above checkpointing's, offloading everything on that link is "
                "slower than computing it again. ZeRO-1 and the chunked loss change neither the "
                "layers' bytes nor their compute.",
            ]
        ),
        source(found),
    ]
    return "\n\n".join(parts)


def plot_inequality(document: dict[str, Any]) -> Any:
    """Draw the step over keeping all, by link, a panel for each model."""
    from experiments.plots import lines

    points = []
    for row in select(document["rows"], figure="inequality", unit="x"):
        for link, speed in LINKS_GB_PER_S.items():
            if row["quantity"] == f"step with {link} over keeping all":
                points.append((row["model"], row["system"], speed, row["value"]))
    figure = lines(points, "link, GB/s each way", "step over keeping all")
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure


# ---- Megatron ------------------------------------------------------------------------------------

ROLES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_up",
    "mlp_act",
    "mlp_down",
)
LIGHT = ("attn_norm", "mlp_norm", "mlp_act")
"""What little compute makes: recomputed, as Megatron-Core does with norms and activations."""
MEGATRON_CARD, MEGATRON_BATCH = "h200", 16


def role_of(architecture: str, slot: str) -> str | None:
    """Return the role of the sub-module that saves *slot* (``path:number``)."""
    path = slot.rpartition(":")[0]
    owners = {
        owner: role for role, paths in MODULE_MAPS[architecture].roles.items() for owner in paths
    }
    while path not in owners and path:
        path = path.rpartition(".")[0]
    return owners.get(path)


def predict_modules(options: Options) -> Result:
    """Predict memory and throughput for each offloaded module, recomputation, and both."""
    use_one_thread()
    rows: list[Row] = []
    for model in progress(options.models, "Megatron"):
        predictor = Predictor(model, "micro" if options.is_smoke else None)
        micro_batch = 2 if options.is_smoke else MEGATRON_BATCH
        rows += _modules(model, predictor, micro_batch)
    return Result(
        rows=rows,
        assumptions=[
            *ASSUMPTIONS[1:3],
            f"{MEGATRON_CARD.upper()} of hf_pyao/hardware/presets.py, link 50e9 bytes/s each way, "
            f"micro-batch {MEGATRON_BATCH}; byte window of 256 MiB, the last layer stays",
        ],
    )


def real_modules(options: Options) -> Result:
    """Measure the same on the accelerator that is here."""
    from experiments.measured import bench_rows

    methods = {
        "nothing": "none",
        **{f"offload {role}": f"pyao:policy=modules,modules={role}" for role in ROLES},
        "offload everything": "pyao:policy=all",
        "recompute norms + mlp_act": f"pyao:policy=off,recompute_modules={'+'.join(LIGHT)}",
        "both: recompute these, offload the rest": "pyao:policy=all,recompute_modules="
        + "+".join(LIGHT),
        "checkpointing": "checkpoint",
    }
    rows = bench_rows(options, "Megatron", (MEGATRON_BATCH,), methods)
    return Result(rows=list(rows), assumptions=["forward and backward, one device"])


def _modules(model: str, predictor: Predictor, micro_batch: int) -> Iterator[Row]:
    hardware = find_hardware(MEGATRON_CARD)
    window_bytes = int(PyAOConfig().window)
    plain = predictor.program(BASELINE, micro_batch)
    training = FakeTraining(config=predictor.config)
    light = record_step(
        *(training, micro_batch, predictor.sequence_length),
        recompute_modules=LIGHT,
        keep_last_layers=1,
    )

    def picks(roles: Sequence[str]) -> Callable[[str], bool]:
        return lambda slot: role_of(model, slot) in roles

    heavy = [role for role in ROLES if role not in LIGHT]
    programs: dict[str, tuple[StepProgram, Callable[[str], bool] | bool]] = {
        "nothing": (plain, False),
        **{f"offload {role}": (plain, picks((role,))) for role in ROLES},
        "offload core_attn + mlp_act": (plain, picks(("core_attn", "mlp_act"))),
        "offload everything": (plain, True),
        "recompute norms + mlp_act": (light, False),
        "both: recompute these, offload the rest": (light, picks(heavy)),
        "checkpointing": (predictor.program(CHECKPOINTING, micro_batch), False),
        "offload everything, chunked loss": (
            predictor.program(dataclasses.replace(PYAO, head_loss="chunked"), micro_batch),
            True,
        ),
    }
    first: Prediction | None = None
    for name, (program, offloads) in programs.items():
        found = at(program, hardware, offloads, window_bytes)
        first = first or found
        common: dict[str, Any] = {
            "figure": "Megatron",
            "model": MODELS[model],
            "system": name,
            "micro_batch": micro_batch,
            "mode": PREDICT,
        }
        yield Row(
            **common,
            quantity="peak device memory, less",
            unit="of the peak",
            value=1 - found.peak_bytes / first.peak_bytes,
            detail={"peak_gb": found.peak_bytes / 1e9},
        )
        yield Row(
            **common,
            quantity="throughput, less",
            unit="of the throughput",
            value=1 - first.step_ms / found.step_ms,
            detail={
                "tokens_per_s": micro_batch * predictor.sequence_length / found.step_ms * 1e3,
                "offloaded_gb": found.offloaded_bytes / 1e9,
            },
        )


def modules_section(read: Read) -> str:
    """Write the page's part on Megatron's modules."""
    found = read(PREDICT)
    parts = ["## Megatron-Core: memory and throughput by offloaded module"]
    if found is None:
        return parts[0]
    systems = list(dict.fromkeys(row["system"] for row in found["rows"]))
    rows = []
    for system in systems:
        cells = [system]
        for name in MODELS.values():
            less, slower = (
                one(found["rows"], model=name, system=system, quantity=quantity)["value"]
                for quantity in ("peak device memory, less", "throughput, less")
            )
            cells.append(f"−{less:.1%} / −{slower:.1%}" if less or slower else "0")
        rows.append(cells)
    low, high = published.MEGATRON_MEMORY_CUT
    least, most = published.MEGATRON_SLOWDOWN
    gain = published.MEGATRON_WITH_RECOMPUTE
    parts += [
        paragraph(
            "*Mode: predict.* Peak memory / throughput, each against keeping everything; one "
            "H200 with a link of 50 GB/s at micro-batch 16. The article's text has ranges alone: "
            f"{low:.0%} to {high:.0%} less memory at {least:.0%} to {most:.0%} less throughput, "
            f"and {gain[0]:.0%} to {gain[1]:.0%} more throughput with recomputation where that "
            "frees other settings; its tables by module are not in the text."
        ),
        table(["", *MODELS.values()], rows),
        bullets(
            [
                "Its models are mixtures of experts of 100 billion parameters and more, on 64 to "
                "512 GPUs with pipelines, whose layers compute far longer for a byte that they "
                "save. Ours are the PyAO paper's three.",
                "On an H200 these are bound by the link: whatever saves more than a small part of "
                "the bytes costs more than 2 %. Single modules are within the article's range of "
                "memory; few are within its range of throughput.",
                "Norms and activation functions are cheap to compute again, so that recomputing "
                "them and offloading the rest beats offloading everything, as the article says.",
                "ZeRO-1 with accumulation adds the same gradients to every row.",
            ]
        ),
        source(found),
    ]
    return "\n\n".join(parts)


def plot_modules(document: dict[str, Any]) -> Any:
    """Draw memory saved over throughput lost."""
    from experiments.plots import grouped_bars

    rows = select(document["rows"], quantity="throughput, less")
    bars = [(row["model"], row["system"], 100 * row["value"]) for row in rows]
    return grouped_bars([bar for bar in bars if bar[1] != "nothing"], "throughput lost, %")
