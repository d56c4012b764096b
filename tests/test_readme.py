"""README's snippets run, its flags exist, and its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pyao import PyAOArguments, PyAOConfig, PyAOTrainingArguments
from hf_pyao.cli import make_parser
from hf_pyao.tools.old_commands import renamed

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore")  # of what users have, in releases of theirs
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a user has before README's snippets: a model, a dataset, a batch."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=97,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, model.config.vocab_size, (4, 16))
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    return {
        "__name__": "__main__",
        "model": model,
        "dataset": dataset,
        "loader": [{"input_ids": ids, "labels": ids}],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }


def snippet(word: str) -> str:
    (found,) = (each for each in SNIPPETS if word in each)
    return found


def test_the_trainer_snippet(names: dict[str, Any]) -> None:
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(snippet("PyAOTrainingArguments"), names)
    changed = [
        not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True)
    ]
    assert any(changed)


def test_the_trl_snippet(names: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="the snippet is of its trainer")
    on_cpu = snippet("SFTTrainer").replace('output_dir="out"', 'output_dir="out", use_cpu=True')
    exec(on_cpu, names)
    assert names["args"].activation_offload
    assert issubclass(names["Config"], PyAOArguments)


def test_the_loop_snippet(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippet("attach"), names)
    assert "offload" in capsys.readouterr().out
    assert all(p.grad is None for p in names["model"].parameters()), "a step, and zero_grad()"


def test_no_snippet_is_left_out() -> None:
    assert len(SNIPPETS) == 3


def test_flags_and_settings_exist() -> None:
    flags = set(re.findall(r"\bactivation_offload\w*", README))
    assert len(flags) >= 5
    flags -= {"activation_offloading"}  # TRL's
    assert not [flag for flag in flags if not hasattr(PyAOTrainingArguments, flag)]
    settings = set(re.findall(r"`(\w+)=(?!=)", README)) - {"activation_offloading"} - flags
    of_others = {"device_map", "gradient_checkpointing", "activation_checkpointing"}
    known = set(PyAOConfig.__dataclass_fields__) | of_others
    assert settings <= known, settings - known


def commands() -> dict[str, str]:
    """Return the `pyao` commands of all pages, each with a page that has it."""
    root = Path(__file__).parents[1]
    pages = [
        root / "README.md",
        *(root / "hf_pyao").rglob("*.md"),
        *(root / "recipes").rglob("*.md"),
    ]
    found = {}
    for page in pages:
        for block in re.findall(
            r"```(?:bash|console)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("pyao "):
                    found[line] = str(page.relative_to(root))
    return found


def test_commands_on_pages_are_understood() -> None:
    found = commands()
    assert len(found) > 10
    for line, page in found.items():
        words = renamed(shlex.split(line, comments=True)[1:])
        try:
            make_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page}: pyao does not take {line!r}")
