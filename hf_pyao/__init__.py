"""Activation offloading for HuggingFace training.

Names are imported on first use, so that ``import hf_pyao`` initialises no device and imports
neither transformers nor datasets.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_pyao.config import PyAOConfig as PyAOConfig
    from hf_pyao.documents.plan import Plan as Plan
    from hf_pyao.documents.profile import Profile as Profile
    from hf_pyao.integrations.accelerator import PyAOAccelerator as PyAOAccelerator
    from hf_pyao.integrations.arguments import PyAOArguments as PyAOArguments
    from hf_pyao.integrations.arguments import PyAOTrainingArguments as PyAOTrainingArguments
    from hf_pyao.integrations.attach import Offloader as Offloader
    from hf_pyao.integrations.attach import attach as attach
    from hf_pyao.integrations.callback import PyAOCallback as PyAOCallback
    from hf_pyao.integrations.module_map import ModuleMap as ModuleMap
    from hf_pyao.integrations.module_map import register_module_map as register_module_map
    from hf_pyao.integrations.out_of_memory import (
        OutOfDeviceMemoryError as OutOfDeviceMemoryError,
    )
    from hf_pyao.integrations.plugin import PyAOPlugin as PyAOPlugin
    from hf_pyao.integrations.trainer import PyAOTrainer as PyAOTrainer
    from hf_pyao.integrations.trainer import PyAOTrainerMixin as PyAOTrainerMixin

_HOMES = {
    "ModuleMap": "hf_pyao.integrations.module_map",
    "Offloader": "hf_pyao.integrations.attach",
    "OutOfDeviceMemoryError": "hf_pyao.integrations.out_of_memory",
    "Plan": "hf_pyao.documents.plan",
    "Profile": "hf_pyao.documents.profile",
    "PyAOAccelerator": "hf_pyao.integrations.accelerator",
    "PyAOArguments": "hf_pyao.integrations.arguments",
    "PyAOCallback": "hf_pyao.integrations.callback",
    "PyAOConfig": "hf_pyao.config",
    "PyAOPlugin": "hf_pyao.integrations.plugin",
    "PyAOTrainer": "hf_pyao.integrations.trainer",
    "PyAOTrainerMixin": "hf_pyao.integrations.trainer",
    "PyAOTrainingArguments": "hf_pyao.integrations.arguments",
    "attach": "hf_pyao.integrations.attach",
    "register_module_map": "hf_pyao.integrations.module_map",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the home of *name* on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_pyao' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
