"""Models as users name them: a known size, an architecture with its settings, a folder, the hub."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError, nearest, unknown_name
from hf_pyao.tools.estimate.model_sizes import MODEL_SIZES, ModelSize

SizeTable = Mapping[str, Mapping[str, ModelSize]]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A causal language model with random weights."""

    name: str
    """As tables show it."""
    model_type: str | None = None
    """transformers' name of the architecture; None if :attr:`path` says it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the architecture's config class."""
    path: str | None = None
    """A folder with a ``config.json``, or a model on the hub; its configuration alone is read."""


def parse_model(text: str, sizes: SizeTable = MODEL_SIZES) -> ModelSpec:
    """Return the model that *text* names.

    Args:
        text: ``ARCH:key=value,...`` (any causal LM of transformers, sized by its config's
            arguments, values as JSON or text), ``ARCH:SIZE`` where *sizes* knows it, or a folder
            or hub name whose ``config.json`` is read.
        sizes: known sizes by architecture.

    Raises:
        ConfigError: the size or the form is unknown.
    """
    architecture, colon, rest = text.partition(":")
    if not colon:
        path = Path(text)
        return ModelSpec(name=path.name if path.is_dir() else text, path=text)
    if "=" not in rest:
        known = sizes.get(architecture, {})
        if rest.lower() not in known:
            if known:
                raise unknown_name(f"size of {architecture}", rest, known)
            _check_architecture(architecture, f":{rest}")
            raise ConfigError(
                f"model {text!r}: no sizes of {architecture!r} are known by name here. Write "
                f"{architecture}:hidden_size=2048,num_hidden_layers=24,... (arguments of its "
                "config class), or give a folder with a config.json.",
                key="model-spec",
            )
        settings = dict(known[rest.lower()].settings)
        return ModelSpec(name=f"{architecture} {rest}", model_type=architecture, settings=settings)
    settings = {}
    for pair in rest.split(","):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"model {text!r}: {pair!r} is no key=value pair.", key="model-spec")
        settings[key.strip()] = parse_value(value)
    return ModelSpec(name=f"custom {architecture}", model_type=architecture, settings=settings)


def parse_value(text: str) -> Any:
    """Return *text* as JSON if it is some, else as it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def config_of(spec: ModelSpec) -> Any:
    """Return the transformers configuration of a model.

    Raises:
        ConfigError: the architecture or a setting is unknown, or the configuration cannot be read.
    """
    from transformers import AutoConfig

    try:
        if spec.path is not None:
            config = AutoConfig.from_pretrained(spec.path)
            _check_architecture(config.model_type)
            return config
        architecture = spec.model_type or ""
        _check_architecture(architecture)
        config = AutoConfig.for_model(architecture, **spec.settings)
        _check_settings(spec, config)
    except ConfigError:
        raise
    except Exception as error:  # of whatever reads and checks configurations
        # Its first line; the next, too, where that is the cause.
        first = str(error).strip().replace(":\n", ": ").partition("\n")[0]
        reason = " ".join(first.split()) or type(error).__name__
        known = [f"{each}:{size}" for each, sizes in MODEL_SIZES.items() for size in sizes]
        meant = nearest(spec.name, known) if spec.path is not None else ""
        raise ConfigError(
            f"model {spec.name!r}{meant or ':'} {reason} Give an architecture of transformers with "
            "its settings (llama:hidden_size=64,...), or a folder with a config.json.",
            key="model-spec",
        ) from error
    return config


def _check_architecture(name: str, size: str = "") -> None:
    """Refuse what is no causal language model of transformers; *size* was given behind it.

    Raises:
        ConfigError: it is none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if name not in KNOWN:
        meant = nearest(name + size, [each + size for each in KNOWN])
        raise ConfigError(
            f"{name!r} is no causal language model of this transformers{meant or '.'} Give the "
            "model_type that its config.json has, such as llama, opt or gpt2, or a folder "
            "with a config.json.",
            key="model-spec",
        )


def _check_settings(spec: ModelSpec, config: Any) -> None:
    """Refuse settings that mean nothing: a config keeps any key, and the default is built.

    A key is known if the default config has it, or if the config made something else of it.

    Raises:
        ConfigError: one is unknown.
    """
    from transformers import AutoConfig, PretrainedConfig

    default = AutoConfig.for_model(spec.model_type or "")
    for key in spec.settings:
        if not hasattr(default, key) and hasattr(config, key):
            own = set(default.to_dict()) - set(PretrainedConfig().to_dict())
            raise unknown_name(f"setting of {spec.model_type}", key, own)


def most_positions(config: Any) -> int | None:
    """Return the positions that a model has a table for; None if any length will do."""
    if getattr(config, "rope_theta", None) or getattr(config, "rope_parameters", None):
        return None
    if getattr(config, "rope_scaling", None):
        return None
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None or not math.isfinite(longest) else int(longest)


def check_sequence_length(config: Any, sequence_length: int) -> None:
    """Refuse a length that the model has no positions for.

    Raises:
        ConfigError: it has not.
    """
    most = most_positions(config)
    if most is not None and sequence_length > most:
        raise ConfigError(
            f"the sequence length is {sequence_length}, and the model has {most} positions. Give a "
            "shorter one.",
            key="length-too-long",
        )


def with_layers(config: Any, num_layers: int) -> Any:
    """Return a copy of *config* with another number of layers; kinds of layers go on in turn.

    Raises:
        ConfigError: the configuration has no number of layers, or does not take another one.
    """
    values = config.to_dict()
    had = getattr(config, "num_hidden_layers", None)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    changed = None
    if isinstance(had, int) and had > 0 and name in values:
        values[name] = num_layers
        for key, kinds in values.items():  # such as layer_types
            if key.startswith("layer") and isinstance(kinds, list) and len(kinds) == had:
                values[key] = [kinds[number % had] for number in range(num_layers)]
        changed = type(config).from_dict(values)
    if changed is None or changed.num_hidden_layers != num_layers:
        raise ConfigError(
            f"the configuration of {config.model_type} has no number of layers that can be changed "
            "(num_hidden_layers). Give a model that has one.",
            key="model-spec",
        )
    return changed


def num_parameters_of(config: Any) -> int:
    """Return the parameters of a causal language model; tied ones count once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in model.parameters())
