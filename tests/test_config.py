"""The configuration: every bad value is refused at once, with what was expected and the remedy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.config import CODEC_NAMES, POLICY_NAMES, SETTINGS
from hf_pyao.engine.codecs import CODECS, Codec, get_codec
from hf_pyao.engine.runtime.policy import (
    Decision,
    Keep,
    OffloadAll,
    Policy,
    Situation,
)
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.errors import ConfigError, PyAOError, unknown_name
from hf_pyao.plan.policies.by_name import POLICIES, make_policy
from hf_pyao.settings.removed import REMOVED, Removed
from hf_pyao.text import echo

VERSION_0_1 = Path(__file__).parent / "plan" / "documents" / "version_0_1" / "config.json"
"""Written by version 0.1, with each field that it had."""


class Nameless:
    def decide(self, slot: object, situation: object) -> None: ...


class Undecided:
    name = "undecided"


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no text of me")


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"policy": "al"}, r"policy is 'al'; did you mean 'all'\?.*known: auto, all, modules"),
    (
        {"policy": "everything at once"},
        r"policy is 'everything at once'; known: auto, all, modules",
    ),
    (
        {"policy": 3},
        r"policy is 3; expected one of 'auto', 'all', 'modules', 'budget', 'plan', 'pyao', 'off', or a Po",
    ),
    ({"policy": None}, r"policy is None; expected .* with name, decide\(\)\. It lacks 'name'"),
    ({"policy": OffloadAll}, r"policy is the class OffloadAll; .*Make one of it"),
    ({"policy": Nameless()}, r"policy is <.*Nameless object.*It lacks 'name'"),
    ({"policy": Unreadable()}, r"policy is <Unreadable instance.*expected one of"),
    ({"codec": "identitty"}, r"codec is 'identitty'; did you mean 'identity'\?"),
    ({"codec": None}, r"codec is None; expected one of 'identity', .*, or a Codec: an object with"),
    ({"codec": Undecided()}, r"codec is <.*It lacks 'is_lossless'"),
    ({"min_bytes": -1}, r"min_bytes is -1; it cannot be negative \(unit: bytes\)"),
    ({"min_bytes": 1.5}, r"min_bytes is 1\.5; expected a whole number of bytes"),
    ({"min_bytes": "64k"}, r"min_bytes is '64k'; expected .* a size such as '256MiB' \(KiB, MiB"),
    ({"min_bytes": 10**5000}, r"min_bytes is .*; expected at most 9,223,"),
    ({"window": "layers"}, r"window is 'layers'; expected 'layer' or a whole number of bytes, or"),
    ({"host_memory_gib": float("nan")}, r"host_memory_gib is nan; expected a number of GiB"),
    ({"host_memory_gib": 1e308}, r"host_memory_gib is 1e\+308; expected .*, below 8,589,934,592"),
    ({"disk_path": ""}, r"disk_path is ''; expected the path of a directory"),
    ({"disk_path": "a\0b"}, r"disk_path is 'a\\x00b'; .*without the character NUL"),
    (
        {"disk_gib": 0},
        r"disk_gib is 0, which has no effect while disk_path is not given: give disk_path",
    ),
    ({"disk_write_limit": 5}, r"disk_write_limit is 5, .* while disk_path is not given"),
    ({"disk_path": "d", "disk_write_limit": 0}, r"disk_write_limit is 0; .* above 0, such as 60"),
    ({"head_loss": "chunk"}, r"head_loss is 'chunk'; did you mean 'chunked'\?"),
    ({"head_loss": False}, r"head_loss is False; did you mean 'off'\?"),
    ({"mlp_tiles": 0}, r"mlp_tiles is 0; expected 'off', 'auto', or a whole number of tiles"),
    ({"mlp_tiles": "many"}, r"mlp_tiles is 'many'; expected 'off', 'auto', or a whole number"),
    ({"stream_embeddings": "yes"}, r"stream_embeddings is 'yes'; known: auto, on, off"),
    (
        {"stream_embeddings": "on"},
        r"stream_embeddings is 'on', which has no effect while stream_weights is 'off'\. Give",
    ),
    ({"checkpoint_every": 1.0}, r"checkpoint_every is 1\.0; expected a whole number of layers"),
    ({"long_context": "yes"}, r"long_context is 'yes'; expected true or false"),
    ({"save_attention": True}, r"save_attention is on, which has no effect while checkpoint_ev"),
    ({"checkpoint_nested": True}, r"checkpoint_nested is on, .* checkpoint_every is 0: nothing is"),
    (
        {"checkpoint_nested": True, "checkpoint_every": 1},
        r"checkpoint_every is 1: each layer runs again by itself then\. Give .* such as 2, or drop",
    ),
    (
        {"long_context": True, "checkpoint_nested": True},
        r"checkpoint_nested is on, which has no effect while checkpoint_every is 1",
    ),
    ({"log_metrics": "al"}, r"log_metrics is 'al'; did you mean 'all'\?"),
    ({"modules": "mlp_act"}, r"modules is 'mlp_act'; expected a list or tuple.*\('mlp_act',\)"),
    ({"modules": ("",)}, r"modules holds ''; expected non-empty names"),
    ({"policy": "modules"}, r"modules is empty: name roles such as 'mlp_act', or choose 'all'"),
    (
        {"modules": ("mlp_act",)},
        r"modules is \['mlp_act'\], which has no effect while policy is 'auto': choose policy",
    ),
    ({"report": 3}, r"report is 3; expected the path of a file"),
    ({"report": ""}, r"report is '', which names no file"),
]


def _id_of(value: object) -> str:
    """Name a case; without addresses, by which test workers would disagree."""
    return re.sub(r" at 0x\w+", "", echo(value))


@pytest.mark.parametrize(("values", "message"), BAD_VALUES, ids=_id_of)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PyAOConfig(**values)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PyAOError)
    assert re.search(r"\. \[pyao:[a-z-]+\]$", str(caught.value))


def test_long_context_sets_what_is_not_given() -> None:
    plain = PyAOConfig().effective()
    assert (plain.head_loss, plain.mlp_tiles) == ("off", "off")
    assert (plain.checkpoint_every, plain.save_attention) == (0, False)
    open_config = PyAOConfig(long_context=True)
    config = open_config.effective()
    assert (config.head_loss, config.mlp_tiles) == ("chunked", "auto")
    assert (config.checkpoint_every, config.save_attention) == (1, True)
    assert PyAOConfig(long_context=True, checkpoint_every=0).effective().save_attention is False
    assert [
        PyAOConfig(long_context=True, checkpoint_every=every).effective().checkpoint_nested
        for every in (0, 1, 2, 4)
    ] == [False, False, True, True]
    whole = PyAOConfig(long_context=True, checkpoint_every=2, checkpoint_nested=False)
    whole = whole.effective()
    assert whole.checkpoint_nested is False and whole.save_attention is True
    given = PyAOConfig.from_dict(
        {"long_context": True, "head_loss": "off", "mlp_tiles": "1", "checkpoint_every": 4}
    )
    assert (given.head_loss, given.mlp_tiles, given.checkpoint_every) == ("off", "off", 4)
    assert PyAOConfig.from_dict(given.to_dict()) == given
    assert PyAOConfig.from_dict(open_config.to_dict()) == open_config


def test_it_cannot_be_changed() -> None:
    config = PyAOConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_bytes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PyAOConfig("all")  # type: ignore[misc]


def test_help_describes_every_field() -> None:
    text = pydoc.render_doc(PyAOConfig, renderer=pydoc.plaintext)
    for name, declared in SETTINGS.items():
        assert len(declared.text) > 60, f"{name}: a text that teaches is longer than this"
        assert f"\n |      {name}: {declared.text.split()[0]}" in text
    assert "only those of `modules`;" in text
    assert set(SETTINGS) == {field.name for field in dataclasses.fields(PyAOConfig)}


@pytest.mark.parametrize("value", [["mlp_act", "core_attn"], ("mlp_act", "core_attn")])
def test_names_are_taken_from_any_sequence(value: Any) -> None:
    config = PyAOConfig(policy="modules", modules=value, layers=value, recompute_modules=value)
    assert config.modules == config.layers == config.recompute_modules == ("mlp_act", "core_attn")
    assert hash(config) == hash(dataclasses.replace(config))
    assert PyAOConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("256MiB", 256 * 2**20),
        ("1GiB", 2**30),
        ("1 GiB", 2**30),
        (" 2tib ", 2**41),
        ("64kib", 2**16),
        ("64KB", 64_000),
        ("1.5GB", 1_500_000_000),
        ("0.5MiB", 2**19),
        ("100B", 100),
        ("100", 100),
        ("0", 0),
    ],
)
def test_sizes_may_have_units(size: str, num_bytes: int) -> None:
    config = PyAOConfig(window=size, min_bytes=size)
    assert (config.window, config.min_bytes) == (num_bytes, num_bytes)
    assert config == PyAOConfig(window=num_bytes, min_bytes=num_bytes)
    assert PyAOConfig.from_dict({"window": size}).to_dict()["window"] == num_bytes


def test_a_window_of_a_few_bytes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    config = PyAOConfig(window=12_345)
    assert dataclasses.replace(config, min_bytes=1).effective().window == 12_345
    for likely in ("layer", "120KB", 0, 2**16, None):
        PyAOConfig(window=likely, min_bytes=1)
    assert ["window is 12345, which means" in r.getMessage() for r in caplog.records] == [True]


def test_what_a_message_repeats_is_short() -> None:
    long = "x" * 100_000
    values: list[Any] = [long, [long] * 1000, 10**4000, {long: long}, (long,), long.encode()]
    for value in values:
        for name in SETTINGS:
            for given in (value, [value]):
                message = ""
                try:
                    PyAOConfig(**{name: given})
                except ConfigError as error:
                    message = str(error)
                assert len(message) < 700, name
    with pytest.raises(ConfigError) as caught:
        PyAOConfig.from_dict({long: 1})
    assert len(str(caught.value)) < 700


# ---- dictionaries and files
# -------------------------------------------------------------------------


@pytest.mark.parametrize("gone", REMOVED, ids=lambda gone: gone.setting)
def test_what_earlier_versions_had_is_refused_with_what_to_do_instead(
    gone: Removed, tmp_path: Path
) -> None:
    value = gone.value or 0.5
    values: Any = {gone.setting: value}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(values))
    for make in (
        lambda: PyAOConfig(**values),
        lambda: dataclasses.replace(PyAOConfig(), **values),
        lambda: PyAOConfig.from_dict(values),
        lambda: PyAOConfig.from_json_file(path),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        message = str(caught.value)
        assert gone.setting in message and str(value) in message
        assert f"removed in version {gone.version}. {gone.instead}" in message
    assert str(path) in message, "which file it was"


def test_a_file_of_an_earlier_version_is_read_if_it_asks_for_nothing_that_is_gone() -> None:
    assert PyAOConfig.from_json_file(VERSION_0_1) == PyAOConfig(min_bytes=256, keep_last_layers=2)
    assert PyAOConfig(activation_memory_budget="off") == PyAOConfig()  # type: ignore[call-arg]
    assert "activation_memory_budget" not in inspect.signature(PyAOConfig).parameters


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_byte": 3}, r"unknown PyAOConfig key 'min_byte'; did you mean 'min_bytes'\?"),
        ({"min_bytes": "3 apples"}, r"min_bytes.* is '3 apples'"),
        ({"policy": None}, r"policy.* is None; expected one of"),
        ({"codec": "narrow"}, r"codec.* is 'narrow'; known: identity, int8, fp8, int4, bitmask"),
        ({"schema_version": True}, r"schema_version True"),
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
        (b'{"host_memory_gib": NaN}', "is not valid JSON: NaN is no JSON value"),
        (b'{"min_bytes": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b'{"modules": ' + b"[" * 200_000, "is nested too deep to be read"),
        (b'{"modules": ' + b"[" * 300 + b"]" * 300 + b"}", "modules.* holds \\[.*non-empty names"),
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


# ---- names and instances
# ----------------------------------------------------------------------------


class KeepsAll(Policy):
    name = "keeps all"

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        return Keep("kept")


def test_names_are_those_that_are_implemented() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)
    assert tuple(CODECS) == CODEC_NAMES
    for name in CODECS:
        assert isinstance(get_codec(name), Codec)


def test_instances_are_taken_where_names_are() -> None:
    policy, codec = KeepsAll(), get_codec("identity")
    config = PyAOConfig(policy=policy, codec=codec)
    assert make_policy(config) is policy
    assert get_codec(config.codec) is codec
    assert config.to_dict()["policy"] == "keeps all"
    assert config.to_dict()["codec"] == "identity"


def test_the_nearest_name_is_given_if_any_is_near() -> None:
    message = f"{unknown_name('role', 'mlp_actt', ['mlp_act', 'core_attn'])}"
    assert message == "unknown role 'mlp_actt'; did you mean 'mlp_act'? known: core_attn, mlp_act."
    message = f"{unknown_name('role', 'xyz', ['mlp_act', 'core_attn'])}"
    assert message == "unknown role 'xyz'; known: core_attn, mlp_act."
    assert "unknown role 3; known" in str(unknown_name("role", 3, ["a"]))
