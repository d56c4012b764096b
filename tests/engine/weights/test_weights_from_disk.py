"""Frozen weights on a disk: faults of the disk, the file that stays, and what users do meanwhile."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights_on_disk
from hf_pyao.auto.offloader import Offloader
from hf_pyao.engine.stores.disk_files import is_direct
from hf_pyao.engine.stores.disk_reader import DiskReader
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.errors import ConfigError, ConflictError, DiskError
from tests.engine.weights.test_host_bytes import on_linux, pages_of
from tests.helpers import FunctionLayer, Stack, tiny_batch
from tests.helpers.adapters import tiny_lora
from tests.helpers.disks import (
    Fault,
    files_of,
    holds_in_child,
    on_disk,
    plain,
    read_with,
    take_any_file_system,
)

SIZE = 48


@pytest.fixture(autouse=True)
def _any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_file_system(monkeypatch)


def adapted(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ layer.weight)
    return torch.relu(hidden @ layer.weight.t()) * layer.scale + x


def frozen_stack(num_layers: int = 4) -> Stack:
    torch.manual_seed(1)
    stack = Stack(*[adapted] * num_layers, size=SIZE)
    stack.requires_grad_(False)
    for layer in stack.modules():
        if isinstance(layer, FunctionLayer):
            layer.scale = nn.Parameter(torch.rand(SIZE))
    return stack


def step(model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """Return the loss and the gradients of one step."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randn(3, SIZE, generator=generator)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def attached(model: nn.Module, folder: Path, **settings: Any) -> Offloader:
    return attach(model, PyAOConfig(**on_disk(model, folder, policy="off", **settings)))


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def reader_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("pyao-disk")]


# ---- faults ------------------------------------------------------------------------------------------


def at(point: int, *, lasting: bool, what: Callable[..., int]) -> Fault:
    """Do *what* at read *point*, and, if *lasting*, at all later ones."""

    def fault(descriptor: int, buffers: Sequence[memoryview], offset: int, n: int) -> int:
        if n == point or (lasting and n > point):
            return what(descriptor, buffers, offset, n)
        return plain(descriptor, buffers, offset, n)

    return fault


def io_error(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_descriptor(*_: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def short(descriptor: int, buffers: Sequence[memoryview], offset: int, n: int) -> int:
    return plain(descriptor, [buffers[0][:4096]], offset, n)


def corrupted(descriptor: int, buffers: Sequence[memoryview], offset: int, n: int) -> int:
    got = plain(descriptor, buffers, offset, n)
    buffers[0][7] ^= 0x40
    return got


def at_its_end(*_: Any) -> int:
    return 0


FAULTS: dict[str, tuple[Callable[..., int], bool]] = {
    "I/O error, once": (io_error, False),
    "I/O error that lasts": (io_error, True),
    "short reads": (short, True),
    "a corrupted block, once": (corrupted, False),
    "a corrupted block that stays so": (corrupted, True),
    "a truncated file": (at_its_end, True),
    "descriptors used up": (no_descriptor, True),
}
GOES_ON = ("I/O error, once", "short reads", "a corrupted block, once")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_child_of_a_fork_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, reader = frozen_stack(5), torch.ones(2, SIZE), DiskReader()
    monkeypatch.setattr(weights_on_disk, "DiskReader", lambda: reader)
    with torch.no_grad():
        expected = model(x)

    @torch.no_grad()
    def evaluates() -> bool:
        return all(torch.equal(model(x), expected) for _ in range(2))

    with attached(model, tmp_path):
        step(model)  # further blocks are read ahead now
        with reader._lock:  # as if a thread of the parent had it
            assert holds_in_child(evaluates)
        assert evaluates() and reader.read_bytes


def inject(name: str, point: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train through a fault at read *point*: equal bits, or an error with the file's name."""
    what, lasting = FAULTS[name]
    expected = [step(frozen_stack(), seed) for seed in range(2)]
    model = frozen_stack()
    before = weights_of(model)
    broken = True

    def fault(descriptor: int, buffers: Sequence[memoryview], offset: int, n: int) -> int:
        chosen = at(point, lasting=lasting, what=what) if broken else plain
        return chosen(descriptor, buffers, offset, n)

    with monkeypatch.context() as patch:
        offsets = read_with(patch, fault)
        with attached(model, folder) as offloader:
            done, message = 0, ""
            try:
                for seed in range(2):
                    assert same(step(model, seed), expected[seed]), (name, point)
                    done += 1
            except DiskError as error:
                message, broken = str(error), False
            assert (message == "") == (name in GOES_ON), (name, point)
            assert not message or str(files_of(folder)[0]) in message, (name, point)
            assert len(offsets) > point, (name, point, "the fault was never met")
            for seed in range(done, 2):  # the drive is well again
                assert same(step(model, seed), expected[seed]), (name, point)
            assert offloader.weights is not None
    assert all(map(torch.equal, weights_of(model), before)), (name, point)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in (0, 1, 5):
        inject(name, point, tmp_path, monkeypatch)
    assert len(files_of(tmp_path)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_at_100_points(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five reads a step; other numbers of layers have other blocks at the same read.
    for num_layers in range(4, 24):
        monkeypatch.setattr(
            sys.modules[__name__], "frozen_stack", lambda n=num_layers: _stack(n), raising=True
        )
        for point in range(5):
            inject(name, point * num_layers // 5, tmp_path / str(num_layers), monkeypatch)
    assert len(files_of(tmp_path)) == 20


_stack = frozen_stack


def test_the_folder_may_be_removed_meanwhile(tmp_path: Path) -> None:
    expected = [step(frozen_stack(), seed) for seed in range(2)]
    model, folder = frozen_stack(), tmp_path / "disk"
    with attached(model, folder):
        assert same(step(model, 0), expected[0])
        shutil.rmtree(folder)
        assert same(step(model, 1), expected[1])
    assert same(step(model, 1), expected[1]), "the mapping keeps the file"
    with attached(frozen_stack(), folder):
        assert len(files_of(folder)) == 1


def test_a_full_disk_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = frozen_stack()
    expected = step(model)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskError, match="No space"):
            attached(model, tmp_path)
    assert files_of(tmp_path) == []
    assert same(step(model), expected)
    with attached(model, tmp_path):
        assert same(step(model), expected)


def test_a_folder_that_cannot_be_used_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = frozen_stack()
    expected = step(model)
    link = tmp_path / "linked" / f"pyao-{os.getuid()}"
    link.parent.mkdir()
    link.symlink_to(tmp_path)
    (tmp_path / "a file").write_text("")
    for folder in (tmp_path / "linked", tmp_path / "a file"):
        with pytest.raises(ConfigError, match="disk_path"):
            attached(model, folder)
        assert same(step(model), expected)


# ---- two runs, ends of runs -----------------------------------------------------------------------


def test_two_models_and_later_runs_have_one_file(tmp_path: Path) -> None:
    expected = [step(frozen_stack(), seed) for seed in range(2)]
    one, other = frozen_stack(), frozen_stack()
    with attached(one, tmp_path):
        (file,) = files_of(tmp_path)
        written = file.stat()
        with attached(other, tmp_path):
            assert same(step(one, 0), expected[0])
            assert same(step(other, 1), expected[1])
        assert same(step(one, 1), expected[1])
    with attached(other, tmp_path):  # whose weights are views of the file by now
        assert same(step(other, 0), expected[0])
    assert files_of(tmp_path) == [file]
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    assert file.stat().st_ino == written.st_ino


def test_other_host_memory_takes_the_same_file(tmp_path: Path) -> None:
    for share in (0.9, 0.99):
        model = frozen_stack(6)
        with attached(model, tmp_path, share=share) as offloader:
            step(model)
            assert offloader.weights is not None
    assert len(files_of(tmp_path)) == 1


def test_no_thread_and_no_memory_is_left(tmp_path: Path) -> None:
    model = frozen_stack()
    offloader = attached(model, tmp_path)
    pool = offloader.host_pool
    step(model)
    before = pool.room_to_reserve()
    offloader.detach()
    assert reader_threads() == []
    assert pool.room_to_reserve() > before
    del offloader, pool, model
    model = frozen_stack()
    attached(model, tmp_path)
    step(model)
    del model
    gc.collect()
    assert reader_threads() == []


RUN = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    sys.path[:0] = {paths!r}
    from pathlib import Path
    from hf_pyao.engine.stores import disk_files
    from tests.engine.weights.test_weights_from_disk import attached, frozen_stack, step
    disk_files.MEMORY_FILE_SYSTEMS = frozenset()
    model = frozen_stack()
    with attached(model, Path({folder!r})):
        print("ready", flush=True)
        while True:
            step(model)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_the_base_alone(number: int, tmp_path: Path) -> None:
    code = textwrap.dedent(RUN).format(paths=sys.path, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            run.send_signal(number)
            run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode != 0
    assert len(files_of(tmp_path)) == 1
    model = frozen_stack()
    with attached(model, tmp_path):
        assert same(step(model), step(frozen_stack()))
    assert len(files_of(tmp_path)) == 1


class Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("point", range(18))
def test_an_interrupt_at_any_read_or_wait(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = step(frozen_stack()), frozen_stack()
    with attached(model, tmp_path) as offloader:
        assert offloader.weights is not None
        calls = 0

        def interrupting(own: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if before and calls == point:
                    raise Interrupted
                found = own(*args, **options)
                if not before and calls == point:
                    raise Interrupted
                return found

            return call

        with monkeypatch.context() as patch:
            reader = weights_on_disk.DiskReader
            patch.setattr(reader, "read", interrupting(reader.read, before=bool(point % 2)))
            patch.setattr(
                weights_on_disk.ReadAhead,
                "_wait_a_little",
                interrupting(weights_on_disk.ReadAhead._wait_a_little, before=True),
            )
            try:
                step(model)
            except Interrupted:
                pass
        assert same(step(model), expected)
        assert same(step(model), expected)


# ---- the weights themselves ----------------------------------------------------------------------------


def ring_of(offloader: Offloader) -> WeightRing:
    assert offloader.weights is not None
    assert offloader.weights.ring is not None
    return offloader.weights.ring


def test_direct_reads_are_in_force_and_say_so(tmp_path: Path) -> None:
    with attached(frozen_stack(), tmp_path) as offloader:
        files = [block.masters.in_file for block in ring_of(offloader).blocks]
        found = [each.file for each in files if each is not None]
        assert found
        for file in found:
            assert is_direct(file.descriptor) == file.is_direct
            assert ("direct reads" in offloader.describe()) == file.is_direct


def test_state_dict_and_files_have_the_weights(tmp_path: Path) -> None:
    plain_model, model = tiny_lora("llama"), tiny_lora("llama")
    with attached(model, tmp_path / "disk"):
        model(**tiny_batch(0)).loss.backward()
        for (name, ours), theirs in zip(
            model.state_dict().items(), plain_model.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs), name
        assert isinstance(model, PeftModel)
        model.base_model.save_pretrained(tmp_path / "saved")
    assert isinstance(plain_model, PeftModel)
    plain_model.base_model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@on_linux
def test_pages_that_a_reader_has_left_are_gone_after_the_next_forward(tmp_path: Path) -> None:
    model = frozen_stack()
    with attached(model, tmp_path):
        os.sync()  # pages that are not written yet cannot be let go
        (file,) = files_of(tmp_path)
        sums = [p.sum() for p in model.parameters()]
        before = pages_of(file)
        step(model)
        assert before > 0
        assert pages_of(file) <= before / 2, "whole pages"
        assert same([p.sum() for p in model.parameters()], sums)


def test_a_merge_is_refused_until_it_is_attached_again(tmp_path: Path) -> None:
    plain_model, model = tiny_lora("llama"), tiny_lora("llama")
    with attached(model, tmp_path):
        (file,) = files_of(tmp_path)
        content = file.read_bytes()
        for each in (plain_model, model):
            each(**tiny_batch(0)).loss.backward()
            assert isinstance(each, PeftModel)
            each.merge_adapter()
        with pytest.raises(ConflictError, match="changed in place.*Detach, and attach again") as it:
            model(**tiny_batch(1))
        assert str(file) in str(it.value)
    assert file.read_bytes() == content
    with attached(model, tmp_path):
        found, expected = (each(**tiny_batch(1)).loss for each in (model, plain_model))
        assert torch.equal(found, expected)
    assert file.read_bytes() == content


def test_writes_that_leave_no_version_are_refused(tmp_path: Path) -> None:
    model = frozen_stack()
    with attached(model, tmp_path):
        step(model)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data[3, 5] += 1.0
        with pytest.raises(ConflictError, match="changed in place"):
            step(model)


def test_what_is_in_flight_is_bounded(tmp_path: Path) -> None:
    with attached(frozen_stack(), tmp_path) as offloader:
        figures = offloader.weights.figures() if offloader.weights is not None else {}
        assert 0 < figures["staging_bytes"] <= 512 * 2**20


def test_blocks_for_which_the_host_has_room_stay_there(tmp_path: Path) -> None:
    model = frozen_stack(8)
    with attached(model, tmp_path, share=0.99) as offloader:
        places = [block.masters.in_file is None for block in ring_of(offloader).blocks]
        assert 0 < sum(places) < 8
        assert same(step(model), step(frozen_stack(8)))
    with attached(frozen_stack(8), tmp_path, share=1.01) as offloader:
        assert all(block.masters.in_file is None for block in ring_of(offloader).blocks)


def test_weights_whose_writes_are_not_known_are_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All descriptors are in use as it is asked whether weights were written."""
    stack = frozen_stack()
    before = [each.detach().clone() for each in stack.parameters()]

    def fails(memory: torch.Tensor) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with attach(stack, PyAOConfig(**on_disk(stack, tmp_path))):
        (base,) = files_of(tmp_path)
        monkeypatch.setattr("hf_pyao.engine.weights.on_disk.was_written", fails)
        with pytest.raises(DiskError, match="Too many open files") as error:
            stack(torch.ones(2, SIZE)).sum().backward()
        assert str(base) in str(error.value)
        monkeypatch.undo()
        take_any_file_system(monkeypatch)
    for found, expected in zip(stack.parameters(), before, strict=True):
        assert torch.equal(found, expected)
