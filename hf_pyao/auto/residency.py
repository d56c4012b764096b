"""How many layers' frozen weights stay on the device, where ``stream_weights`` is ``"auto"``.

Embeddings and head leave last (``stream_embeddings="auto"``): where no layer stays, and the step
does not fit.

When a model is attached, its batches are not known: as many layers stay as leave a share of the
device free. Before the first forward in training the step is recorded on fake tensors, with the
configured policy. From then on, as many layers stay as fit beside the step's other tensors. Policy
``auto`` chooses the number together with its plans. When memory runs out, all are streamed.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from torch import nn

from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.recording.forward_watch import ForwardWatch, Place
from hf_pyao.auto.recording.model_copy import CopiedStep
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.plan.hardware.device_limit import beside_bytes
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.options.chosen_levers import FIXED
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import REFERENCE
from hf_pyao.plan.predictor.predictor import Card, Predictor
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL
from hf_pyao.plan.weights.choice import StreamingChoice
from hf_pyao.plan.weights.first_residents import optimizer_bytes
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)

OFFLOADING = ("all", "auto", "pyao")
"""Policies under which everything that may be offloaded is, before they have a plan."""

_ANY_LINK = LinkModel(d2h_gib_per_s=16.0, h2d_gib_per_s=16.0)
"""What fits does not depend on it: copies are taken to be late."""


class Residency:
    """Asks the streamed layers of one model to stay, as many as fit.

    Args:
        streaming: the layers.
        settings: layers, levers, and how much memory the device has.
        request: what binds the step: window, layers that are kept, least size.
        policy: name of the configured policy.
    """

    def __init__(
        self, streaming: StreamedLayers, settings: AutoSettings, request: PlanRequest, policy: str
    ) -> None:
        self._streaming = streaming
        self._settings = settings
        self._request = request
        self._policy = policy
        self._unplanned = streaming.num_resident
        self._is_planned = False
        self._watch: ForwardWatch | None = None

    # ---- what the machine asks for -------------------------------------------------------------

    @property
    def can_stream_more(self) -> bool:
        """True while weights stay that could be streamed."""
        return self._layers_stay or self._streaming.can_ask_for_ends

    @property
    def _layers_stay(self) -> bool:
        streaming = self._streaming
        if streaming.memory.disk.placed is not None:  # they keep their places
            return False
        return streaming.num_asked_for > streaming.least_resident

    def ask_for(self, num_resident: int) -> None:
        """Let so many layers stay from the next forward on, as a plan has it."""
        self._is_planned = True
        self._streaming.ask_for(num_resident)

    def ask_for_unplanned(self) -> None:
        """Let as many stay as before there was a plan."""
        self._is_planned = False
        self._streaming.ask_for(min(self._unplanned, self._streaming.num_asked_for))

    def stream_all(self) -> None:
        """Let no layer stay from the next forward on, since memory ran out.

        Where none stays already, embeddings and head leave.
        """
        self._unplanned = 0
        if self._layers_stay or not self._streaming.can_ask_for_ends:
            self._streaming.ask_for(0)
        else:
            self._streaming.ask_for_ends()

    # ---- before the first forward --------------------------------------------------------------

    def start(self, model: nn.Module, owner: object) -> None:
        """Look at *model*'s first forward in training, unless a plan will say how many stay."""
        if self._streaming.num_resident < self._streaming.num_layers or self._policy != "auto":
            self._watch = ForwardWatch(model, owner, self._before_forward, Place.FITS)

    def end(self) -> None:
        """Look no more. Twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()

    def _before_forward(self, seen: SeenForward, *, is_first: bool) -> None:
        watch = self._watch
        if watch is None:
            return
        make = watch.steps(is_newest=True)
        self.end()
        if self._is_planned:
            return
        try:
            number = self._most_that_fit(make())
        except Exception as error:  # no reason to end a training
            logger.info(
                "%s: the step cannot be recorded, so that the weights of %d of %d layers stay, as "
                "at first (%s).",
                self._settings.label("stream_weights"),
                self._streaming.num_resident,
                self._streaming.num_layers,
                describe_error(error),
            )
            return
        self._unplanned = number
        self._streaming.ask_for(self._unplanned)
        if self._unplanned != self._streaming.num_resident:
            logger.info(
                "%s: %d of %d layers stay on the device, by the first batch.",
                self._settings.label("stream_weights"),
                self._unplanned,
                self._streaming.num_layers,
            )

    def _most_that_fit(self, step: CopiedStep) -> int:
        """Return how many layers' weights fit beside what the configured policy leaves."""
        given, request = self._settings.given, self._request
        recorded, _ = record_fake_step(step, levers=given.levers, layers=self._settings.layers)
        predictor = Predictor(
            lambda _, levers: recorded.whole(),
            Card.of(REFERENCE, _ANY_LINK),
            dataclasses.replace(request, room=FIXED, stream_weights="auto"),
        )
        choice = predictor.choice()
        simple = choice.resident.configured.simple()
        held = simple.get(OFFLOAD_ALL) if self._policy in OFFLOADING else None
        limit_bytes = self._limit_bytes(choice)
        number = choice.fewest_streamed(held or simple[KEEP_ALL], limit_bytes)
        if self._streaming.can_ask_for_ends and not choice.fits(
            held or simple[KEEP_ALL], number, limit_bytes
        ):
            self._streaming.ask_for_ends()
        return self._streaming.num_layers - number

    def _limit_bytes(self, choice: StreamingChoice) -> float:
        limit = self._settings.device_limit(self._streaming.device)
        if limit is None:
            return math.inf
        parameters = self._streaming.parameters()
        now_bytes = choice.resident_bytes(self._streaming.num_resident)
        beside = beside_bytes(limit, now_bytes, parameters)
        return limit.nbytes - max(beside, optimizer_bytes(parameters))
