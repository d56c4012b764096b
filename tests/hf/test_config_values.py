"""Configurations drawn at random are values: each round trip keeps what they say and what they do.

The judge is the mapping of fields that was drawn. A field in it binds, any other is open; nothing
else of a configuration may tell two of them apart.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_pyao import PyAOArguments, PyAOConfig, PyAOPlugin
from hf_pyao.config import SETTINGS
from hf_pyao.errors import ConfigError
from hf_pyao.hf.trainer import _resolve_config
from hf_pyao.plan.options.plan_levers import free_levers
from hf_pyao.plan.options.plan_request import PlanRequest

IMPLIED = {
    "keep_last_layers": (1, 1),
    "window": (256 * 2**20, 256 * 2**20),
    "head_loss": ("off", "chunked"),
    "mlp_tiles": ("off", "auto"),
    "checkpoint_every": (0, 1),
    "checkpoint_nested": (False, False),
    "save_attention": (False, True),
    "attention_groups": ("off", "auto"),
}
"""Field that may be left open -> what it then is, without and with ``long_context``, where
``checkpoint_every`` is open too."""

VALUES: dict[str, tuple[Any, ...]] = {
    "policy": ("auto", "all", "modules", "budget", "plan", "pyao", "off"),
    "codec": ("identity", "int8", "bitmask"),
    "layers": (("layers.*",), ("down.*", "mid")),
    "modules": (("mlp_act",), ("mlp_act", "core_attn")),
    "budget": (8, "2GiB"),
    "plan": ("plan.json",),
    "profile_steps": (10, 3),
    "profile": ("profile.json",),
    "recompute_modules": (("pointwise",), ("mlp_norm", "mlp_act")),
    "keep_last_layers": (1, 0, 2),
    "min_bytes": (65536, 4096),
    "window": (256 * 2**20, "layer", 2**15),
    "host_memory_gib": (1.5, 4.0),
    "device_memory_gib": (0.25, 8.0),
    "allow_lossy": (False, True),
    "head_loss": ("off", "chunked", "auto"),
    "long_context": (False, True),
    "mlp_tiles": ("off", "auto", 4),
    "checkpoint_every": (0, 1, 2),
    "checkpoint_nested": (False, True),
    "save_attention": (False, True),
    "attention_groups": ("off", "auto", 2),
    "stream_weights": ("off", "auto", 0, 8),
    "stream_embeddings": ("auto", "on", "off"),
    "verify_recompute": ("auto", "always"),
    "disk_path": ("disk",),
    "disk_gib": (16.0, 0),
    "disk_write_limit": (60, 10.5),
    "auto_micro_batch": ("off",),
    "log_metrics": ("summary", "all"),
    "report": ("report.json",),
}
"""Values of each field; the first is what the field has, or implies, where it is not given."""

NOT_OPEN = {name for name, declared in SETTINGS.items() if declared.default is not None}
"""Fields whose default is a value, which nothing else may change."""

NUM_DRAWN = 60


def draw(rng: random.Random) -> dict[str, Any]:
    """Return fields that may be given together; about every third one is given."""
    while True:
        given = {n: rng.choice(values) for n, values in VALUES.items() if rng.random() < 0.35}
        policy = given["policy"] = rng.choice(["auto", *VALUES["policy"]])
        for name in ("modules", "budget", "plan"):  # policies that need such a field have it
            given.pop(name, None)
            if policy == name:
                given[name] = rng.choice(VALUES[name])
        if policy == "auto" and rng.random() < 0.5:
            del given["policy"]
        try:
            PyAOConfig(**given)
        except ConfigError:
            continue
        return given


def drawn() -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for _ in range(NUM_DRAWN):
        yield draw(rng)


def through_file(config: PyAOConfig, folder: Path) -> PyAOConfig:
    config.to_json_file(folder / "config.json")
    return PyAOConfig.from_json_file(folder / "config.json")


def through_changes(config: PyAOConfig) -> PyAOConfig:
    """Change another field and change it back."""
    other = dataclasses.replace(config, profile_steps=99).with_settings(log_metrics="off")
    return dataclasses.replace(
        other, profile_steps=config.profile_steps, log_metrics=config.log_metrics
    )


def through_flags(given: dict[str, Any]) -> PyAOConfig:
    flags = {f"activation_offload_{name}": value for name, value in given.items()}
    config = PyAOArguments(activation_offload=True, **flags).pyao_config()
    assert config is not None
    return config


def through_command_line(given: dict[str, Any]) -> PyAOConfig:
    words = ["--activation_offload"]
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--activation_offload_{name}", *map(str, values)]
    (parsed,) = parser().parse_args_into_dataclasses(words, look_for_args_file=False)
    config = parsed.pyao_config()
    assert config is not None
    return config


@cache
def parser() -> HfArgumentParser:
    return HfArgumentParser(PyAOArguments)


def through_flags_and_file(given: dict[str, Any], folder: Path) -> PyAOConfig:
    """Give every second field in the file, and the others as flags."""
    names = sorted(given)
    in_file = {name: value for name, value in given.items() if name not in names[::2]}
    open_ones = {name: None for name in SETTINGS if name not in given and name not in NOT_OPEN}
    path = folder / "part.json"
    path.write_text(json.dumps({**open_ones, **in_file}))
    flags = {f"activation_offload_{name}": given[name] for name in names[::2]}
    arguments = PyAOArguments(activation_offload=True, activation_offload_config=str(path), **flags)
    config = arguments.pyao_config()
    assert config is not None
    return config


def through_environment(given: dict[str, Any], patch: pytest.MonkeyPatch) -> PyAOConfig:
    with patch.context() as context:
        for name, value in given.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            context.setenv(f"PYAO_{name.upper()}", text)
        return PyAOPlugin().config()


def round_trips(
    given: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch
) -> dict[str, PyAOConfig]:
    config = PyAOConfig(**given)
    return {
        "dict": PyAOConfig.from_dict(config.to_dict()),
        "dict of what is given": PyAOConfig.from_dict(given),
        "JSON": PyAOConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        "file": through_file(config, folder),
        "replace": dataclasses.replace(config),
        "with_settings": config.with_settings(),
        "changed and changed back": through_changes(config),
        "asdict": PyAOConfig.from_dict(dataclasses.asdict(config)),
        "pickle": pickle.loads(pickle.dumps(config)),
        "deepcopy": copy.deepcopy(config),
        "flags": through_flags(given),
        "command line": through_command_line(given),
        "flags and file": through_flags_and_file(given, folder),
        "environment": through_environment(given, patch),
        "plugin": PyAOPlugin(**given).config(),
    }


def test_every_field_is_drawn_and_every_open_one_has_its_implied_value() -> None:
    assert set(VALUES) == set(SETTINGS)
    assert {name for given in drawn() for name in given} == set(VALUES), "draw more"
    assert set(IMPLIED) | {"budget", "plan", "profile", "report", "disk_path"} == (
        set(SETTINGS) - NOT_OPEN - {"host_memory_gib", "device_memory_gib", "disk_gib"}
    )
    for is_long, long_context in enumerate((False, True)):
        effective = PyAOConfig(long_context=long_context).effective()
        for name, implied in IMPLIED.items():
            assert getattr(effective, name) == implied[is_long], name


def test_round_trips_keep_what_is_given_and_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in drawn():
        config = PyAOConfig(**given)
        assert config.left_open == SETTINGS.keys() - given.keys() - NOT_OPEN
        assert all(getattr(config, name) == value for name, value in given.items()), given
        for way, other in round_trips(given, tmp_path, monkeypatch).items():
            assert other == config, (way, given)
            assert hash(other) == hash(config), way
            assert other.left_open == config.left_open, (way, given)
            assert other.effective() == config.effective(), way
            assert free_levers(other) == free_levers(config), (way, given)
            other = dataclasses.replace(other, labels=None)  # they are in sentences
            assert PlanRequest.of_config(other) == PlanRequest.of_config(config), (way, given)


@pytest.mark.parametrize("name", IMPLIED)
def test_an_open_field_is_not_the_same_value_written_out(name: str) -> None:
    value = getattr(PyAOConfig().effective(), name)
    written = PyAOConfig(**{name: value})
    assert written != PyAOConfig()
    assert hash(written) != hash(PyAOConfig())
    assert written.effective() == PyAOConfig().effective()
    assert PyAOConfig().left_open - written.left_open == {name}
    assert dataclasses.replace(written, **{name: None}) == PyAOConfig()


def test_what_is_written_out_binds_and_what_is_open_does_not() -> None:
    free = PlanRequest.of_config(PyAOConfig())
    assert (free.may_shrink_window, free.may_keep_fewer) == (True, True)
    assert (free.window_bytes, free.keep_last_layers) == (256 * 2**20, 1)
    assert free.room.segments and free.room.nested and free.room.attention and free.room.groups
    assert PlanRequest.of_config(dataclasses.replace(PyAOConfig(), min_bytes=65536)) == free
    for name, value, bound in (
        ("window", 256 * 2**20, {"may_shrink_window": False}),
        ("keep_last_layers", 1, {"may_keep_fewer": False}),
    ):
        request = PlanRequest.of_config(PyAOConfig(**{name: value}))
        assert request == dataclasses.replace(free, **bound), name
    every = PlanRequest.of_config(PyAOConfig(checkpoint_every=0)).room
    assert not (every.segments or every.nested or every.attention)
    assert every.groups
    assert not PlanRequest.of_config(PyAOConfig(save_attention=False)).room.attention
    assert not PlanRequest.of_config(PyAOConfig(checkpoint_nested=False)).room.nested
    assert not PlanRequest.of_config(PyAOConfig(attention_groups="off")).room.groups


def test_labels_are_kept_and_tell_nothing_apart() -> None:
    config = PyAOConfig.from_dict({"window": "1MiB"}, {"window": "--window"})
    assert config == PyAOConfig(window=2**20)
    assert hash(config) == hash(PyAOConfig(window=2**20))
    for other in (
        dataclasses.replace(config, min_bytes=0),
        config.with_settings(min_bytes=0),
        config.effective(),
        copy.deepcopy(config),
    ):
        assert other.label("window") == "--window"
        assert other.label("min_bytes") == "min_bytes"
    with pytest.raises(ConfigError, match="^--window is 'layers'"):
        dataclasses.replace(config, window="layers")


def test_null_in_a_file_is_not_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"window": None, "checkpoint_every": None, "min_bytes": 5}))
    flags = {"activation_offload": True, "activation_offload_config": str(path)}
    assert PyAOArguments(**flags).pyao_config() == PyAOConfig(min_bytes=5)
    config = PyAOArguments(**flags, activation_offload_window=4096).pyao_config()
    assert config == PyAOConfig(min_bytes=5, window=4096)
    assert not [record for record in caplog.records if "wins over" in record.message]


def test_flags_fill_what_the_trainers_configuration_leaves_open() -> None:
    """A field that is open contradicts no flag; one that is given has to agree with it."""
    arguments = PyAOArguments(activation_offload=True, activation_offload_window=4096)
    found = _resolve_config(arguments, PyAOConfig(policy="all"))
    assert found == PyAOConfig(policy="all", window=4096)
    same = PyAOConfig(policy="all", window=4096)
    assert _resolve_config(arguments, same) == same
    with pytest.raises(ConfigError, match="pyao_config says window=8192"):
        _resolve_config(arguments, PyAOConfig(window=8192))
