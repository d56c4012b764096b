"""``PyAOAccelerator``: an ``Accelerator`` with the plugin bound to it."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from hf_pyao.hf.plugin import PyAOPlugin


class PyAOAccelerator(Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that offloads the models it prepares.

    Args:
        pyao_plugin: what to offload and how; None for a ``PyAOPlugin()``, which the ``PYAO_*``
            environment variables fill (``PYAO_ENABLED=false`` turns offloading off).
        *args: as ``Accelerator`` takes them.
        **kwargs: as ``Accelerator`` takes them.
    """

    def __init__(self, *args: Any, pyao_plugin: PyAOPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pyao_plugin = PyAOPlugin() if pyao_plugin is None else pyao_plugin
        self.pyao_plugin.bind(self)
