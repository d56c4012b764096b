"""``pyao plan --try``: what a profiled step would come to under plans that are given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.text import echo

NOT_FOR_TRYING = ("host_memory", "disk", "keep_last_layers", "allow_lossy", "compare")
"""Options of ``pyao plan`` that have no effect with ``--try``."""


def prediction_report(args: argparse.Namespace) -> Any:
    """Predict the step of a profile under the plans of ``--try``.

    Returns:
        A :class:`~hf_pyao.plan.documents.prediction.PredictionReport`.

    Raises:
        PyAOError: an option is bad, or a file is not what it should be.
    """
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.plan.documents.profile import Profile
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.hardware.presets import find_hardware
    from hf_pyao.plan.hardware.speeds import LinkModel
    from hf_pyao.plan.predict.forecast import Forecast
    from hf_pyao.plan.predict.predicted_plans import prediction_of
    from hf_pyao.settings.sizes import Size
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.common_arguments import link_gib_per_s
    from hf_pyao.tools.report.kinds import read_document

    useless = [name for name in NOT_FOR_TRYING if getattr(args, name) not in (None, False)]
    if useless:
        flags = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise ConfigError(
            f"{flags} has no effect with --try: drop one of them.", key="setting-without-effect"
        )
    profile = read_document(Path(args.source))
    if not isinstance(profile, Profile):
        raise ConfigError(
            f"{echo(args.source)} is a document of kind {profile.kind!r}; expected a profile "
            "(pyao profile).",
            key="file-kind",
        )
    hardware = None if args.device is None else find_hardware(args.device)
    link = None if hardware is None else hardware.link
    if args.link is not None:
        speed = link_gib_per_s(args.link)
        link = LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed)
    limit_bytes = None if hardware is None else card_memory(hardware).limit_bytes
    if args.device_memory is not None:
        limit_bytes = int(Size().check("--device-memory", args.device_memory))
    given = {} if args.window is None else {"window": _number_or_text(args.window)}
    window = PyAOConfig.from_dict(given).effective().window
    forecast = Forecast(
        profile,
        device=None if hardware is None else hardware.device,
        link=link,
        window_bytes=None if isinstance(window, str) else window,
        kernels=None if hardware is None else hardware.kernels,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    plans = {str(path): Plan.from_json_file(path) for path in args.tried}
    return prediction_of(
        forecast,
        plans,
        limit_bytes=limit_bytes,
        device_name=profile.device if hardware is None else hardware.name,
    )


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdigit() else text
