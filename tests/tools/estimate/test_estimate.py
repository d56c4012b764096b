"""``pyao estimate``: what fits, what sets the peak, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_pyao import PyAOConfig
from hf_pyao.cli import main, make_parser
from hf_pyao.errors import ConfigError
from hf_pyao.hf.arguments import PyAOTrainingArguments
from hf_pyao.plan.documents.estimate import EstimateReport, EstimateRow
from hf_pyao.plan.hardware.presets import HARDWARE, Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.tools.estimate.card_memory import card_memory
from hf_pyao.tools.estimate.common_arguments import lengths_of
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.verdict_text import verdict
from hf_pyao.tools.estimate.ways import METHODS, WAYS, chunked
from tests.helpers.documents import PROVENANCE
from tests.helpers.simulation.fake_peak import peak_of

PAPER_MODELS = [f"{model}-{size}" for model, size in PAPER_SIZES.items()]

SMALL = Hardware(
    name="small",
    device=DeviceModel(tflop_per_s=1.0, memory_gib_per_s=50.0),
    link=LinkModel(d2h_gib_per_s=2.0, h2d_gib_per_s=2.0),
    memory_gib=0.25,
    source="made up",
)


WINDOW = 2**20


@pytest.fixture(scope="module")
def rows() -> dict[str, EstimateRow]:
    config = build_config("llama", find_size("llama", "tiny"), vocab_size=4096)
    estimator = Estimator(config, SMALL, training_state="device", sequence_length=64, window=WINDOW)
    found = [estimator.row(way, with_longest=way.name == "none") for way in WAYS]
    found += [estimator.row(chunked(way), with_longest=False) for way in WAYS[:3]]
    return {row.method: row for row in found}


@pytest.mark.thorough
def test_the_largest_micro_batch_fits_and_the_next_does_not(rows: dict[str, EstimateRow]) -> None:
    config = build_config("llama", find_size("llama", "tiny"), vocab_size=4096)
    limit_bytes = card_memory(SMALL).limit_bytes
    estimator = Estimator(config, SMALL, training_state="device", sequence_length=64, window=WINDOW)
    ways = {way.name: way for way in WAYS}
    for name, policy, checkpointing in (
        ("none", "off", False),
        ("checkpointing", "off", True),
        ("policy all", "all", False),
    ):
        training = FakeTraining(config=config, training_state="device", checkpointing=checkpointing)
        settings = PyAOConfig(policy=policy, window=WINDOW, host_memory_gib=2.0**20)
        row = rows[name]
        peak_bytes = peak_of(training, settings, row.largest_micro_batch, 64).peak_bytes
        assert row.peak_bytes == peak_bytes
        assert row.reserved_bytes is not None
        assert peak_bytes <= row.reserved_bytes <= limit_bytes
        next_one, _ = estimator.predicted(ways[name], row.largest_micro_batch + 1)
        assert not next_one.memory.fits(limit_bytes), name
        assert (row.largest_with_expandable_segments or 0) >= row.largest_micro_batch


def test_a_model_with_fewer_positions_than_a_step_of_lengths_has_no_longest_sequence() -> None:
    config = build_config("gpt2", find_size("gpt2", "tiny"), vocab_size=512)
    config.n_positions = 40
    card = dataclasses.replace(SMALL, memory_gib=2.0)
    row = Estimator(config, card, sequence_length=20).row(WAYS[0])
    assert row.largest_micro_batch > 0
    assert row.longest_sequence == 0
    assert row.is_length_limited_by_positions


@pytest.mark.thorough
def test_what_saves_memory_fits_more(rows: dict[str, EstimateRow]) -> None:
    largest = {name: row.largest_micro_batch for name, row in rows.items()}
    assert largest["none"] < largest["policy budget"] <= largest["policy all"]
    assert largest["none"] < largest["checkpointing"]
    for name in ("none", "checkpointing", "policy all"):
        # On so small a card segments of 2 to 20 MiB cost as much as the logits do.
        assert largest[f"{name} + chunked loss"] > 0.9 * largest[name]
    for row in rows.values():
        assert row.fits
        assert row.next_peak_bytes < row.peak_bytes
        assert row.tokens_per_s > 0
    assert rows["none"].hidden is None
    assert (rows["none"].longest_sequence or 0) > 64
    assert rows["policy budget"].hidden > rows["policy all"].hidden  # type: ignore[operator]


def made_up(method: str, tokens_per_s: float, **fields: Any) -> EstimateRow:
    figures = dict.fromkeys(("peak_bytes", "peak_tensor_bytes", "next_peak_bytes", "host_bytes"), 8)
    return EstimateRow(
        method=method,
        tokens_per_s=tokens_per_s,
        **{"micro_batch": 3, "largest_micro_batch": 3, "fits": True, "offloaded_bytes": 2**31},
        **{"peak_phase": "forward", "peak_where": "", "peak_tensor": "", **figures},
        **{"step_ms": 1.0, "compute_ms": 1.0, **fields},
    )


def test_the_first_sentence_has_the_flags_and_no_lead_that_times_do_not_carry() -> None:
    rows = [made_up("checkpointing", 80.0), made_up("policy auto", 100.0), made_up("none", 40.0)]
    first = verdict(rows, SMALL, 64).split(". ")[0]
    assert first.startswith("Take checkpointing, 80 tokens/s at micro-batch 3: --gradient_check")
    assert "--per_device_train_batch_size 3" in first and "30%" in first
    rows[0] = made_up("policy all", 70.0)
    assert verdict(rows, SMALL, 64) == (
        "Fastest: policy auto, 100 tokens/s at micro-batch 3: --activation_offload "
        "--activation_offload_policy auto --per_device_train_batch_size 3."
    )
    for speed, words in ((99.0, "about equally fast"), (105.0, "everything is 31% faster")):
        both = [made_up("checkpointing", 80.0), made_up("policy all", speed)]
        assert words in verdict(both, SMALL, 64)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("method", METHODS)
def test_a_way_s_flags_are_those_of_a_script(method: str) -> None:
    row = made_up(method, 9.0, num_streamed_blocks=int("streamed" in method))
    said = verdict([row], SMALL, 64).partition("micro-batch 3: ")[2]
    words = said.split(". ")[0].rstrip(".").split()
    parser = HfArgumentParser(PyAOTrainingArguments)
    args, _ = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    assert args.per_device_train_batch_size == 3
    assert args.gradient_checkpointing == method.startswith("checkpointing")
    assert args.activation_offload == (method not in ("none", "checkpointing"))
    if args.activation_offload:
        config = args.pyao_config()
        assert (config.head_loss == "chunked") == method.endswith("chunked loss")
        assert (config.stream_weights == "auto") == ("streamed" in method)
        assert f"policy {config.policy}" in method or config.policy in ("off", "all")


def run(*options: str) -> tuple[str, ...]:
    return (
        "estimate",
        "--model",
        "llama:micro",
        "--no-longest-sequence",
        "--processes",
        "1",
        *options,
    )


@pytest.mark.thorough
def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "estimate.json"
    options = ("--sequence-length", "32", "--micro-batch", "2", "--device-memory", "2GiB")
    options += ("--processes", "2")  # which holds against the one that `run` says
    assert main(run(*options, "--output", str(path))) == 0
    printed = capsys.readouterr().out
    assert "| policy all + chunked loss |" in printed
    assert "the peak is set by" in printed
    assert "assumed:" in printed
    report = EstimateReport.from_dict(json.loads(path.read_text()))
    assert {row.micro_batch for row in report.rows} == {2}
    assert report.hardware["memory_gib"] == 2
    assert not report.is_measured
    page = tmp_path / "page.html"
    assert main(["report", str(path), "-o", str(page)]) == 0
    assert "policy pyao" in page.read_text()
    assert main(["report", str(path)]) == 0
    assert "llama micro on rtx4070" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "rtx407"), "unknown device 'rtx407'; did you mean 'rtx4070'?"),
        (("--device-memory=-1GiB",), "--device-memory is"),
        (("--device-memory", "24"), "24 bytes"),
        (("--link", "fast"), "--link is 'fast'; expected"),
        (("--link", "25GiB"), "expected a speed, such as 25GiB/s"),
        (("--link", "0GiB/s"), "expected a speed"),
        (("--sequence-length", "1"), "--sequence-length is 1; expected 2 or more"),
        (("--micro-batch", "0"), "--micro-batch is 0; expected 1 or more"),
        (("--lora", "0"), "--lora is 0; expected 1 or more"),
    ],
)
def test_bad_options_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(*options)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("opt:1.3c", "unknown size of opt '1.3c'"),
        ("lama:hidden_size=8", "is no causal language model"),
        ("/no/such/folder", "Give an architecture of transformers"),
        ("llama:hidden_size=abc", "Give an architecture of transformers"),
        ("llama:hidden_size=64,num_attention_heads=5", "Give an architecture of transformers"),
    ],
)
def test_bad_models_are_refused(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--model", model]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_another_kind_of_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert main(["estimate", "--model", str(tmp_path)]) == 2
    assert "'vit' is no causal language model" in capsys.readouterr().err


def test_a_length_without_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["estimate", "--model", "gpt2:124m", "--sequence-length", "2048"]
    assert main(options) == 2
    assert "the model has 1024 positions" in capsys.readouterr().err


def test_cards_are_found_by_the_names_that_people_write() -> None:
    for name in ("RTX 4070", "rtx-4070", "4070", "GeForce RTX 4070", "NVIDIA H200", "MI300X"):
        assert find_hardware(name).name in HARDWARE
    for name, expected in {
        "A100-40": "a100-40gb",
        "A100 80GB": "a100",
        "Tesla T4": "t4",
        "NVIDIA L4": "l4",
        "A10G": "a10g",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "4060 Ti 16": "rtx4060ti-16gb",
        "RTX 4060 Ti 16GB": "rtx4060ti-16gb",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100",
        "A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
    }.items():
        assert find_hardware(name).name == expected
    unknown_names = (
        "b300", "GeForce RTX 4060 Ti", "GeForce RTX 4070 Laptop GPU", "H100 PCIe", "H100 NVL",
        "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA L40S",
    )  # fmt: skip
    for unknown in unknown_names:  # the second has 8 GB or 16
        with pytest.raises(ConfigError, match="unknown device"):
            find_hardware(unknown)


@pytest.mark.thorough
def test_the_step_of_a_way_is_the_one_of_its_row(rows: dict[str, EstimateRow]) -> None:
    from hf_pyao.tools.estimate.one_step import check_method, step_of

    config = build_config("llama", find_size("llama", "tiny"), vocab_size=4096)
    options = {"training_state": "device", "sequence_length": 64, "window": WINDOW}
    report = EstimateReport(
        title="t",
        setup={"model": {"name": "llama tiny"}},
        hardware={},
        assumptions=[],
        verdict=verdict(list(rows.values()), SMALL, 64),
        provenance=PROVENANCE,
        rows=[row for row in rows.values() if row.method != "none + chunked loss"],
    )
    step = step_of(report, config, SMALL, options, "policy all")
    row = rows["policy all"]
    assert step.title == (
        f"One step of llama tiny on small: policy all, micro-batch {row.micro_batch} x 64 tokens"
    )
    assert step.totals.step_ms == row.step_ms
    assert step.totals.offloaded_bytes == row.offloaded_bytes > 0
    assert step.totals.late_peak_bytes == row.peak_bytes
    assert step.limit_bytes is not None
    assert row.peak_bytes <= step.limit_bytes
    assert {span.lane for span in step.spans} >= {"forward", "backward", "offload", "reload"}
    named = step_of(report, config, SMALL, options)
    assert named.setup["method"] == "none"
    assert report.verdict.startswith("Take plain training")
    with pytest.raises(
        ConfigError, match="which this model has no row for.*Rows: none, checkpointing"
    ):
        step_of(report, config, SMALL, options, "none + chunked loss")
    with pytest.raises(
        ConfigError, match="unknown way to train 'policy al'; did you mean 'policy all'"
    ):
        check_method("policy al")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step-method", "none"), "give --step FILE.json too"),
        (("--step", "x.json", "--step-method", "nothing"), "unknown way to train 'nothing'"),
        (("--step", "x.json", "--output", "./x.json"), "name the same file"),
        (("--step", "/"), "which is a folder"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_is_estimated(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(*options)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.sampled(every=1)
def test_every_card_says_what_no_tensor_can_have(name: str) -> None:
    card = HARDWARE[name]
    # Cards that check their memory keep a sixteenth of it for that.
    assert 0.3 <= card.context_gib <= (2.5 if name in ("t4", "l4", "a10", "a10g") else 1.5)
    assert card_memory(card).limit_bytes < (card.memory_gib - card.context_gib) * 2**30


def test_a_context_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_gib is 0.25"):
        dataclasses.replace(SMALL, context_gib=0.25)


def test_the_pages_say_what_was_estimated() -> None:
    """The PyAO paper's models on an RTX 4070: result files, and two pages."""
    root = Path(__file__).parents[3]
    package = root / "hf_pyao"
    page = (package / "tools" / "estimate" / "README.md").read_text(encoding="utf-8")
    lengths = (package / "engine" / "recompute" / "LONG_SEQUENCES.md").read_text(encoding="utf-8")
    estimates = [
        json.loads((root / "recipes" / "results" / name).read_text(encoding="utf-8"))["rows"]
        for name in (f"estimate_{model}_rtx4070.json" for model in PAPER_MODELS)
    ]
    for method in ("policy all", "policy all + chunked loss", "long context"):
        found = [next(row for row in rows if row["method"] == method) for rows in estimates]
        if method != "policy all":
            assert " / ".join(str(row["largest_micro_batch"]) for row in found) in lengths
        cells = [
            f"{row['largest_micro_batch']} ({row['largest_with_expandable_segments']})"
            f" · {row['tokens_per_s']:,.0f}"
            for row in found
        ]
        assert " | ".join(cells) in page


def test_lengths_that_vary_reserve_no_less() -> None:
    config, card = config_of(parse_model("gpt2:tiny")), find_hardware("rtx4090")
    equal, varying = (
        Estimator(config, card, sequence_length=640, shortest=shortest) for shortest in (None, 72)
    )
    found = [
        each.row(METHODS["none"], micro_batch=5, with_longest=False) for each in (equal, varying)
    ]
    assert found[1].reserved_bytes > found[0].reserved_bytes
    assert found[1].peak_bytes == found[0].peak_bytes
    planned = varying.row(METHODS["policy auto"], micro_batch=5, with_longest=False)
    assert planned.reserved_bytes is None


@pytest.mark.parametrize("given", ["91", "91-", "8192-91", "91-8192 tokens", "1-2"])
@pytest.mark.sampled(every=1)
def test_lengths_are_two_rising_numbers(given: str) -> None:
    args = make_parser().parse_args(["estimate", "--model", "llama:tiny", "--lengths", given])
    with pytest.raises(ConfigError, match="--lengths"):
        lengths_of(args)
    args.lengths = "91-8192"
    assert lengths_of(args) == (91, 8192)
    args.sequence_length = 512
    with pytest.raises(ConfigError, match="--sequence-length"):
        lengths_of(args)
