"""``pyao plan``: the fastest plan within a device's memory, what it does and why."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers
from hf_pyao.settings.removed import removed
from hf_pyao.text import echo, say
from hf_pyao.tools.answers import answered, computed
from hf_pyao.tools.estimate.common_arguments import (
    refuse_without_effect,
    tell,
)
from hf_pyao.tools.estimate.lever_arguments import (
    OFF,
    binds_of,
    given_levers,
    lever_config_of,
    levers_of,
    resident_blocks_of,
)
from hf_pyao.tools.option_table import given_of
from hf_pyao.tools.progress import Progress

if TYPE_CHECKING:
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.plan.documents.profile import Profile
    from hf_pyao.plan.hardware.presets import Hardware
    from hf_pyao.plan.step.step_program import StepProgram
    from hf_pyao.tools.estimate.fake_step import FakeTraining

DESCRIPTION = """\
Find the fastest plan whose peak fits into a device's memory: which saved tensors of which layers
are kept, offloaded, or computed again, and why. For a step that was profiled (pyao profile), or
for a model by its name. Training with policy 'auto' does the same by itself; a plan that is saved
can be looked at, changed by hand, and followed (policy 'plan').
"""

EPILOG = """\
examples
  pyao plan profile.json --device-memory 11GiB --save plan.json
  pyao plan opt:1.3b --device rtx4070 --micro-batch 8
  pyao plan llama:1.2b --device h200 --micro-batch 16 --device-memory 20GiB --save plan.json
  pyao plan llama:1.2b --sequence-length 16384 --long-context --save plan.json
  pyao plan --compare plan.json other.json
  pyao plan profile.json --try                   predict it kept and offloaded, beside its times
  pyao plan profile.json --try plan.json --link 12GiB/s --device-memory 12GiB
  pyao report plan.json -o plan.html             the front of memory against time, drawn
"""

NUM_FRONT_POINTS = 9

NOT_FOR_TRYING = ("host_memory", "disk", "keep_last_layers", "allow_lossy", "compare")
"""Options that have no effect with ``--try``."""


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, a file is not what it should be, or nothing fits.
    """
    if args.compare:
        return _compare(args)
    if args.source is None:
        raise ConfigError(
            "expected a profile, a model, or --compare PLAN.json PLAN.json.", key="setting-missing"
        )
    if args.tried is not None:
        tell(_prediction_report(args), as_json=args.json, output=args.save)
        return 0
    if args.source.endswith(".json"):
        plan = computed(lambda: _plan(args), needs_models=False)
    else:  # it may have been kept
        from hf_pyao.plan.documents.plan import Plan

        plan = answered(args, args.source, Plan, lambda: _plan(args), tells=not args.json)
    tell(plan, as_json=args.json, output=args.save)
    if not args.json and not args.source.endswith(".json"):
        say(_what_peaks_hold(args, plan))
        if any(name.startswith("weights/") for name in plan.figures):
            from hf_pyao.plan.weights.weight_plan import said_of  # which imports torch

            if said_of(plan.figures):
                say(said_of(plan.figures))
    if args.save is not None and not args.json:
        from hf_pyao.plan.options.plan_levers import free_levers  # which imports torch

        # What is left open is set by the plan; what changes sums has to be asked for.
        free = free_levers(lever_config_of(args)) - {"mlp_tiles"}
        given = {name: v for name, v in levers_of(args).given().items() if name not in free}
        if given:
            say(f"follow it with: {', '.join(f'{name}={given[name]!r}' for name in given)}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.tools.report.terminal import show_view
    from hf_pyao.tools.report.views.plan_view import plans_side_by_side

    if len(args.compare) < 2 or args.source is not None:
        raise ConfigError(
            "--compare takes two or more plans, and nothing beside them.", key="settings-contradict"
        )
    plans = {str(path): Plan.from_json_file(path) for path in args.compare}
    show_view(plans_side_by_side(plans))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from hf_pyao.plan.documents.plan_facts import NO_FACTS
    from hf_pyao.plan.options.auto_plan import plan_of_choice
    from hf_pyao.plan.options.chosen_levers import LeverRoom
    from hf_pyao.plan.predict.profiled_step import ProfiledStep
    from hf_pyao.plan.predictor.predictor import Predictor
    from hf_pyao.plan.solve.planner import NoPlanFitsError
    from hf_pyao.plan.step.ends_on_host import ends_bytes
    from hf_pyao.plan.weights.weight_plan import figures_of, less_by_streaming
    from hf_pyao.tools.estimate.predicted_profile import profile_of, training_of
    from hf_pyao.tools.estimate.recorded_step import record_with

    is_profile = args.source.endswith(".json")
    of_models = [*given_levers(args), *given_of(args, "trained")]
    if is_profile and of_models:
        raise ConfigError(
            f"{', '.join(of_models)}: of a model's step, and the step of a profile is as "
            "it was recorded. Profile it with these settings, or drop them.",
            key="settings-contradict",
        )
    resident_blocks_of(args, is_profile=is_profile)
    training = None
    if not is_profile:
        training, named = training_of(args, args.source)
    hardware = _hardware_of(args, is_profile=is_profile)
    limit_bytes = _limit_bytes_of(args, hardware, training)
    if limit_bytes is None:
        raise ConfigError(
            "how much memory the device has is not in a profile: give --device-memory, as 11GiB.",
            key="device-memory-unknown",
        )
    if training is None:
        profile = read_profile(args)
    else:
        profile = profile_of(args, args.source, training, named)
    binds = binds_of(args, _config_for(args, profile), is_profile=is_profile)
    if training is None:
        room = LeverRoom(why_no_segments="a profile holds the one step that was measured")
        binds = dataclasses.replace(binds, room=room)
    with Progress("other levers", None, "steps", is_shown=not args.json) as progress:

        def record(levers: Levers) -> StepProgram:
            assert training is not None
            progress.done(levers.describe())
            return record_with(training, binds.levers)(
                args.micro_batch, args.sequence_length, levers
            )

        profiled = ProfiledStep.of(profile, **_elsewhere(args, hardware, is_profile=is_profile))
        if training is not None:
            program = training.with_optimizer(profiled.program)
            profiled = dataclasses.replace(profiled, program=program)
        found = Predictor.of_profile(profiled, binds, record).choice().checked().best(limit_bytes)
    chosen, facts = found.levers, NO_FACTS
    figures: dict[str, float] = {}
    if binds.stream_weights != OFF:
        figures = figures_of(found.weights)
        if binds.ends_on_host:
            figures["weights/embeddings_and_head_bytes"] = float(ends_bytes(profiled.program))
        facts = dataclasses.replace(NO_FACTS, resident_blocks=found.weights.num_resident)
    if training is not None:
        program = (chosen.configured if binds.stream_weights == OFF else chosen.planner).program
        _check_optimizer_step(program, limit_bytes, less_by_streaming(program))
        figures |= _beside_figures(training, program)
    if not chosen.fits:
        help = (less_by_streaming(chosen.planner.program), chosen.levers.less_memory)
        raise NoPlanFitsError(
            f"{chosen.error} What would help: {', '.join(filter(None, help))}.",
            chosen.candidate.peak_bytes,
        )
    return plan_of_choice(
        chosen,
        limit_bytes=limit_bytes,
        model=profile.model,
        num_front_points=NUM_FRONT_POINTS,
        facts=facts,
        figures=figures,
    )


def _prediction_report(args: argparse.Namespace) -> Any:
    """Predict the step of a profile under the plans of ``--try``.

    Returns:
        A :class:`~hf_pyao.plan.documents.prediction.PredictionReport`.

    Raises:
        PyAOError: an option is bad, or a file is not what it should be.
    """
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.options.plan_request import PlanRequest
    from hf_pyao.plan.predict.profiled_step import ProfiledStep
    from hf_pyao.plan.predictor.predicted_plans import levers_profiled, prediction_of

    refuse_without_effect(args, NOT_FOR_TRYING, "--try")
    profile = read_profile(args)
    hardware = _hardware_of(args, is_profile=True)
    given = {} if args.window is None else {"window": _number_or_text(args.window)}
    allocator = AllocatorSettings.parse(args.alloc_conf)
    binds = PlanRequest.of_config(PyAOConfig.from_dict(given), allocator=allocator)
    return prediction_of(
        ProfiledStep.of(profile, **_elsewhere(args, hardware, is_profile=True)),
        dataclasses.replace(binds, levers=levers_profiled(profile)),
        {str(path): Plan.from_json_file(path) for path in args.tried},
        limit_bytes=_limit_bytes_of(args, hardware, None),
        device_name=profile.device if hardware is None else hardware.name,
    )


def _hardware_of(args: argparse.Namespace, *, is_profile: bool) -> Hardware | None:
    """Return the card that is planned for; None: the device of the profile."""
    from hf_pyao.plan.hardware.presets import find_hardware
    from hf_pyao.tools.estimate.common_arguments import link_gib_per_s

    named = args.device or (None if is_profile else "rtx4070")
    hardware = None if named is None else find_hardware(named)
    if hardware is not None and args.link is not None:
        hardware = hardware.with_link(link_gib_per_s(args.link))
    if args.disk is not None:
        if args.host_memory is None or args.stream_weights == OFF:
            raise ConfigError(
                "--disk has the streamed weights for which the host has no room: give "
                "--stream-weights, such as auto, and --host-memory, such as 32GiB, too.",
                key="setting-missing",
            )
        if hardware is None:
            raise ConfigError(
                "--disk with a profile needs the card: give --device, too.", key="setting-missing"
            )
        hardware = hardware.with_disk(link_gib_per_s(args.disk, "--disk"))
    return hardware


def _limit_bytes_of(
    args: argparse.Namespace, hardware: Hardware | None, training: FakeTraining | None
) -> int | None:
    """Return the memory that the plan has to fit into; None if it is neither given nor known."""
    from hf_pyao.settings.sizes import Size
    from hf_pyao.tools.estimate.card_memory import card_memory

    if args.device_memory is not None:
        return int(Size().check("--device-memory", args.device_memory))
    if hardware is None:
        return None
    return card_memory(hardware, None if training is None else training.kernels).limit_bytes


def _what_peaks_hold(args: argparse.Namespace, plan: Plan) -> str:
    """Say in one line what the peaks of a model's plan hold beside activations."""
    if args.engine == "zero2":
        bucket = plan.figures.get("bucket_bytes", 0.0) / 1e9
        where = f"gradients leave through a bucket of {bucket:.2f} GB, the optimizer is on the host"
    else:
        where = f"gradients and the states of {args.optimizer} stay on the device; no bucket"
    inside = plan.figures.get("workspace_bytes", 0.0) / 1e9
    return f"peaks are for engine {args.engine} ({where}); a kernel allocates up to {inside:.3f} GB"


def _beside_figures(training: FakeTraining, program: StepProgram) -> dict[str, float]:
    """Return what the peaks of a plan hold beside what is planned, by name."""
    from hf_pyao.plan.predict.optimizer_step import optimizer_step_bytes

    found = {
        "bucket_bytes": float(training.bucket_bytes),
        "workspace_bytes": float(max(each.workspace_bytes for each in program.operations)),
        "optimizer_step_bytes": float(optimizer_step_bytes(program)),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _check_optimizer_step(program: StepProgram, limit_bytes: float, less_by_streaming: str) -> None:
    """Refuse where the optimizer's step does not fit, whatever is offloaded.

    Args:
        program: the step before it.
        limit_bytes: what it may take.
        less_by_streaming: what streamed weights would take off, in words; empty: nothing.

    Raises:
        NoPlanFitsError: it takes more.
    """
    from hf_pyao.plan.predict.optimizer_step import optimizer_step_bytes
    from hf_pyao.plan.solve.planner import NoPlanFitsError

    nbytes = optimizer_step_bytes(program)
    if nbytes > limit_bytes:
        raise NoPlanFitsError(
            f"the optimizer's step takes {nbytes / 1e9:.2f} GB: weights, gradients, states and its "
            f"temporaries; a step may take {limit_bytes / 1e9:.2f} GB. What would help: "
            + (f"{less_by_streaming}, " if less_by_streaming else "")
            + "--optimizer-step fused, an --optimizer with smaller states, --lora, --engine zero2.",
            nbytes,
        )


def _config_for(args: argparse.Namespace, profile: Profile) -> PyAOConfig:
    """Return what binds the plan: options, and the levers that a profiled step was run with."""
    more: dict[str, Any] = {"allow_lossy": args.allow_lossy}
    if args.window is not None:
        more["window"] = _number_or_text(args.window)
    if args.keep_last_layers is not None:
        more["keep_last_layers"] = args.keep_last_layers
    config = lever_config_of(args, **more)
    if not args.source.endswith(".json"):
        return config
    for name, value in profile.settings.items():
        gone = removed(name, value)
        if gone is not None:
            say(f"pyao plan: the profile is of an earlier version: {gone.said_of(name, value)}")
        elif name in Levers.names() and value is not None:
            more[name] = value
    return PyAOConfig.from_dict(more)


def _elsewhere(
    args: argparse.Namespace, hardware: Hardware | None, *, is_profile: bool
) -> dict[str, Any]:
    """Return for what a profiled step is predicted, where that is not what was profiled."""
    from hf_pyao.plan.hardware.speeds import LinkModel
    from hf_pyao.tools.estimate.common_arguments import link_gib_per_s

    if hardware is not None:
        kernels = hardware.kernels if is_profile else None
        return {"device": hardware.device, "link": hardware.link, "kernels": kernels}
    if args.link is None:
        return {}
    speed = link_gib_per_s(args.link)
    return {"link": LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed)}


def read_profile(args: argparse.Namespace) -> Profile:
    """Return the profile that a command is given.

    Raises:
        ConfigError: the file is another document.
    """
    from hf_pyao.plan.documents.profile import Profile
    from hf_pyao.tools.report.kinds import read_document

    profile = read_document(args.source)
    if not isinstance(profile, Profile):
        raise ConfigError(
            f"{echo(args.source)} is a document of kind {profile.kind!r}; expected a profile "
            "(pyao profile).",
            key="file-kind",
        )
    return profile


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdigit() else text
