"""Profiles whichever model a script trains, as long as it runs."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hf_pyao.attachment import attach, offloader_of
from hf_pyao.auto.offloader import Offloader
from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConflictError, NoLayersFoundError, PyAOError, warn
from hf_pyao.plan.documents.profile import Profile

logger = logging.getLogger(__name__)


class ProfileIsDone(SystemExit):
    """Ends a script whose profile is complete; raised where its next forward would begin."""


class ScriptProfiler:
    """While active, attaches to the first model in training that has layers, and profiles it.

    A model that the script has attached itself is profiled as it is; others with policy ``all``.

    Args:
        path: the JSON file to write.
        num_micro_batches: how many are measured.
        stops: end the script when that is done, by :class:`ProfileIsDone`.
    """

    def __init__(self, path: Path, num_micro_batches: int, *, stops: bool) -> None:
        self._path = path.absolute()  # wherever the script goes meanwhile
        self._num_micro_batches = num_micro_batches
        self._stops = stops
        self._offloader: Offloader | None = None
        self._is_ours = False
        self._tried: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle: Any = None
        self.refusal: PyAOError | None = None
        """Why a model could not be attached; None if none was refused."""

    @property
    def profile(self) -> Profile | None:
        """What was measured; None before."""
        writer = None if self._offloader is None else self._offloader.profile_writer
        return None if writer is None else writer.profile

    def __enter__(self) -> ScriptProfiler:
        """Begin to look at each module that is called."""
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop, and write what is there."""
        self._handle.remove()
        if self._offloader is None:
            return
        if self._is_ours:
            self._offloader.detach()
        elif self._offloader.profile_writer is not None:
            self._offloader.profile_writer.end()

    def _look(self, module: nn.Module, args: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._offloader is None:
            self._attach(module)
        elif self._stops and module in self._tried and self.profile is not None:
            writer = self._offloader.profile_writer
            assert writer is not None
            writer.end()
            raise ProfileIsDone(0)

    def _attach(self, module: nn.Module) -> None:
        if module in self._tried:
            return
        self._tried.add(module)
        config = PyAOConfig(policy="all", profile=self._path, profile_steps=self._num_micro_batches)
        try:
            self._offloader = offloader_of(module)
            if self._offloader is None:
                self._offloader, self._is_ours = attach(module, config), True
            else:
                self._offloader.start_profile(self._path, self._num_micro_batches)
        except NoLayersFoundError:
            pass
        except ConflictError as error:
            self.refusal = error
            warn(logger, "nothing-measured", "this model is not profiled: %s", error)
