"""The step of a profile of either kind: what its operations and its copies take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.predict.calibration import times_of
from hf_pyao.plan.predict.host_times import host_costs_of
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram

BLOCKING = "blocking"
"""Name of the transport under which compute stands still while copies run."""


class ForecastError(PyAOError, ValueError):
    """A profile does not hold what a prediction needs."""


@dataclass(frozen=True)
class ProfiledStep:
    """What predictions take of a profile."""

    profile: Profile
    program: StepProgram
    times_ms: Sequence[float]
    """Of each operation."""
    link: LinkModel
    device: DeviceModel | None
    """Another device than the profile's; None: as it was profiled."""
    is_elsewhere: bool
    """It is not for what was profiled."""
    host: HostCosts | None
    """What a step costs the host; None: not known, or the host is the device."""

    @classmethod
    def of(
        cls,
        profile: Profile,
        *,
        device: DeviceModel | None = None,
        link: LinkModel | None = None,
        kernels: KernelSettings | None = None,
    ) -> ProfiledStep:
        """Return the step of *profile*.

        Args:
            profile: with its step in it.
            device: speeds of another device than the profile's; None: as it was profiled.
            link: speeds of another link; None: as it was profiled.
            kernels: that device, for what kernels allocate inside; None: as it was profiled.

        Raises:
            ForecastError: the step is not in the profile, or no speed of a link is known.
            ReportError: the step in it is damaged.
        """
        if profile.program is None:
            raise ForecastError(
                f"the step is not in the profile: {profile.why_no_program or 'no reason is given.'}"
                " Without it nothing can be predicted: profile the plain model, in one process.",
                key="profile-incomplete",
            )
        program = RecordedStep.from_dict(profile.program).whole()
        if kernels is not None:
            was = program.kernels  # the process's settings stay
            program = program.with_kernels(
                was._replace(
                    num_multiprocessors=kernels.num_multiprocessors, capability=kernels.capability
                )
            )
        return cls(
            profile,
            program,
            times_of(profile, program) if device is None else operation_times_ms(program, device),
            link or _link_of(profile),
            device,
            is_elsewhere=device is not None or link is not None,
            host=host_costs_of(profile, program) if device is None else None,
        )

    @property
    def is_blocking(self) -> bool:
        """True if compute stands still while copies run, as where the host is the device."""
        return not self.is_elsewhere and self.profile.settings.get("transport") == BLOCKING


def _link_of(profile: Profile) -> LinkModel:
    d2h, h2d = (profile.link.get(f"{each}_gib_per_s") for each in ("d2h", "h2d"))
    if not d2h and not h2d:
        raise ForecastError(
            "the profile does not know the link's speed, since nothing was copied. State it "
            "(--link 25GiB/s, or --device).",
            key="speeds-unknown",
        )
    d2h, h2d = d2h or h2d, h2d or d2h
    assert d2h is not None
    assert h2d is not None
    if d2h <= 0 or h2d <= 0:
        raise ForecastError(
            f"the link of the profile has speeds of {d2h} and {h2d} GiB/s; expected more than 0.",
            key="speeds-unknown",
        )
    return LinkModel(d2h_gib_per_s=d2h, h2d_gib_per_s=h2d)
