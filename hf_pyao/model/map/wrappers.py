"""Look through what training libraries wrap around a model or a layer, without importing them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_pyao.errors import ConflictError
from hf_pyao.training_engines import ENGINES, Feature, engine_of_module, is_compiled, package_of

_INNER_MODULE_ATTRIBUTES = {
    **{
        f"{package}.{name}": engine.inner_attribute
        for engine in ENGINES
        for name, package in engine.classes.items()
        if engine.inner_attribute
    },
    "peft.AdaptionPromptModel": "model",
    "peft.BaseTuner": "model",  # LoraModel and its like
    "peft.PeftMixedModel": "base_model",
    "peft.PeftModel": "base_model",
    "torch.ActivationWrapper": "_checkpoint_wrapped_module",  # base of CheckpointWrapper
}
"""``package.Class`` of a wrapper (or of a base class of it) -> attribute with what it wraps."""

_WRAPPER_PATH_PARTS = frozenset(
    attribute for attribute in _INNER_MODULE_ATTRIBUTES.values() if attribute.startswith("_")
)
"""Path components that wrappers add below the root; no model has modules of these names."""


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return what *module* wraps, one level down; None if it is no wrapper.

    Raises:
        ConflictError: *module* is a wrapper under which nothing can be offloaded
            (``nn.DataParallel``).
    """
    if reason := engine_of_module(module).refusal(Feature.OFFLOADING):
        raise ConflictError(reason, key="data-parallel")
    for cls in type(module).__mro__:
        if attribute := _INNER_MODULE_ATTRIBUTES.get(f"{package_of(cls)}.{cls.__name__}"):
            inner = getattr(module, attribute)
            return inner if isinstance(inner, nn.Module) else None
    return None


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, nested in any order.

    Seen through: DistributedDataParallel, FullyShardedDataParallel, DeepSpeedEngine, the module of
    ``torch.compile``, activation-checkpoint wrappers, and PEFT's models. FSDP2 (``fully_shard``)
    and ``module.compile()`` change the module in place and leave nothing to unwrap.

    Raises:
        ConflictError: an ``nn.DataParallel`` is among the wrappers.
    """
    while (inner := wrapped_module(model)) is not None:
        model = inner
    return model


def unwrap_parallel(model: nn.Module) -> nn.Module:
    """Return what users call inside of wrappers that spread a model over devices, or compile it.

    PEFT's models are called themselves, and stay.
    """
    while True:
        packages = {package_of(cls) for cls in type(model).__mro__}
        inner = None if "peft" in packages else wrapped_module(model)
        if inner is None:
            return model
        model = inner


def class_name(module: nn.Module) -> str:
    """Return the class name of what *module* wraps, without the prefix that FSDP2 adds to it."""
    inner = unwrap_model(module)
    return type(inner).__name__.removeprefix(engine_of_module(inner).class_prefix)


def is_compiled_whole(model: nn.Module) -> bool:
    """Say whether *model*, what it wraps, or a wrapper in between is compiled."""
    wrapper: nn.Module | None = model
    while wrapper is not None:
        if is_compiled(wrapper):
            return True
        wrapper = wrapped_module(wrapper)
    return False


def plain_path(path: str) -> str:
    """Return a module path without the components that per-layer wrappers add to it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PATH_PARTS)


def named_submodules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(path, module)`` for a layer and everything below it, by plain path.

    The paths are the same whether or not the layer, or a part of it, is compiled, checkpointed or
    sharded; a wrapper and what it wraps have the same path, the wrapper coming first. The layer
    itself is ``""``.
    """
    for path, module in layer.named_modules():
        yield plain_path(path), module
