"""``pyao predict``: what a profiled step would come to under plans."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_pyao.config import DEFAULT_WINDOW_BYTES, PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.text import echo, one_line, say
from hf_pyao.tools.estimate.command import add_allocator_argument

DESCRIPTION = """\
Predict the step of a profile (pyao profile) under plans: its time, what it waits for copies, the
peak on the device and what sets it, and the host's memory. With the times that were measured, or on
another device. A measured profile is shown beside what is predicted for it.
"""

EPILOG = """\
examples
  pyao predict profile.json
  pyao predict profile.json --link 12GiB/s --device-memory 12GiB
  pyao predict profile.json --device h100
  pyao predict profile.json --plan plan.json --output prediction.json
"""


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options and help to *parser*."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("profile", type=Path, metavar="PROFILE.json")
    parser.add_argument(
        "--plan", type=Path, action="append", default=[], metavar="PLAN.json", help="a plan to try"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="another device, as for pyao estimate, in place of times"
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="what may be reserved for tensors, as 11GiB (default: the memory of --device less the "
        "CUDA context)",
    )
    add_allocator_argument(parser)
    parser.add_argument(
        "--link", metavar="SPEED", help="speed of the link in each direction, as 25GiB/s"
    )
    parser.add_argument(
        "--window",
        default=str(DEFAULT_WINDOW_BYTES),
        help="bytes in flight, or 'layer' (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, which `pyao report` reads")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the JSON here too")


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, or a file is not what it should be.
    """
    from hf_pyao.plan.documents.schema import to_plain, write_json
    from hf_pyao.tools.report.tables import markdown_of

    report = _report(args)
    if args.output is not None:
        write_json(args.output, report)
    if args.json:
        say(json.dumps(to_plain(report), indent=2))
    else:
        say(markdown_of(report))
        if args.output is not None:
            say(f"written: {one_line(str(args.output))}")
    return 0


def _report(args: argparse.Namespace) -> Any:
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.plan.documents.profile import Profile
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.hardware.presets import find_hardware
    from hf_pyao.plan.hardware.speeds import LinkModel
    from hf_pyao.plan.predict.forecast import Forecast
    from hf_pyao.plan.predict.predicted_plans import prediction_of
    from hf_pyao.settings import Size
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.command import link_gib_per_s
    from hf_pyao.tools.report.kinds import read_document

    profile = read_document(args.profile)
    if not isinstance(profile, Profile):
        raise ConfigError(
            f"{echo(str(args.profile))} is a document of kind {profile.kind!r}; expected a profile "
            "(pyao profile)."
        )
    hardware = None if args.device is None else find_hardware(args.device)
    link = None if hardware is None else hardware.link
    if args.link is not None:
        speed = link_gib_per_s(args.link)
        link = LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed)
    limit_bytes = None if hardware is None else card_memory(hardware).limit_bytes
    if args.device_memory is not None:
        limit_bytes = int(Size().check("--device-memory", args.device_memory))
    window = PyAOConfig.from_dict({"window": _number_or_text(args.window)}).effective().window
    forecast = Forecast(
        profile,
        device=None if hardware is None else hardware.device,
        link=link,
        window_bytes=None if isinstance(window, str) else window,
        kernels=None if hardware is None else hardware.kernels,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    plans = {str(path): Plan.from_json_file(path) for path in args.plan}
    return prediction_of(
        forecast,
        plans,
        limit_bytes=limit_bytes,
        device_name=profile.device if hardware is None else hardware.name,
    )


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdigit() else text
