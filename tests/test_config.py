"""The configuration: every bad value is refused at once, with what was expected and the remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.codecs import CODECS, Codec, get_codec
from hf_pyao.config import POLICY_NAMES
from hf_pyao.errors import ConfigError, PyAOError, unknown_name
from hf_pyao.runtime.policy import (
    POLICIES,
    Candidate,
    Decision,
    Keep,
    Offload,
    OffloadAll,
    OffloadModules,
    make_policy,
)

BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"policy": "al"}, r"unknown policy 'al'; did you mean 'all'\?.*known: all, modules"),
    ({"policy": "everything at once"}, r"unknown policy 'everything at once'; known: all, modules"),
    ({"codec": "identitty"}, r"unknown codec 'identitty'; did you mean 'identity'\?"),
    ({"min_bytes": -1}, r"min_bytes is -1; it cannot be negative \(unit: bytes\)"),
    ({"min_bytes": 1.5}, r"min_bytes is 1\.5; expected a whole number of bytes"),
    ({"min_bytes": True}, r"min_bytes is True; expected a whole number"),
    ({"min_bytes": "64k"}, r"min_bytes is '64k'; expected a whole number of bytes"),
    ({"keep_last_layers": -2}, r"keep_last_layers is -2; it cannot be negative \(unit: layers\)"),
    ({"keep_last_layers": None}, r"keep_last_layers is None; expected a whole number of layers"),
    ({"window": "layers"}, r"window is 'layers'; expected 'layer' or a number of bytes"),
    ({"window": -5}, r"window is -5; it cannot be negative"),
    ({"window": None}, r"window is None; expected a whole number of bytes, or 'layer'"),
    ({"copy_streams": 3}, r"copy_streams is 3; expected 0, 1 or 2"),
    ({"host_memory_gib": -0.5}, r"host_memory_gib is -0\.5; it cannot be negative \(unit: GiB\)"),
    ({"host_memory_gib": float("nan")}, r"host_memory_gib is nan; expected a number of GiB"),
    ({"host_memory_gib": float("inf")}, r"host_memory_gib is inf; expected a number of GiB"),
    ({"host_memory_gib": "4"}, r"host_memory_gib is '4'; expected a number of GiB"),
    ({"head_loss": "chunk"}, r"unknown head_loss 'chunk'; did you mean 'chunked'\?"),
    (
        {"modules": "mlp_act"},
        r"modules is 'mlp_act'; expected a tuple of names, such as \('mlp_act",
    ),
    ({"modules": ["mlp_act"]}, r"modules is \['mlp_act'\]; expected a tuple of names"),
    ({"modules": ("",)}, r"modules holds ''; expected non-empty names"),
    ({"modules": (3,)}, r"modules holds 3; expected non-empty names"),
    ({"policy": "modules"}, r"`modules` is empty: name roles such as 'mlp_act', or choose policy="),
    ({"modules": ("mlp_act",)}, r"no effect with policy='all': set policy='modules', or drop"),
    ({"report": 3}, r"report is 3; expected a path"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PyAOConfig(**values)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PyAOError)
    assert str(caught.value).endswith(".")


def test_limits_are_allowed() -> None:
    PyAOConfig(min_bytes=0, keep_last_layers=0, window=0, host_memory_gib=0)
    PyAOConfig(window="layer", policy="modules", modules=("mlp_act", "self_attn.*"))
    assert PyAOConfig() == PyAOConfig()
    assert hash(PyAOConfig()) == hash(PyAOConfig())


def test_it_cannot_be_changed() -> None:
    config = PyAOConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_bytes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PyAOConfig("all")  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    source = Path(PyAOConfig.__init__.__code__.co_filename)
    import hf_pyao.config

    lines = Path(hf_pyao.config.__file__).read_text().splitlines()
    for field in dataclasses.fields(PyAOConfig):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: ")]
        assert lines[at + 1].startswith('    """'), f"{field.name} has no docstring ({source})"


# ---- dictionaries and files
# -------------------------------------------------------------------------

OTHERS = PyAOConfig(
    policy="modules",
    modules=("mlp_act", "core_attn"),
    codec="int8",
    keep_last_layers=3,
    min_bytes=5,
    window=77,
    host_memory_gib=1.5,
)


@pytest.mark.parametrize("config", [PyAOConfig(), OTHERS])
def test_round_trips(config: PyAOConfig, tmp_path: Path) -> None:
    assert PyAOConfig.from_dict(config.to_dict()) == config
    path = tmp_path / "config.json"
    config.to_json_file(path)
    assert PyAOConfig.from_json_file(path) == config
    assert PyAOConfig.from_json_file(str(path)) == config
    assert json.loads(path.read_text())["schema_version"] == 1


def test_part_of_the_keys_is_enough() -> None:
    assert PyAOConfig.from_dict({"min_bytes": 3}) == PyAOConfig(min_bytes=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_byte": 3}, r"unknown PyAOConfig key 'min_byte'; did you mean 'min_bytes'\?"),
        ({"min_bytes": "3"}, r"min_bytes is '3'"),
        ({"schema_version": 99}, r"schema_version 99; this hf_pyao reads 1"),
        ({"schema_version": None}, r"schema_version None"),
    ],
)
def test_bad_dictionaries_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        PyAOConfig.from_dict(values)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as caught:
        PyAOConfig.from_json_file(path)
    assert str(path) in str(caught.value), "which file it was"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{min_bytes: 3}", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[1, 2]", r"holds a JSON list; expected an object"),
        (b'"all"', r"holds a JSON str; expected an object"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (None, r"cannot read the configuration file.*No such file.*Give the path"),
    ],
)
def test_bad_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        PyAOConfig.from_json_file(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        PyAOConfig.from_json_file(tmp_path)


# ---- names and instances
# ----------------------------------------------------------------------------


class KeepsAll:
    name = "keeps all"

    def decide(self, candidate: Candidate) -> Decision:
        return Keep("kept")


def test_names_are_those_that_are_implemented() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)
    for name in CODECS:
        assert isinstance(get_codec(name), Codec)


def test_instances_are_taken_where_names_are() -> None:
    policy, codec = KeepsAll(), get_codec("identity")
    config = PyAOConfig(policy=policy, codec=codec)
    assert make_policy(config) is policy
    assert get_codec(config.codec) is codec
    assert config.to_dict()["policy"] == "keeps all"
    assert config.to_dict()["codec"] == "identity"


def test_other_objects_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"policy is 3; expected one of \['all', 'modules', 'off'\]"
    ):
        make_policy(PyAOConfig(policy=3))
    with pytest.raises(ConfigError, match="codec is 3; expected one of"):
        get_codec(3)  # type: ignore[arg-type]


def test_the_nearest_name_is_given_if_any_is_near() -> None:
    message = str(unknown_name("role", "mlp_actt", ["mlp_act", "core_attn"]))
    assert message == "unknown role 'mlp_actt'; did you mean 'mlp_act'? known: core_attn, mlp_act."
    message = str(unknown_name("role", "xyz", ["mlp_act", "core_attn"]))
    assert message == "unknown role 'xyz'; known: core_attn, mlp_act."
    assert "unknown role 3; known" in str(unknown_name("role", 3, ["a"]))


def candidate(nbytes: int, path: str = "mlp.act", layer: str = "layers.0") -> Candidate:
    import torch

    return Candidate(layer, 0, path, 2, nbytes, torch.float32)


def test_policies_decide_by_size_and_by_module() -> None:
    assert candidate(1).slot == "mlp.act:2"
    everything = make_policy(PyAOConfig(min_bytes=100))
    assert isinstance(everything, OffloadAll)
    assert everything.decide(candidate(100)) == Offload()
    assert everything.decide(candidate(99)) == Keep("below min_bytes")
    config = PyAOConfig(policy="modules", modules=("mlp_act",), min_bytes=100)
    some = make_policy(config, {"layers.0": frozenset({"mlp.act", ""})})
    assert isinstance(some, OffloadModules)
    assert some.decide(candidate(100)) == Offload()
    assert some.decide(candidate(100, path="")) == Offload()
    assert some.decide(candidate(99)) == Keep("below min_bytes")
    assert some.decide(candidate(100, path="mlp")) == Keep("not selected")
    assert some.decide(candidate(100, layer="layers.1")) == Keep("not selected")
