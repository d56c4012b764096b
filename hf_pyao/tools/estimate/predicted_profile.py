"""The profile of a training that does not run: from fake tensors and a card's speeds."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.model.map.model_identity import identity_of
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.documents.profile import Profile, ProfiledModule, ProfiledSlot, Spread
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.measure.activation_throughput import by_pack_intervals
from hf_pyao.plan.predict.calibration import speeds_of
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram
from hf_pyao.tools.estimate.common_arguments import training_fields_of
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.lever_arguments import levers_of
from hf_pyao.tools.estimate.model_specs import check_sequence_length, config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import recorded_step
from hf_pyao.tools.simulation.kept_models import KeptModels


def predict_profile(
    training: FakeTraining,
    hardware: Hardware,
    micro_batch: int,
    sequence_length: int,
    *,
    title: str,
    levers: Levers = NO_LEVERS,
) -> Profile:
    """Return what :class:`~hf_pyao.plan.measure.profile.StepProfiler` would find, marked as
    predicted.

    Args:
        training: the model, and how it is trained.
        hardware: speeds of device and link.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        title: a heading.
        levers: what changes the step itself.
    """
    recorded = recorded_step(training, micro_batch, sequence_length, levers=levers)
    program = recorded.whole()
    times_ms = operation_times_ms(program, hardware.device)
    with training.model() as (model, _):
        identity = identity_of(find_layers(model))
    link = hardware.link
    shape = [micro_batch, sequence_length]
    return Profile(
        title=title,
        is_measured=False,
        model=identity,
        shapes=[f"input_ids int64{shape}", f"labels int64{shape}"],
        device=hardware.name,
        num_micro_batches=1,
        layer_names=list(program.layer_names),
        layer_forward=_layer(program, times_ms, FORWARD),
        layer_backward=_layer(program, times_ms, BACKWARD),
        head=_spread([_head_ms(program, times_ms)]),
        modules=_modules(program, times_ms, hardware),
        slots=_slots(program),
        link={"d2h_gib_per_s": link.d2h_gib_per_s, "h2d_gib_per_s": link.h2d_gib_per_s},
        settings=levers.settings(),
        speeds=speeds_of(hardware.device),
        program=recorded.to_dict(),
        provenance=collect_provenance(),
    )


def _layer(program: StepProgram, times_ms: Sequence[float], phase: str) -> Spread | None:
    found: defaultdict[int, float] = defaultdict(float)
    for segment in program.segments:
        if segment.phase == phase and segment.layer != OUTSIDE:
            found[segment.layer] += sum(times_ms[segment.start : segment.end])
    return _spread(list(found.values()))


def _head_ms(program: StepProgram, times_ms: Sequence[float]) -> float:
    is_behind, elapsed_ms = False, 0.0
    for segment in program.segments:
        if segment.layer == OUTSIDE and is_behind:
            elapsed_ms += sum(times_ms[segment.start : segment.end])
        elif segment.phase == BACKWARD:
            break
        is_behind = is_behind or segment.layer == program.num_layers - 1
    return elapsed_ms


def _modules(
    program: StepProgram, times_ms: Sequence[float], hardware: Hardware
) -> list[ProfiledModule]:
    layer = min(1, program.num_layers - 1)
    elapsed_ms: dict[str, defaultdict[str, float]] = {
        FORWARD: defaultdict(float),
        BACKWARD: defaultdict(float),
    }
    for segment in program.segments:
        if segment.layer != layer:
            continue
        for number in range(segment.start, segment.end):
            path = program.operations[number].path
            while path:  # a sub-module's time holds that of those in it
                elapsed_ms[segment.phase][path] += times_ms[number]
                path = path.rpartition(".")[0]
    rates = by_pack_intervals(program, hardware.device, layer)
    packs: defaultdict[str, list[int]] = defaultdict(list)
    for pack in program.packs:
        if pack.layer == layer:
            packs[pack.path].append(pack.nbytes)
    saved: defaultdict[str, int] = defaultdict(int)
    for slot in program.slots:
        if slot.layer == layer and slot.stays is None:
            saved[slot.name.rpartition(":")[0]] += slot.nbytes
    paths = {*elapsed_ms[FORWARD], *elapsed_ms[BACKWARD], *packs, *saved}
    modules = [
        ProfiledModule(
            path=path,
            forward=_spread([elapsed_ms[FORWARD][path]] if path in elapsed_ms[FORWARD] else []),
            backward=_spread([elapsed_ms[BACKWARD][path]] if path in elapsed_ms[BACKWARD] else []),
            saved_bytes=saved.get(path, 0),
            num_packs=len(packs.get(path, ())),
            packed_bytes=sum(packs.get(path, ())),
            throughput_gib_per_s=rates.get(path),
        )
        for path in paths
    ]
    modules.sort(key=lambda each: (-(each.forward.mean_ms if each.forward else 0), each.path))
    return modules


def _slots(program: StepProgram) -> list[ProfiledSlot]:
    found: dict[str, list[int]] = {}
    stays: dict[str, str | None] = {}
    for slot in program.slots:
        found.setdefault(slot.name, []).append(slot.nbytes)
        stays[slot.name] = slot.stays
    return [
        ProfiledSlot(name=name, nbytes=max(sizes), num_layers=len(sizes), stays=stays[name])
        for name, sizes in found.items()
    ]


def _spread(times_ms: Sequence[float]) -> Spread | None:
    if not times_ms:
        return None
    mean_ms = sum(times_ms) / len(times_ms)
    return Spread(mean_ms=mean_ms, least_ms=min(times_ms), most_ms=max(times_ms))


def training_of(args: argparse.Namespace, model: str) -> tuple[FakeTraining, Hardware]:
    """Return the model that is named, as the options train it, and the card that they name.

    Raises:
        ConfigError: the model or the card is unknown, or the model has no positions for so long a
            sequence.
    """
    config = config_of(parse_model(model))
    check_sequence_length(config, args.sequence_length)
    hardware = find_hardware(args.device or "rtx4070")
    fields = training_fields_of(args, hardware)
    return FakeTraining(config=config, kept=KeptModels(), **fields), hardware


def profile_of(
    args: argparse.Namespace, model: str, training: FakeTraining, hardware: Hardware
) -> Profile:
    """Return the profile of a model that is named, as the options say."""
    return predict_profile(
        training,
        hardware,
        args.micro_batch,
        args.sequence_length,
        title=f"{parse_model(model).name} on {hardware.name}, predicted",
        levers=levers_of(args),
    )
