"""The flags: what they parse to, what they refuse, and that they survive saving."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from hf_pyao import PyAOArguments, PyAOConfig, PyAOTrainingArguments
from hf_pyao.config import SETTINGS
from hf_pyao.errors import ConfigError
from hf_pyao.settings.removed import REMOVED, Removed
from tests.hf import (
    setting_stubs,
)
from tests.hf.setting_stubs import STUBS, stubs
from tests.hf.test_config_values import VALUES

PREFIX = "activation_offload_"


@dataclass
class OnByDefault(PyAOTrainingArguments):
    """What a script does that offloads unless told not to."""

    activation_offload: bool = field(default=True, metadata={"help": "On here."})


def parse(*flags: str, cls: type = PyAOTrainingArguments) -> Any:
    (parsed,) = HfArgumentParser(cls).parse_args_into_dataclasses(
        ["--output_dir", "out", *flags], look_for_args_file=False
    )
    return parsed


def write_json(path: Path, values: object) -> str:
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def test_every_config_field_has_its_flag_and_every_flag_its_field() -> None:
    flags = {f.name for f in dataclasses.fields(PyAOArguments)}
    knobs = {f.name.removeprefix(PREFIX) for f in dataclasses.fields(PyAOArguments) if f.repr}
    knobs -= {"activation_offload", "config"}
    assert {"activation_offload", "activation_offload_config"} < flags
    assert knobs == {f.name for f in dataclasses.fields(PyAOConfig)}


def test_help_states_the_defaults_of_the_configuration() -> None:
    actions = {a.dest: a for a in HfArgumentParser(PyAOArguments)._actions}
    formatter = HfArgumentParser(PyAOArguments)._get_formatter()
    for config_field in dataclasses.fields(PyAOConfig):
        text = formatter._expand_help(actions[PREFIX + config_field.name])
        assert len(text) > 60, "a help text that teaches is longer than this"
        assert "None" not in text
        if config_field.default not in (None, ()):
            assert f"(default: {SETTINGS[config_field.name].shown_default})" in text
        assert "{" not in text, "a setting is named that is none"
    assert "bytes" in formatter._expand_help(actions[PREFIX + "min_bytes"])
    assert "GiB" in formatter._expand_help(actions[PREFIX + "host_memory_gib"])


@pytest.mark.parametrize(
    "flags",
    [("--activation_offload",), ("--activation_offload", "true"), ("--activation-offload",)],
)
def test_the_flag_alone_gives_the_defaults(flags: tuple[str, ...]) -> None:
    assert parse(*flags).pyao_config() == PyAOConfig()


def test_a_switch_needs_no_value() -> None:
    switches = [f"--{PREFIX}{n}" for n, s in SETTINGS.items() if s.kind.flag_type is bool]
    assert len(switches) >= 4
    flags = ("--activation_offload", *switches, f"--{PREFIX}checkpoint_every", "3")
    config = parse(*flags, f"--{PREFIX}save_attention", "false").pyao_config()
    assert config.long_context and config.allow_lossy and config.checkpoint_nested
    assert config.save_attention is False
    with pytest.raises(ConfigError, match="--activation_offload_allow_lossy would"):
        parse(f"--{PREFIX}allow_lossy")


@pytest.mark.parametrize("name", VALUES)
def test_a_knob_without_the_flag_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{PREFIX}{name} would.*Add --activation_offload"):
        PyAOTrainingArguments("out", **{PREFIX + name: VALUES[name][-1]})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("_policy", "al"), r"--activation_offload_policy is 'al'; did you mean 'all'\?"),
        (("_min_bytes", "64k"), r"--activation_offload_min_bytes is '64k'; expected a whole"),
        (
            ("_modules", "mlp_act"),
            r"--activation_offload_modules is \['mlp_act'\], which has no effect while "
            r"--activation_offload_policy is 'auto'",
        ),
        (
            ("_policy", "modules"),
            r"--activation_offload_policy is 'modules', which offloads only what "
            r"--activation_offload_modules names",
        ),
    ],
)
def test_messages_name_the_flag(flags: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("--activation_offload", f"--activation_offload{flags[0]}", flags[1])


def test_messages_name_the_file_beside_flags(tmp_path: Path) -> None:
    path = write_json(tmp_path / "offload.json", {"modules": ["mlp_act"]})
    message = r"modules in '.*offload.json' is \['mlp_act'\], .* while --activation_offload_policy"
    with pytest.raises(ConfigError, match=message):
        parse("--activation_offload", "--activation_offload_config", path)
    # The two together are whole.
    flags = ("--activation_offload_config", path, "--activation_offload_policy", "modules")
    config = parse("--activation_offload", *flags).pyao_config()
    assert config == PyAOConfig(policy="modules", modules=("mlp_act",))
    assert config.label("modules") == f"modules in '{path}'"
    assert config.label("window") == "--activation_offload_window"


def test_the_head_loss_alone_names_the_way() -> None:
    with pytest.raises(ConfigError, match="offloading is off") as caught:
        parse("--activation_offload_head_loss", "chunked")
    _, _, way = caught.value.message.partition("For the head loss alone: ")
    config = parse(*way.removesuffix(".").split()).pyao_config()
    assert config == PyAOConfig(policy="off", head_loss="chunked")


@pytest.mark.parametrize("gone", REMOVED, ids=lambda gone: gone.setting)
def test_flags_of_earlier_versions_are_refused_by_name(gone: Removed) -> None:
    value = gone.value or "0.5"
    flag = f"activation_offload_{gone.setting}"
    message = f"--{flag} is '{value}'; this .* was removed in version {gone.version}"
    with pytest.raises(ConfigError, match=message):
        parse("--activation_offload", f"--{flag}", value)


def test_a_report_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in {
        tmp_path: "--activation_offload_report is .*, which is a folder",
        tmp_path / "file" / "run.json": "file' is no folder",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse("--activation_offload", "--activation_offload_report", str(path))
    for path in (tmp_path / "new" / "run.json", tmp_path / "file", Path("/dev/null")):
        parse("--activation_offload", "--activation_offload_report", str(path))
    assert not (tmp_path / "new").exists(), "a check leaves nothing behind"


def test_type_checkers_see_the_same_fields() -> None:
    assert STUBS.read_text(encoding="utf-8") == stubs(), f"run {setting_stubs.__file__}"


def test_a_flag_wins_over_the_file_and_that_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json(tmp_path / "offload.json", {"min_bytes": 4096, "keep_last_layers": 3})
    with caplog.at_level(logging.INFO, logger="hf_pyao"):
        arguments = parse(
            *("--activation_offload", "--activation_offload_config", path),
            # The second agrees with the file, which is no news.
            *("--activation_offload_min_bytes", "0", "--activation_offload_keep_last_layers", "3"),
        )
        assert arguments.pyao_config() == PyAOConfig(min_bytes=0, keep_last_layers=3)
        arguments.pyao_config()
    (record,) = caplog.records
    assert "--activation_offload_min_bytes 0 wins over min_bytes=4096" in record.getMessage()
    assert path in record.getMessage()


def test_training_args_bin_round_trip(tmp_path: Path) -> None:
    arguments = parse(
        "--activation_offload",
        "--activation_offload_modules",
        "mlp_act",
        "--activation_offload_policy",
        "modules",
    )
    torch.save(arguments, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert isinstance(loaded, PyAOTrainingArguments)
    assert loaded.pyao_config() == PyAOConfig(policy="modules", modules=("mlp_act",))


def test_a_subclass_can_turn_it_on_by_default() -> None:
    assert parse(cls=OnByDefault).pyao_config() == PyAOConfig()
    assert parse("--no_activation_offload", cls=OnByDefault).pyao_config() is None
    assert parse("--activation_offload", "false", cls=OnByDefault).pyao_config() is None
    config = parse("--activation_offload_min_bytes", "0", cls=OnByDefault).pyao_config()
    assert config == PyAOConfig(min_bytes=0)
    with pytest.raises(ConfigError, match="offloading is off"):
        parse("--no_activation_offload", "--activation_offload_min_bytes", "0", cls=OnByDefault)
