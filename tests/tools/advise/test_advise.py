"""``pyao advise``: real scripts, what is said of them, and that nothing is written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import GPT2Config, HfArgumentParser

from hf_pyao import PyAOConfig
from hf_pyao.cli import main
from hf_pyao.hf.arguments import PyAOTrainingArguments
from hf_pyao.tools.advise import forbidden_writes
from hf_pyao.tools.estimate.fake_step import FakeTraining
from tests.helpers.simulation.fake_peak import peak_of

MODEL = """
import os, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, GPT2Config
config = GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2)
config.use_cache = False
model = AutoModelForCausalLM.from_config(config).train()
ids = torch.randint(512, (16, 128))
"""

LOOP = f"""{MODEL}
os.makedirs("out/logs", exist_ok=True)
os.makedirs("out/logs", exist_ok=True)
Path("out/log.txt").write_text("begun")
with open("out/log.txt", "a") as file:
    file.write(" again")
assert Path("out/log.txt").read_text() == "begun again"
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for number in range(9):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), f"{{sys.argv[1]}}/{{number}}.pt")
    print("step", number)
print("the script has ended")
"""

TRAINER = f"""{MODEL}
from transformers import Trainer, TrainingArguments
args = TrainingArguments(sys.argv[1], per_device_train_batch_size=4, max_steps=20, save_steps=1,
                         use_cpu=True, gradient_accumulation_steps=2, report_to="none")
data = [{{"input_ids": ids[0], "labels": ids[0]}}] * 64
class OwnTrainer(Trainer):
    pass
OwnTrainer(model, args, train_dataset=data).train()
print("the script has ended")
"""

ACCELERATE = f"""{MODEL}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for number in range(9):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(sys.argv[1])
print("the script has ended")
"""


def advise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *options: str
) -> tuple[int, list[str]]:
    """Run the command on a script in *folder*; return its exit status, and the files there.

    Without the kernel's protection, which would hold for this process until it ends.
    """
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    words = ["advise", "--unprotected", "--gpu", "rtx4070", *options, "train.py", "--", "out/here"]
    status = main(words)
    return status, sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.thorough
def test_a_loop_is_ended_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, files = advise(tmp_path, monkeypatch, LOOP)
    said = capsys.readouterr().out
    assert status == 0
    assert files == ["train.py"]
    assert "step 1" in said
    assert "step 2" not in said
    assert "the script has ended" not in said
    assert "input_ids int64[16, 128]" in said
    assert "float32[2048, 512] 4.19 MB" in said  # the logits
    assert "Leave the script as it is." in said
    _check_pasted(said)
    _check_peak(said)


def test_what_a_script_removes_or_changes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    for name in ("old.txt", "older.txt", "oldest.txt"):
        (tmp_path / "out" / name).write_text(name)
    changes = """if True:
        import os, shutil
        from pathlib import Path
        old = Path("out/older.txt")
        os.truncate(old, 1); old.touch(); old.chmod(0o111); os.utime(old, (1, 1))
        os.link(old, "linked.txt"); Path("out/mine").symlink_to("old.txt")
        with open(os.open(old, os.O_WRONLY | os.O_APPEND), "a") as file: file.write("er")
        assert old.read_text() == "older.txter"
        Path("LOCK").touch(); lock = os.open("LOCK", os.O_RDWR); os.write(lock, b"me")
        os.close(lock)
        assert Path("LOCK").read_text() == "me"
        os.remove("out/old.txt"); Path("out/older.txt").unlink()
        os.rename("out/oldest.txt", "out/new.txt")
        open("out/mine.txt.tmp", "w").close(); os.replace("out/mine.txt.tmp", "out/mine.txt")
        assert Path("out/mine.txt").read_text() == ""
        shutil.rmtree("out"); os.makedirs("out", exist_ok=True)
        Path("out/old.txt").write_text("new")
        try: os.remove("never.txt")
        except FileNotFoundError: raise KeyboardInterrupt
    """
    before = (tmp_path / "out/older.txt").stat()
    status, files = advise(tmp_path, monkeypatch, changes)
    assert status == 130
    assert files == ["out", "out/old.txt", "out/older.txt", "out/oldest.txt", "train.py"]
    assert (tmp_path / "out" / "old.txt").read_text() == "old.txt"
    after = (tmp_path / "out/older.txt").stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 9)


def test_the_kernel_forbids_compiled_code_and_children_to_write(tmp_path: Path) -> None:
    kept, free = tmp_path / "kept", tmp_path / "free"
    for folder in (kept, free):
        folder.mkdir()
        (folder / "a").write_text("a")
    code = """if True:
        import ctypes, pathlib, subprocess, sys
        from hf_pyao.tools.advise.forbidden_writes import forbid_writes
        kept, free = map(pathlib.Path, sys.argv[1:])
        forbid_writes([free, pathlib.Path("/dev/null")])
        libc, held = ctypes.CDLL(None), bytes(kept / "a")
        libc.chmod(held, 0); libc.truncate(held, ctypes.c_long(0)); libc.unlink(held)
        libc.symlink(held, bytes(kept / "b")); libc.mkdir(bytes(kept / "c"), 0o777)
        for words in ("chmod 0 a", "touch -d 2000-01-01 a", "mv a b", "rm a", "echo >> a"):
            subprocess.run(words, shell=True, cwd=kept, stderr=subprocess.DEVNULL)
        subprocess.run("echo b >> a; mkdir d", shell=True, cwd=free)
    """
    before = (kept / "a").stat()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code, str(kept), str(free)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if "writes-not-forbidden" in done.stderr:
        pytest.skip("this kernel cannot forbid it, and says so")
    after = (kept / "a").stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert [(each.name, each.read_text()) for each in kept.iterdir()] == [("a", "a")]
    assert (free / "a").read_text() == "ab\n" and (free / "d").is_dir(), done.stderr


def test_a_system_that_cannot_forbid_to_write_is_refused_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forbidden_writes.platform, "machine", lambda: "abacus")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('out.txt', 'w')")
    assert main(["advise", "--gpu", "rtx4070", "train.py"]) == 2
    assert "--unprotected" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def _check_peak(said: str) -> None:
    """Compare the peak with that of a step that is run, by counting what is alive in it."""
    found = re.search(r"The peak of ([\d.]+) MB", said)
    assert found
    config = GPT2Config(
        n_embd=64, n_layer=6, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2
    )
    training = FakeTraining(
        config=config, training_state="device", optimizer_bytes=8, dtype="float32"
    )
    counted = peak_of(training, PyAOConfig(policy="off"), 16, 128).peak_bytes
    assert float(found[1]) * 1e6 == pytest.approx(counted, rel=0.01)


def _check_pasted(said: str) -> None:
    """Compare flags and Python of each setting: both give the same configuration."""
    flags = re.findall(r"TrainingArguments\): (--.*)", said)
    expressions = re.findall(r"attach\(model, (PyAOConfig\(.*\))\)", said)
    assert len(flags) == len(expressions) > 0
    for line, expression in zip(flags, expressions, strict=True):
        words = ["--output_dir", "unused", *line.split()]
        (args,) = HfArgumentParser(PyAOTrainingArguments).parse_args_into_dataclasses(words)
        assert args.pyao_config() == eval(expression)


@pytest.mark.parametrize(
    "script",
    [TRAINER, pytest.param(ACCELERATE, marks=pytest.mark.thorough)],
    ids=["trainer", "accelerate"],
)
def test_trainer_and_accelerate_write_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in (AcceleratorState, GradientState):  # the process may have run another Trainer
        state._reset_state()
    status, files = advise(tmp_path, monkeypatch, script)
    said = capsys.readouterr().out
    assert status == 0
    assert files == ["train.py"]
    assert "the script has ended" not in said
    assert "# Advice for GPT2LMHeadModel on rtx4070" in said
    assert ("gradients of earlier micro-batches are held" in said) == (script is TRAINER)
    mixin = "class A(PyAOTrainerMixin, OwnTrainer) with class B(PyAOArguments, TrainingArguments)"
    for words in (mixin, "OwnTrainer(..., callbacks=[PyAOCallback(PyAOConfig("):
        assert (words in said) == (script is TRAINER)


@pytest.mark.thorough
def test_a_small_card_gets_settings_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = advise(tmp_path, monkeypatch, LOOP, "--device-memory", "760MB", "--steps", "1")
    said = capsys.readouterr().out
    assert status == 0
    assert "it does not fit" in said
    assert "Leave the script as it is." not in said
    limit = re.search(r"where ([\d.]+) MB may be reserved", said)
    needed = re.findall(r"^\d\. ([\d.]+) MB", said, re.MULTILINE)
    assert limit and needed
    assert all(float(each) <= float(limit[1]) for each in needed)
    assert ", does not fit: " not in said
    advise(tmp_path, monkeypatch, LOOP, "--device-memory", "1GiB", "--steps", "1")
    larger = re.findall(r"^\d\. ([\d.]+) MB", capsys.readouterr().out, re.MULTILINE)
    assert len(larger) == 3  # what fits does not hide what takes less
    assert float(larger[-1]) == pytest.approx(float(needed[-1]), rel=0.1)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import torch\nprint('no model')\n", "no model with layers was called in training"),
        (f"{MODEL}\nmodel.eval()\nmodel(ids)\n", "no model with layers was called in training"),
    ],
    ids=["no model", "never trains"],
)
def test_scripts_without_a_step_are_refused(
    script: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = advise(tmp_path, monkeypatch, script)
    assert status == 2
    assert expected in capsys.readouterr().err


def test_a_script_that_raises_shows_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = advise(tmp_path, monkeypatch, "raise OSError('the data is not there')")
    error = capsys.readouterr().err
    assert status == 1
    assert "line 1, in <module>" in error
    assert "failed before its step" in error
    assert "the data is not there" in error


def test_a_script_out_of_memory_is_advised_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = f"{MODEL}\nmodel.transformer.wte.requires_grad_(False)\nmodel(ids)\n"
    fails += "raise torch.OutOfMemoryError('CUDA out of memory.')"
    status, _ = advise(tmp_path, monkeypatch, fails, "--device-memory", "701MiB")
    said = capsys.readouterr().out
    assert status == 0
    assert "The script ran out of memory." in said
    assert "No setting fits." in said
    assert "LoRA" not in said  # some weights are frozen already


def test_an_interrupt_ends_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_call = __import__("torch").nn.Module.__call__
    status, files = advise(
        tmp_path, monkeypatch, "open('out.txt', 'w').close()\nraise KeyboardInterrupt"
    )
    assert status == 130
    assert "interrupted" in capsys.readouterr().err
    assert files == ["train.py"]
    assert __import__("torch").nn.Module.__call__ is own_call


@pytest.mark.thorough
def test_a_signal_ends_a_running_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sqlite3, time\nopen('out.txt', 'w')\n"
        "try: sqlite3.connect('a.db').execute('create table a (b)')\n"
        "except sqlite3.OperationalError: print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "hf_pyao.cli", "advise", "--gpu", "rtx4070", "train.py"]
    running = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A shell's background jobs, and all that they start, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    while "begun" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in error
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_a_cpu_without_a_card_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('not run')")
    assert main(["advise", "train.py"]) == 2
    captured = capsys.readouterr()
    assert "--gpu" in captured.err
    assert "not run" not in captured.out


def test_a_card_named_behind_the_script_is_said_to_be_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('not run')")
    assert main(["advise", "train.py", "--gpu", "rtx4090"]) == 2
    assert "before it" in capsys.readouterr().err
