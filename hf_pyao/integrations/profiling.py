"""Writes the profile that the configuration asks for, when its micro-batches have run."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_pyao.errors import PyAOError
from hf_pyao.integrations.run_record import is_main_process
from hf_pyao.planning.profile import StepProfiler
from hf_pyao.report.profile_report import Profile
from hf_pyao.report.schema import write_json
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.transfer.transport import Transport

logger = logging.getLogger(__name__)


class ProfileWriter:
    """Has an engine's first micro-batches measured, and writes what came of it.

    Args:
        engine: what is measured.
        transport: whose clock is used.
        device: where the model is.
        path: the JSON file to write.
        num_micro_batches: how many are measured.
        title: a heading.
        model: what tells the model.
        layer_names: qualified names of its layers.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        transport: Transport,
        device: torch.device,
        *,
        path: str | os.PathLike[str],
        num_micro_batches: int,
        title: str,
        model: Mapping[str, Any],
        layer_names: Sequence[str],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._device = device
        self._path = path
        self._title = title
        self._model = dict(model)
        self._layer_names = tuple(layer_names)
        self.profile: Profile | None = None
        """What was measured; None until then."""
        engine.observe_too(StepProfiler(transport, device, num_micro_batches, self._write))

    def _write(self, profiler: StepProfiler) -> None:
        engine = self._engine()
        if engine is None:
            return
        engine.stop_observing(profiler)
        stats = engine.last_stats
        self.profile = profiler.profile(
            title=self._title,
            model=self._model,
            layer_names=self._layer_names,
            device_name=_name_of(self._device),
            metrics={} if stats is None else stats.as_dict(),
        )
        if not is_main_process():
            return
        try:
            write_json(self._path, self.profile)
            logger.info("the profile is written: %s", os.fspath(self._path))
        except PyAOError as error:  # no reason to end a training
            logger.warning("the profile is lost: %s", error)


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type.upper()
