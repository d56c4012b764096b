"""Activation offloading for HuggingFace training.

Names are imported on first use, so that ``import hf_pyao`` initialises no device and imports
neither transformers nor datasets.
"""

from typing import TYPE_CHECKING, Any

from hf_pyao.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_pyao.attachment import attach as attach
    from hf_pyao.auto.offloader import Offloader as Offloader
    from hf_pyao.auto.retry.out_of_memory import OutOfDeviceMemoryError as OutOfDeviceMemoryError
    from hf_pyao.auto.zeroth_order.step import ZerothOrder as ZerothOrder
    from hf_pyao.auto.zeroth_order.step import zeroth_order_step as zeroth_order_step
    from hf_pyao.config import PyAOConfig as PyAOConfig
    from hf_pyao.engine.zeroth_order.perturbation import ZerothOrderSettings as ZerothOrderSettings
    from hf_pyao.errors import ConfigError as ConfigError
    from hf_pyao.errors import PyAOError as PyAOError
    from hf_pyao.hf.accelerator import PyAOAccelerator as PyAOAccelerator
    from hf_pyao.hf.arguments import PyAOArguments as PyAOArguments
    from hf_pyao.hf.arguments import PyAOTrainingArguments as PyAOTrainingArguments
    from hf_pyao.hf.callback import PyAOCallback as PyAOCallback
    from hf_pyao.hf.plugin import PyAOPlugin as PyAOPlugin
    from hf_pyao.hf.shared_loading import one_copy_per_node as one_copy_per_node
    from hf_pyao.hf.trainer import PyAOTrainer as PyAOTrainer
    from hf_pyao.hf.trainer import PyAOTrainerMixin as PyAOTrainerMixin
    from hf_pyao.hf.zeroth_order import PyAOZerothOrderTrainer as PyAOZerothOrderTrainer
    from hf_pyao.model.map.architectures import ModuleMap as ModuleMap
    from hf_pyao.model.map.architectures import register_module_map as register_module_map
    from hf_pyao.plan.documents.plan import Plan as Plan
    from hf_pyao.plan.documents.profile import Profile as Profile

_HOMES = {
    "ConfigError": "hf_pyao.errors",
    "ModuleMap": "hf_pyao.model.map.architectures",
    "Offloader": "hf_pyao.auto.offloader",
    "OutOfDeviceMemoryError": "hf_pyao.auto.retry.out_of_memory",
    "Plan": "hf_pyao.plan.documents.plan",
    "Profile": "hf_pyao.plan.documents.profile",
    "PyAOAccelerator": "hf_pyao.hf.accelerator",
    "PyAOArguments": "hf_pyao.hf.arguments",
    "PyAOCallback": "hf_pyao.hf.callback",
    "PyAOConfig": "hf_pyao.config",
    "PyAOError": "hf_pyao.errors",
    "PyAOPlugin": "hf_pyao.hf.plugin",
    "PyAOTrainer": "hf_pyao.hf.trainer",
    "PyAOTrainerMixin": "hf_pyao.hf.trainer",
    "PyAOTrainingArguments": "hf_pyao.hf.arguments",
    "PyAOZerothOrderTrainer": "hf_pyao.hf.zeroth_order",
    "ZerothOrder": "hf_pyao.auto.zeroth_order.step",
    "ZerothOrderSettings": "hf_pyao.engine.zeroth_order.perturbation",
    "attach": "hf_pyao.attachment",
    "one_copy_per_node": "hf_pyao.hf.shared_loading",
    "register_module_map": "hf_pyao.model.map.architectures",
    "zeroth_order_step": "hf_pyao.auto.zeroth_order.step",
}

__all__ = sorted(_HOMES)


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
