"""Saved tensors on a disk: the same gradients, a bounded memory, files that leave nothing behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import importlib.util
import itertools
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_pyao
from hf_pyao import attach
from hf_pyao.engine.stores import disk_files
from hf_pyao.engine.stores.disk_figures import TB, WriteLimit
from hf_pyao.engine.stores.disk_files import private_folder
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.engine.stores.free_ranges import FreeRanges
from hf_pyao.engine.stores.nameless_file import DiskCalls, NamelessFile
from hf_pyao.engine.stores.store import HostUse
from hf_pyao.engine.transfer.disk_transport import DiskTransport
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.errors import ConfigError, DiskError
from tests.helpers import (
    EVERYTHING,
    MAIN,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)
from tests.helpers.disks import holds_in_child

ON_DISK = replace(EVERYTHING, window=4096, host_memory_gib=2**-16)
"""16 KiB of the host's memory: nearly all goes to the disk."""


def on_disk(folder: Path, **more: Any) -> Any:
    return replace(ON_DISK, **{"disk_path": folder, "disk_gib": 0.125, **more})


def steps(model: nn.Module, num_steps: int = 2) -> dict[str, torch.Tensor]:
    for seed in range(num_steps):
        model(**tiny_batch(seed)).loss.backward()
    return gradients_of(model)


def store_of(offloader: Any) -> DiskStore:
    _, store = offloader.link.tiers.stores
    assert isinstance(store, DiskStore)
    return store


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory in front of the disk holds a few tensors, so that some are read."""
    init = DiskStore.__init__

    def small(self: DiskStore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{"memory_bytes": 2**16, **kwargs})

    monkeypatch.setattr(DiskStore, "__init__", small)


@pytest.mark.parametrize("model_type", MAIN)
def test_gradients_are_the_same(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    expected = steps(copy.deepcopy(model), 3)
    with attach(model, on_disk(tmp_path)) as offloader:
        assert_same_tensors(steps(model, 3), expected, "gradients")
        totals, store = offloader.totals(), store_of(offloader)
        assert totals["disk_written_bytes"] > 0
        assert totals["disk_read_bytes"] > 0
        assert totals["disk_forwarded_bytes"] > 0
        assert totals["disk_peak_bytes"] > totals["host_peak_bytes"]
        assert store.settle() == 0
        assert store.memory.peak_bytes <= 2**16
        assert not list((tmp_path / f"pyao-{os.getuid()}").iterdir()), "the file has no name"
        if store.file.is_direct:
            assert fcntl.fcntl(store.file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
        mode = os.fstat(store.file.descriptor).st_mode
        assert stat.S_IMODE(mode) == 0o600


class Stop(Exception):
    pass


@contextlib.contextmanager
def raising_in(module: nn.Module, *, backward: bool) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Stop

    register = module.register_full_backward_pre_hook if backward else module.register_forward_hook
    handle = register(stop)
    try:
        yield
    finally:
        handle.remove()


def accumulate(model: nn.Module) -> dict[str, torch.Tensor]:
    return steps(model, 4)


def segments(model: nn.Module) -> dict[str, torch.Tensor]:
    return steps(model)


def two_forwards(model: nn.Module) -> dict[str, torch.Tensor]:
    first, second = model(**tiny_batch(0)).loss, model(**tiny_batch(1)).loss
    second.backward()
    first.backward()
    return gradients_of(model)


def errors(model: nn.Module) -> dict[str, torch.Tensor]:
    layer = next(each for each in model.modules() if isinstance(each, nn.ModuleList))[1]
    for backward in (False, True):
        model.zero_grad()
        with contextlib.suppress(Stop), raising_in(layer, backward=backward):
            model(**tiny_batch(0)).loss.backward()
    model.zero_grad()
    return steps(model)


@pytest.mark.parametrize("model_type", MAIN)
@pytest.mark.parametrize("program", [accumulate, segments, two_forwards, errors])
def test_gradients_are_the_same_in(program: Any, model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    expected = program(copy.deepcopy(model))
    more = {"checkpoint_every": 1} if program is segments else {}
    with attach(model, on_disk(tmp_path, host_memory_gib=0.0, **more)) as offloader:
        found = program(model)
        assert offloader.totals()["disk_written_bytes"] > 0
        assert store_of(offloader).settle() == 0
    assert_same_tensors(found, expected, program.__name__)


@pytest.mark.parametrize("codec", ["int8", "bitmask"])
def test_encoded_tensors_go_to_the_disk(codec: str, tmp_path: Path) -> None:
    found = []
    for config in (
        replace(ON_DISK, codec=codec, host_memory_gib=1),
        on_disk(tmp_path, codec=codec),
    ):
        model = tiny_model("llama")
        with attach(model, config):
            found.append(steps(model))
    assert_same_tensors(found[0], found[1], codec)


def test_without_a_path_or_with_0_gib_there_is_no_disk(tmp_path: Path) -> None:
    for config in (ON_DISK, on_disk(tmp_path, disk_gib=0)):
        with attach(tiny_model("llama"), config) as offloader:
            assert len(offloader.link.tiers.stores) == 1
    assert not list(tmp_path.iterdir())


def test_an_open_size_leaves_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with attach(tiny_model("llama"), on_disk(tmp_path, disk_gib=None)) as offloader:
        store = store_of(offloader)
        expected = (found.f_bavail * found.f_frsize - 10 * 2**30) // 2
        assert abs(store.capacity_bytes - expected) < 2**32
        assert "GiB free, less 10, divided by 2 ranks" in offloader.describe()
        assert store._reserve_bytes == 10 * 2**30


# ---- what fails -------------------------------------------------------------------------------


class Failing(DiskCalls):
    """Fails in the accesses of one kind from a certain one on."""

    def __init__(self, kind: str, code: int, after: int = 0) -> None:
        self.kind, self.code, self.left = kind, code, after

    def _fail(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))

    def write(self, *args: Any) -> int:
        self._fail("write")
        return super().write(*args)

    def read(self, *args: Any) -> int:
        self._fail("read")
        return super().read(*args)

    def allocate(self, *args: Any) -> None:
        self._fail("allocate")
        super().allocate(*args)


@contextlib.contextmanager
def failing(calls: DiskCalls) -> Iterator[None]:
    init = NamelessFile.__init__

    def with_calls(self: NamelessFile, folder: Path, _: Any = None) -> None:
        init(self, folder, calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamelessFile, "__init__", with_calls)
        yield


@pytest.mark.parametrize(
    ("kind", "code", "key"),
    [
        ("allocate", errno.ENOSPC, "disk-full"),
        ("write", errno.EIO, "disk-stopped"),
        ("write", errno.EROFS, "disk-stopped"),
    ],
)
def test_training_goes_on_where_nothing_is_lost(
    kind: str, code: int, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("gpt2")
    expected = steps(copy.deepcopy(model), 3)
    with failing(Failing(kind, code)), attach(model, on_disk(tmp_path)) as offloader:
        assert_same_tensors(steps(model, 3), expected, "gradients")
        assert offloader.totals()["kept_bytes/host memory full"] > 0
    said = [each.getMessage() for each in caplog.records if f"[pyao:{key}]" in each.getMessage()]
    assert len(said) == 1
    assert str(tmp_path) in said[0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_child_of_a_fork_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    model = tiny_model("opt")
    expected = steps(copy.deepcopy(model))
    with attach(model, on_disk(tmp_path)) as offloader:
        loss = model(**tiny_batch(0)).loss
        store = store_of(offloader)
        storage = next(iter(store._live.values())).stand_in.untyped_storage()

        def leaves_it() -> bool:
            assert store.acquire(4096) is None
            with pytest.raises(DiskError, match="forked"):
                store.memory_to_read(storage)
            offloader.detach()
            store._live.clear()
            store.rest()
            return True

        assert holds_in_child(leaves_it)
        assert os.fstat(store.file.descriptor).st_size == store.file.nbytes > 0
        loss.backward()
        model(**tiny_batch(1)).loss.backward()
        assert_same_tensors(gradients_of(model), expected, "gradients")


def test_bytes_that_cannot_be_read_are_an_error_before_the_step(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    before = {name: each.clone() for name, each in model.named_parameters()}
    with (
        failing(Failing("read", errno.EIO)),
        attach(model, on_disk(tmp_path)) as offloader,
        pytest.raises(DiskError, match=r"cannot read '.*activations-.*Input/output error"),
    ):
        steps(model)
    assert_same_tensors(dict(model.named_parameters()), before, "parameters")
    expected = steps(copy.deepcopy(model))
    model.zero_grad()
    with attach(model, on_disk(tmp_path)) as offloader:
        assert_same_tensors(steps(model), expected, "a further run")
        assert store_of(offloader).settle() == 0


def test_a_file_system_without_direct_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_open = os.open

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    model = tiny_model("gpt2")
    expected = steps(copy.deepcopy(model))
    with attach(model, on_disk(tmp_path)) as offloader:
        assert not store_of(offloader).file.is_direct
        assert_same_tensors(steps(model), expected, "gradients")
    assert "[pyao:disk-not-direct]" in caplog.text


def test_the_folder_may_be_removed_and_descriptors_may_run_out(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    expected = steps(copy.deepcopy(model), 3)
    with attach(model, on_disk(tmp_path / "disk")):
        shutil.rmtree(tmp_path / "disk")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            found = steps(model, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same_tensors(found, expected, "gradients")


def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(disk_files, "file_system_of", lambda _: "tmpfs")
    with pytest.raises(
        ConfigError, match=r"disk_path is '.*', which is on tmpfs: its files are in"
    ):
        attach(model, on_disk(tmp_path))
    monkeypatch.undo()
    folder = private_folder(tmp_path, "disk_path")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        attach(model, on_disk(tmp_path))
    folder.unlink()

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    private_folder(tmp_path, "disk_path")
    monkeypatch.setattr("hf_pyao.engine.stores.nameless_file._open_nameless", full)
    with pytest.raises(DiskError, match=r"cannot make '.*activations-.*Too many open files"):
        attach(model, on_disk(tmp_path))
    monkeypatch.undo()
    steps(model)  # it was left as it was


# ---- what is left behind ----------------------------------------------------------------------

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
from pathlib import Path
import torch
from hf_pyao.engine.stores.disk_figures import WriteLimit
from hf_pyao.engine.stores.disk_files import private_folder
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.engine.stores.nameless_file import NamelessFile
file = NamelessFile(private_folder(sys.argv[1], "disk_path"))
make = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
done = {"make_memory": make, "is_done": lambda _: True, "await_copy": lambda _: None}
store = DiskStore(file, 2**30, WriteLimit(2**40), **done)
buffers = [store.acquire(2**20) for _ in range(300)]
for buffer in buffers:
    held = store.memory_to_fill(buffer.data.untyped_storage())
    store.filled(held, object(), is_last=True)
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_is_left_after_a_kill_an_interrupt_and_an_exit(
    number: signal.Signals | None, tmp_path: Path
) -> None:
    folder = tmp_path / f"pyao-{os.getuid()}"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "written\n"
        assert not list(folder.iterdir())
        if number is None:
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            process.send_signal(number)
        process.wait(timeout=300)
    assert process.returncode == (0 if number is None else -number)
    assert not list(folder.iterdir())


def test_a_leftover_is_removed_and_another_run_is_left_alone(tmp_path: Path) -> None:
    folder = private_folder(tmp_path, "disk_path")
    leftover = folder / "activations-1-dead.part"
    leftover.write_bytes(b"x")
    alive = folder / "activations-2-alive.part"
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        first, second = tiny_model("llama"), tiny_model("gpt2")
        expected = [steps(copy.deepcopy(model)) for model in (first, second)]
        with attach(first, on_disk(tmp_path)), attach(second, on_disk(tmp_path)):
            assert_same_tensors(steps(first), expected[0], "first")
            assert_same_tensors(steps(second), expected[1], "second")
        assert list(folder.iterdir()) == [alive]


def disk_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("pyao-disk")}


def test_a_disk_with_less_room_than_asked_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_bytes = 3 * 2**14 + 100  # far less than the file grows by
    found = os.statvfs_result((1, 1, 0, 0, free_bytes, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    monkeypatch.setattr(NamelessFile, "free_bytes", property(lambda f: free_bytes - f.nbytes))
    model = tiny_model("llama", num_hidden_layers=4)
    expected = steps(copy.deepcopy(model))
    with attach(model, on_disk(tmp_path, disk_gib=1.0)) as offloader:
        assert_same_tensors(steps(model), expected, "gradients")
        assert store_of(offloader).file.nbytes == 3 * 2**14
    assert "room for 0.00 GiB of saved tensors (the 0.0 GiB free, of 1 asked for)" in caplog.text


def test_as_the_last_model_is_detached_threads_end_and_room_is_given_back(tmp_path: Path) -> None:
    before = disk_threads()
    one, other = tiny_model("gpt2"), tiny_model("gpt2")
    expected = steps(copy.deepcopy(one), 3)
    config = on_disk(tmp_path)
    offloader = attach(one, config)
    with attach(other, config, link=offloader.link):
        steps(one)
        store = store_of(offloader)
        assert disk_threads() - before
        assert store.file.nbytes
    assert disk_threads() - before, "one model is left"
    offloader.detach()
    assert not disk_threads() - before
    assert store.file.nbytes == store.pool_bytes == os.fstat(store.file.descriptor).st_size == 0
    with attach(one, config, link=offloader.link):  # the disk may be used again
        one.zero_grad()
        assert_same_tensors(steps(one, 3), expected, "gradients")
        assert store.file.nbytes
    assert not disk_threads() - before


# ---- the store alone --------------------------------------------------------------------------


def small_disk(folder: Path, **settings: Any) -> DiskStore:
    """Return a disk with memory for four pages; copies have ended as they are queued."""
    parts: dict[str, Any] = {
        "make_memory": lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        "is_done": lambda copy: True,
        "await_copy": lambda copy: None,
        "memory_bytes": 4 * 4096,
    }
    file = NamelessFile(private_folder(folder, "disk_path"))
    return DiskStore(file, 2**20, WriteLimit(TB), **{**parts, **settings})


def new_buffer(store: DiskStore, use: HostUse | None = None) -> Any:
    buffer = store.acquire(4096, use)
    assert buffer is not None
    return buffer


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_memory_whose_copy_lost_its_ticket_is_not_used_again(
    direction: str, tmp_path: Path
) -> None:
    class Interrupted(BlockingTransport):
        """Queues a copy, and is interrupted before anyone has its ticket."""

        def __init__(self, fails: str) -> None:
            super().__init__()
            self.fails = fails
            self.touched: list[int] = []

        def offload(self, src: torch.Tensor, dst: torch.Tensor, **rest: Any) -> Any:
            self.touched.append(dst.data_ptr())
            if self.fails == "offload":
                raise KeyboardInterrupt
            return super().offload(src, dst, **rest)

        def reload(self, src: torch.Tensor, dst: torch.Tensor, **rest: Any) -> Any:
            self.touched.append(src.data_ptr())
            if self.fails == "reload":
                raise KeyboardInterrupt
            return super().reload(src, dst, **rest)

    inner = Interrupted(direction)
    store = small_disk(tmp_path)
    transport = DiskTransport(inner, store)
    content = torch.ones(4096, dtype=torch.uint8)
    buffer = new_buffer(store)
    with pytest.raises(KeyboardInterrupt):
        transport.offload(content, buffer.data)
        transport.reload(buffer.data, torch.empty_like(content))
    store.release(buffer)
    store.settle()
    lost = inner.touched[-1]
    inner.fails = ""
    for _ in range(8):
        buffer = new_buffer(store)
        transport.offload(content, buffer.data)
        store.release(buffer)
        assert inner.touched[-1] != lost, "the copy may still run"
    store._is_torn = True  # another interrupt: what is free is worked out anew
    for _ in range(8):
        buffer = new_buffer(store)
        transport.offload(content, buffer.data)
        store.release(buffer)
        assert inner.touched[-1] != lost, "the copy may still run"
    store.close()


def test_an_interrupt_as_a_range_is_let_go_loses_nothing(tmp_path: Path) -> None:
    store = small_disk(tmp_path)
    use = HostUse()
    for interrupted in (FreeRanges, WriteLimit, HostUse):
        staying = new_buffer(store, use)
        buffer = new_buffer(store, use)
        store.release(buffer)
        with pytest.MonkeyPatch.context() as patch:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(interrupted, "add" if interrupted is HostUse else "give_back", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.settle()
        assert store.settle() == use.used_bytes == 4096, interrupted
        assert sum(size for _, size in store._space.free) == store.file.nbytes - 4096
        store.release(staying)
        assert store.settle() == use.used_bytes == 0, interrupted
    store.close()


def test_what_others_write_meanwhile_leaves_the_reserve_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_pyao.engine.stores.disk_store.GROWTH_BYTES", 4096)
    monkeypatch.setattr(NamelessFile, "free_bytes", 10**9)
    store = small_disk(tmp_path, reserve_bytes=10**9 - 2 * 4096)
    first = new_buffer(store)
    monkeypatch.setattr(NamelessFile, "free_bytes", 10**9 - 4096)  # such as the weights' file
    second = new_buffer(store)
    monkeypatch.setattr(NamelessFile, "free_bytes", 10**9 - 3 * 4096)
    assert store.acquire(4096) is None
    assert store.room() == 0
    assert "has left no more than is to stay free" in caplog.text
    del first, second
    store.close()


# ---- other systems ----------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_than_linux_are_refused_by_name(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ConfigError, match=f"this system is {system}; expected Linux"):
        private_folder(tmp_path, "disk_path")
    assert not list(tmp_path.iterdir())


def test_modules_can_be_imported_where_there_is_no_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed weights import them on every system, also without a disk."""
    sources = {path: path.read_text() for path in Path(hf_pyao.__file__).parent.rglob("*.py")}
    with_it = {path.name for path, source in sources.items() if "import fcntl" in source}
    assert with_it == {"disk_files.py"}
    monkeypatch.setitem(sys.modules, "fcntl", None)  # importing it raises ImportError
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("elsewhere", disk_files.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ---- how much is written ----------------------------------------------------------------------


def test_at_the_limit_writing_ends_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("gpt2")
    expected = steps(copy.deepcopy(model), 4)
    limit_bytes = 300_000
    config = on_disk(tmp_path, disk_write_limit=limit_bytes / TB)
    with attach(model, config) as offloader:
        assert_same_tensors(steps(model, 4), expected, "gradients")
        assert 0 < store_of(offloader).figures.written_bytes <= limit_bytes
        assert offloader.totals()["kept_bytes/host memory full"] > 0
    assert caplog.text.count("[pyao:disk-write-limit]") == 1
    assert "checkpoint_every=k" in caplog.text


def test_bytes_an_hour_are_said_once() -> None:
    now_s = 0.0
    limit = WriteLimit(10 * TB, lambda: now_s)
    now_s = 5000.0
    assert limit.sentence_once() == "", "nothing was written yet"
    assert limit.take(TB), "time counts from here on, however long ago the model was attached"
    assert limit.sentence_once() == ""
    now_s += 1800.0
    assert "1 TB of saved tensors" in (said := limit.sentence_once())
    assert "2 TB an hour. disk_write_limit=10 TB is reached in 4.5 hours" in said
    assert limit.sentence_once() == ""
    assert not limit.take(9 * TB + 1)
    limit.give_back(TB)
    assert limit.take(10 * TB)


def test_free_ranges_join_again() -> None:
    for order in itertools.permutations([(0, 30), (30, 30), (60, 30), (90, 10)]):
        ranges = FreeRanges(100)
        assert [ranges.take(nbytes) for nbytes in (30, 30, 30, 10)] == [0, 30, 60, 90]
        assert ranges.take(1) is None
        for offset, nbytes in order:
            ranges.give_back(offset, nbytes)
        assert ranges.free == [(0, 100)], order
