"""The flags beside TRL's arguments: parsed by its parser, and mixed into its classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_pyao import PyAOArguments, PyAOConfig
from hf_pyao.errors import ConfigError
from tests.hf.test_arguments import parse

trl = pytest.importorskip("trl", reason="its arguments and its parser are tested")

# TRL sets the older of the two names of checkpointing, which transformers 5.23 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is depre:FutureWarning")


@dataclass
class SFTWithOffload(PyAOArguments, trl.SFTConfig):
    """What a user of TRL writes."""


@dataclass
class SFTListedLast(trl.SFTConfig, PyAOArguments):
    """The same with the bases in the order in which the mixin is not asked to check."""


def test_off_as_yaml_reads_it_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "output_dir: out\nactivation_offload: true\nactivation_offload_policy: off\n"
        "bf16: false\nuse_cpu: true\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"_policy is False; did you mean 'off'\? In YAML, write"):
        trl.TrlParser(SFTWithOffload).parse_args_and_config(["--config", str(path)])


def test_trl_parser_reads_flags_from_yaml_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "output_dir: out\nactivation_offload: true\nactivation_offload_min_bytes: 4096\n"
        "bf16: false\nuse_cpu: true\n",
        encoding="utf-8",
    )
    (arguments,) = trl.TrlParser(SFTWithOffload).parse_args_and_config(
        ["--config", str(path), "--activation_offload_keep_last_layers", "2"]
    )
    assert arguments.pyao_config() == PyAOConfig(min_bytes=4096, keep_last_layers=2)


@pytest.mark.parametrize("cls", [SFTWithOffload, SFTListedLast])
def test_the_flag_is_no_abbreviation_of_trls_once_mixed_in(cls: type) -> None:
    on_cpu = ("--use_cpu", "--bf16", "false")
    arguments = parse("--activation_offload", *on_cpu, cls=cls)
    assert arguments.activation_offloading is False
    assert arguments.pyao_config() == PyAOConfig()
    arguments = parse("--activation_offloading", *on_cpu, cls=cls)
    assert arguments.activation_offloading is True
    assert arguments.pyao_config() is None


def test_listed_last_the_mixin_checks_on_request() -> None:
    on_cpu = {"use_cpu": True, "bf16": False}
    arguments = SFTListedLast(output_dir="out", activation_offload_min_bytes=0, **on_cpu)
    with pytest.raises(ConfigError, match="offloading is off"):
        arguments.check_pyao_arguments()
    # Listed last, its fields come first: what is meant for output_dir lands in a flag.
    with pytest.raises(ConfigError, match="list PyAOArguments before"):
        SFTListedLast("out", **on_cpu).check_pyao_arguments()
