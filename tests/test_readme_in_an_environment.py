"""README's snippets and commands, each in a process of its own, in an environment that has the package.

The environment is new, and the package is installed in it from a copy of the checkout. What the
package requires is shared with the environment that runs the tests. README's test command is not
run here: it runs these tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.test_readme import README, SNIPPETS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.thorough

BEFORE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 97}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))
ids = torch.randint(0, 97, (4, 16))
dataset = [{"input_ids": row, "labels": row} for row in ids]
loader = [{"input_ids": ids, "labels": ids}]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
"""What a user has."""


def block(marker: str) -> str:
    """Return the command behind a marker of README."""
    (found,) = re.findall(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the package; return its folder of programs."""
    folder = tmp_path_factory.mktemp("clean")
    names = ("pyproject.toml", "README.md", "LICENSE", "hf_pyao")
    for name in names:
        source, target = ROOT / name, folder / "checkout" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    where = [programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    # Below the environment's own packages: what is installed there comes first.
    (Path(own) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [programs / "python", "-m", "pip", "install", "-q", "--no-deps", "."]
    done = subprocess.run(command, cwd=folder / "checkout", capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the package cannot be built here: {done.stderr[-300:]}")
    return programs


def run(
    environment: Path, folder: Path, command: list[str], *, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run *command* in *folder* with nothing of this process's settings but the offline ones."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYAO_", "ACCELERATE_", "FSDP_"))
    }
    clean |= {
        "PATH": f"{environment}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, cwd=folder, env=clean, start_new_session=True, **pipes
    ) as started:
        try:
            out, err = started.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)  # with the processes that it has started
            raise
    assert started.returncode == 0, f"{command}: {out[-2000:]}{err[-3000:]}"
    return subprocess.CompletedProcess(command, started.returncode, out, err)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_is_a_script(number: int, environment: Path, tmp_path: Path) -> None:
    script = BEFORE + SNIPPETS[number].replace('"out",', '"out", use_cpu=True,')
    if "SFTTrainer" in script:
        pytest.importorskip("trl", reason="the snippet is of its trainer")
        script += "print(Trainer.__mro__[1].__name__, args.activation_offload)\n"
    (tmp_path / "script.py").write_text(script + "import hf_pyao\nprint(hf_pyao.__file__)\n")
    said = run(environment, tmp_path, ["python", "script.py"]).stdout
    assert str(environment.parent) in said.splitlines()[-1], "the installed package ran"


def test_the_line_for_accelerate(environment: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"`(accelerator = PyAOAccelerator\(.*?\))`", README)
    script = f"from hf_pyao import PyAOAccelerator, PyAOPlugin\n{line}\n{BEFORE}"
    script += "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    script += "accelerator.backward(model(input_ids=ids, labels=ids).loss)\n"
    (tmp_path / "script.py").write_text(script)
    run(environment, tmp_path, ["python", "script.py"])


def test_estimates_and_their_second_answer(environment: Path, tmp_path: Path) -> None:
    """README's command, for a small model and without the longest sequence: its own takes longer."""
    (line,) = re.findall(r"^pyao estimate .*$", README, re.MULTILINE)
    words = shlex.split(line)
    sizes = "hidden_size=64,intermediate_size=128,num_hidden_layers=4,num_attention_heads=4"
    words[words.index("--model") + 1] = f"llama:{sizes},num_key_value_heads=2,vocab_size=512"
    words.append("--no-longest-sequence")
    first = run(environment, tmp_path, words)
    assert "policy auto" in first.stdout
    without_torch = "import sys; from hf_pyao.cli import main; main(sys.argv[1:])"
    script = f"{without_torch}\nassert 'torch' not in sys.modules"
    again = run(environment, tmp_path, ["python", "-c", script, *words[1:]])
    assert again.stdout == first.stdout


def test_advice_doctor_and_a_report(environment: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"`(pyao advise .*?)`", README)
    script = BEFORE + (
        "for _ in range(9):\n"
        "    model(input_ids=ids, labels=ids).loss.backward()\n"
        "    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(script)
    assert "Advice for" in run(environment, tmp_path, shlex.split(line)).stdout
    words = ["pyao", "doctor", "--device", "cpu", "--no-verdict"]
    assert "torch" in run(environment, tmp_path, words).stdout
    script = BEFORE + (
        "from hf_pyao import PyAOConfig, attach\n"
        'with attach(model, PyAOConfig(policy="all", report="run.json")):\n'
        "    for _ in range(3):\n"
        "        model(input_ids=ids, labels=ids).loss.backward()\n"
    )
    (tmp_path / "run.py").write_text(script)
    run(environment, tmp_path, ["python", "run.py"])
    (line,) = re.findall(r"`(pyao report run.json .*?)`", README)
    run(environment, tmp_path, [*shlex.split(line), "--no-plots"])
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_the_main_job_trains(environment: Path, tmp_path: Path) -> None:
    """README's first command without its installation, for three steps of a tiny model."""
    words = shlex.split(block("main job").rpartition("&& ")[2].removeprefix(".venv/bin/"))
    assert words == ["accelerate", "launch", "recipes/train_opt.py"]
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    started = ["python", "-m", "accelerate.commands.launch", "--dynamo_backend", "no", words[2]]
    sizes = "--model_size micro --max_steps 3 --block_size 32 --per_device_train_batch_size 4"
    text = "--max_text_mib 0.1 --vocab_size 400"
    said = run(environment, tmp_path, [*started, *sizes.split(), *text.split()]).stdout
    assert "held-out text" in said
