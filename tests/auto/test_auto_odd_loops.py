"""Policy auto in loops and models of one's own: odd batches, cells, kernels, hooks, threads."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto import profiling
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.plans.plan_timing import PlanCheck, TimedMicroBatch, loses
from hf_pyao.auto.recording.forward_watch import ForwardWatch
from hf_pyao.config import GIB
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport

LINK = LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3)
SPEEDS = DeviceModel(tflop_per_s=0.01, memory_gib_per_s=5.0, launch_us=2.0)
NUM_MEASURED = 2
SIZE = 16
AUTO = PyAOConfig(
    policy="auto", layers=("layers.*",), profile_steps=NUM_MEASURED, min_bytes=256, window=8192
)

Gradients = list[torch.Tensor | None]
Step = Callable[[Any, Any], None]
"""A micro-batch: of a model, with a batch."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Layers of one kind; it takes a tensor, or nested ones."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(num_layers)])

    def forward(self, x: Any) -> torch.Tensor:
        while not isinstance(x, torch.Tensor):
            x = x["x"] if isinstance(x, dict) else x[0]
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum()


class Cells(Net):
    """A loop over cells: each layer runs once for each step of the sequence."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.GRUCell(SIZE, SIZE), num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state, states = x.new_zeros(x.shape[1:]), []
            for step in x:
                state = layer(step, state)
                states.append(state)
            x = torch.stack(states)
        return x.square().sum()


class Recurrent(nn.GRU):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


ADDRESSES: list[int] = []


class Kernel(torch.autograd.Function):
    """As a kernel of one's own: it works on addresses, and fills a workspace behind torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        workspace, output = torch.empty_like(x), torch.empty_like(x)
        workspace.data.copy_(torch.tanh(x))
        ADDRESSES.extend([workspace.data_ptr(), output.data_ptr()])
        ctypes.memmove(output.data_ptr(), workspace.data_ptr(), x.nbytes)
        ctx.save_for_backward(workspace)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (workspace,) = ctx.saved_tensors
        return gradient * (1 - workspace * workspace)


class KernelBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Kernel.apply(self.up(self.norm(x))))


class HookedBlock(Block):
    """With saved-tensor hooks of its own around a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))


def make(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(1)
    return kind().train()


def batch(size: int = 8, length: int = 16) -> torch.Tensor:
    return torch.randn(size, length, SIZE, generator=torch.Generator().manual_seed(size))


def plain(model: Any, inputs: Any) -> None:
    model(inputs).backward()


def run(
    model: Any, batches: Sequence[Any], step: Step = plain, offloader: Offloader | None = None
) -> list[Gradients]:
    """Run micro-batches with the same random numbers each time; return all gradients."""
    found = []
    for number, inputs in enumerate(batches):
        torch.manual_seed(number)
        model.zero_grad()
        if offloader is None:
            step(model, inputs)
        else:
            link: Any = offloader.transport
            with SimulatedDevice(SPEEDS, link.link, offloader.host_pool):
                step(model, inputs)
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def assert_same(found: list[Gradients], expected: list[Gradients]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None), f"micro-batch {number}"
            assert a is None or b is None or torch.equal(a, b), f"micro-batch {number}"


def attached(model: Any, config: PyAOConfig) -> Offloader:
    return attach(model, config, transport=SimulatedTransport(0, link=LINK))


def cap_for(kind: Callable[[], nn.Module], inputs: Any, share: float = 0.4) -> float:
    """Return a limit between the least peak and that of keeping everything, in GiB."""
    model = make(kind)
    with attached(model, replace(AUTO, device_memory_gib=1.0)) as offloader:
        run(model, [inputs] * (NUM_MEASURED + 1), offloader=offloader)
        assert offloader.plan is not None, offloader.describe()
        figures = offloader.plan.numbers()
    peaks = [value for name, value in figures.items() if name.startswith("peak_bytes/")]
    most = figures["kept_peak_bytes"]
    return (min(peaks) + share * (most - min(peaks))) / GIB


def check(
    kind: Callable[[], nn.Module], batches: Sequence[Any], step: Step = plain, **options: Any
) -> Offloader:
    """Train with and without policy auto; gradients must have the same bits throughout."""
    largest = max(batches, key=lambda each: each.numel() if isinstance(each, torch.Tensor) else 0)
    config = replace(AUTO, device_memory_gib=cap_for(kind, largest), **options)
    expected = run(make(kind), batches, step)
    model = make(kind)
    with attached(model, config) as offloader:
        assert_same(run(model, batches, step, offloader), expected)
    return offloader


# ---- models of one's own -------------------------------------------------------------------------


def with_hooks() -> nn.Module:
    model = Net()
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, output: output * 1.5)
        layer.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
        layer.up.weight.register_hook(lambda gradient: gradient * 2)
        layer.register_full_backward_hook(lambda _, into, out: None)
    inner = model.layers[1]
    inner.register_forward_hook(
        lambda _, args, output: output.register_hook(lambda g: g * 3) and None
    )
    return model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Cells, id="cells", marks=pytest.mark.thorough),
        pytest.param(lambda: Net(Recurrent, 3), id="gru", marks=pytest.mark.thorough),
        pytest.param(lambda: Net(HookedBlock), id="saved hooks", marks=pytest.mark.thorough),
        pytest.param(with_hooks, id="hooks", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_models_of_ones_own_are_planned_for(kind: Callable[[], nn.Module]) -> None:
    offloader = check(kind, [batch(3, 6)] * 4)
    assert offloader.plan is not None
    assert not offloader.describe().count("no plan was found")


@pytest.mark.thorough
def test_a_kernel_is_not_called_with_the_addresses_of_fake_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ADDRESSES.clear()

    def kind() -> nn.Module:
        return Net(KernelBlock)

    expected = run(make(kind), [batch()] * 4)
    model = make(kind)
    with attached(model, replace(AUTO, device_memory_gib=1e-4)) as offloader:
        assert_same(run(model, [batch()] * 4, offloader=offloader), expected)
        assert offloader.plan is None
        assert "goes on offloading everything" in offloader.describe()
    assert all(ADDRESSES)


# ---- odd batches ---------------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_empty_first_batch_is_planned_for_anew() -> None:
    offloader = check(Net, [batch(0), *[batch()] * 4])
    assert offloader.plan is not None
    assert offloader.plan.facts.num_elements == batch().numel()
    assert {slot.action for slot in offloader.plan.slots} != {"keep"}


@pytest.mark.thorough
def test_empty_batches_while_it_measures() -> None:
    offloader = check(Net, [*[batch(0)] * 3, *[batch()] * 4])
    assert offloader.plan is not None
    assert {slot.action for slot in offloader.plan.slots} != {"keep"}


@pytest.mark.thorough
@pytest.mark.parametrize("nest", [lambda x: {"x": x}, lambda x: [{"x": (x,)}]])
def test_larger_batches_inside_of_other_values_are_seen(nest: Callable[[Any], Any]) -> None:
    batches = [*[nest(batch(2))] * 3, *[nest(batch(8))] * 2]
    config = replace(AUTO, device_memory_gib=cap_for(Net, batch(8)))
    expected = run(make(), batches)
    model = make()
    with attached(model, config) as offloader:
        assert_same(run(model, batches, offloader=offloader), expected)
        assert offloader.plan is not None
        assert offloader.plan.facts.num_elements == batch(8).numel()


def changing_dtype(model: Any, inputs: torch.Tensor) -> None:
    model.to(inputs.dtype)
    model(inputs).backward()


def autocast_now_and_then(model: Any, inputs: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=inputs.shape[0] % 2 == 1):
        model(inputs).backward()


def validating(model: Any, inputs: torch.Tensor) -> None:
    loss = model(inputs)
    model.eval()
    with torch.no_grad():
        model(inputs)
    model(inputs)  # with a graph that no one goes back through
    model.train()
    with torch.no_grad():
        model(inputs)
    model(inputs)
    loss.backward()
    torch.manual_seed(9)
    model(inputs).backward()


def failing_first(model: Any, inputs: torch.Tensor) -> None:
    with model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            model(inputs)
    model(inputs).backward()


def freezing(model: Any, inputs: torch.Tensor) -> None:
    frozen = inputs.shape[0] - 1
    for number, layer in enumerate(model.layers):
        layer.requires_grad_(number >= frozen)
    model(inputs).backward()


def twice(model: Any, inputs: torch.Tensor) -> None:
    (model(inputs) + model(2 * inputs)).backward()


def retaining(model: Any, inputs: torch.Tensor) -> None:
    loss = model(inputs)
    loss.backward(retain_graph=True)
    loss.backward()


def accumulating(model: Any, inputs: torch.Tensor) -> None:
    for part in inputs.split(4):
        model(part).backward()


FLOATS = [*[batch()] * 4, batch().double(), batch().bfloat16(), batch()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("step", "batches"),
    [
        (plain, [batch(size) for size in (1, 3, 5, 7, 8)]),
        (plain, [batch(size) for size in (8, 7, 5, 3, 1)]),
        (plain, [*[batch()] * 4, batch(0), batch(), batch(8, 1)]),
        (changing_dtype, FLOATS),
        (autocast_now_and_then, [batch(8), batch(8), batch(8), batch(7), batch(8), batch(7)]),
        (validating, [batch()] * 5),
        (failing_first, [batch()] * 5),
        (freezing, [batch(size) for size in (1, 1, 1, 1, 4, 4, 2, *[1] * 5)]),
        (twice, [batch()] * 5),
        (retaining, [batch()] * 5),
        (accumulating, [batch()] * 4),
    ],
)
def test_gradients_are_right_in_odd_loops(step: Step, batches: Sequence[torch.Tensor]) -> None:
    assert check(Net, batches, step).plan is not None


@pytest.mark.thorough
def test_one_measured_micro_batch_is_enough() -> None:
    assert check(Net, [batch()] * 4, profile_steps=1).plan is not None


@pytest.mark.thorough
def test_it_measures_again_where_nothing_was_to_be_copied() -> None:
    """As where the layers but the last are frozen at first."""
    batches = [*[batch(4)] * 3, *[batch(1)] * 6]
    offloader = check(Net, batches, freezing)
    assert offloader.plan is not None


@pytest.mark.thorough
def test_it_does_not_measure_for_ever() -> None:
    model = make(lambda: Net(num_layers=1))
    config = replace(AUTO, device_memory_gib=1e-4, profile_steps=1)  # the last layer is kept
    with attach(model, config) as offloader:
        run(model, [batch()] * (profiling.NUM_ROUNDS + 1))
        assert not offloader._deciding.is_measuring
        assert offloader.plan is None
        assert "keep_last_layers=1 keeps what all 1 layers save" in offloader.describe()


# ---- what is compared ----------------------------------------------------------------------------


def timed(*spans: tuple[int, float]) -> list[TimedMicroBatch]:
    return [TimedMicroBatch(num_elements, ms, 0.0) for num_elements, ms in spans]


@pytest.mark.parametrize(
    ("plan", "fallback", "expected"),
    [
        (timed((4, 20.0), (4, 22.0)), timed((4, 10.0), (4, 11.0)), (20.0, 10.5)),
        (timed((4, 20.0), (4, 10.5)), timed((4, 10.0), (4, 11.0)), None),  # one as fast
        (timed((4, 10.9)), timed((4, 10.5)), None),  # noise
        (timed((8, 20.0)), timed((4, 10.0)), None),  # larger than what it is compared with
        (timed((8, 90.0), (4, 20.0)), timed((4, 10.0)), (20.0, 10.0)),
        (timed((4, 20.0)), timed((8, 30.0), (4, 10.0), (2, 1.0)), None),
        ([], timed((4, 10.0)), None),
        (timed((4, 10.0)), [], None),
    ],
)
def test_a_plan_loses_to_what_was_as_large_and_faster(
    plan: list[TimedMicroBatch],
    fallback: list[TimedMicroBatch],
    expected: tuple[float, float] | None,
) -> None:
    assert loses(plan, fallback) == expected


class Clock:
    """As an engine whose transport's marks are told beforehand."""

    def upload_stalls_ms(self) -> tuple[float, float]:
        return 0.0, 0.0

    def settle_times(self) -> None:
        """Know all times at once."""

    def __init__(self) -> None:
        self.link = self.transport = self.figures = self
        self.num_forwards = 0
        self.now = 0.0

    def mark(self, device: torch.device) -> float:
        return self.now

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


def micro_batch(engine: Clock, check: PlanCheck, *, ends: bool = True) -> None:
    engine.num_forwards += 1
    for layer in ("a", "b"):
        check.on_module(layer, "", "forward", is_start=True)
        engine.now += 1
        check.on_module(layer, "", "forward", is_start=False)
    if ends:
        for layer in ("b", "a"):
            check.on_module(layer, "", "backward", is_start=True)
            engine.now += 2
            check.on_module(layer, "", "backward", is_start=False)
        check.on_micro_batch(MicroBatchStats())


def test_a_forward_that_failed_is_not_timed() -> None:
    engine: Any = Clock()
    check = PlanCheck(engine, torch.device("cpu"), 3)
    check.note_size(7)
    for _ in range(3):
        micro_batch(engine, check, ends=False)
        engine.now += 1000
        micro_batch(engine, check)
    assert check.is_done
    assert check.result() == [TimedMicroBatch(7, 6.0, 0.0, forward_ms=2.0)] * 2


def test_a_micro_batch_whose_second_runs_are_checked_is_not_timed() -> None:
    engine: Any = Clock()
    num_sampled = 0
    check = PlanCheck(engine, torch.device("cpu"), 3, lambda: num_sampled)
    for _ in range(2):
        num_sampled += 1
        micro_batch(engine, check)
        assert not check.is_done
    for number in range(3):
        micro_batch(engine, check)
        assert check.is_done == (number == 2)


def test_detaching_between_measuring_and_planning_records_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(*_: Any, **__: Any) -> Any:
        raise AssertionError("no one waits for it")

    monkeypatch.setattr(profiling, "record_fake_step", record)
    model = make()
    with attached(model, replace(AUTO, device_memory_gib=1e-4)) as offloader:
        run(model, [batch()] * NUM_MEASURED, offloader=offloader)
        writer = offloader.profile_writer
        assert writer is not None
    assert writer.profile is not None
    assert writer.profile.program is None


# ---- plans in files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[PyAOConfig, dict[str, Any]]:
    """Return a configuration with a plan that was kept, and the plan."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    config = replace(AUTO, device_memory_gib=cap_for(Net, batch()), plan=str(path))
    model = make()
    with attached(model, config) as offloader:
        run(model, [batch()] * (NUM_MEASURED + 1), offloader=offloader)
    return config, json.loads(path.read_text())


def damaged(document: dict[str, Any]) -> dict[str, str]:
    """Return contents of files, none of which is a plan for this run."""
    slots = document["slots"]
    changed: dict[str, Any] = {
        "no slots": {"slots": None},
        "no such layer": {"slots": [{**slots[0], "layers": [99]}]},
        "no such module": {"slots": [{**slots[0], "name": "nowhere:0"}]},
        "no such codec": {"slots": [{**slots[0], "codec": "zip"}]},
        "lossy": {"slots": [{**slots[0], "codec": "int8"}]},
        "another model": {"model": {**document["model"], "num_layers": 7}},
        "another kind": {"kind": "profile"},
        "facts": {"facts": {"num_elements": "many"}},
        "too large": {"facts": {**document["facts"], "limit_bytes": 2**40, "needed_bytes": 2**39}},
    }
    texts = {name: json.dumps({**document, **change}) for name, change in changed.items()}
    return {**texts, "empty": "", "cut off": json.dumps(document)[:200], "a list": "[]"}


@pytest.mark.thorough
def test_damaged_plans_in_checkpoints_are_not_followed(
    kept: tuple[PyAOConfig, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, document = kept
    path = tmp_path / "plan.json"
    for name, text in damaged(document).items():
        path.write_text(text)
        caplog.clear()
        with attached(make(), replace(config, plan=None)) as offloader:
            assert offloader.auto is not None
            offloader.auto.resume(path)
            assert offloader.plan is None, name
            assert any(r.levelno == logging.WARNING for r in caplog.records), name
    path.write_text(json.dumps(document))
    with attached(make(), replace(config, plan=None)) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(path)
        assert offloader.plan is not None
        assert not offloader.engine._lasting_observers  # nothing is timed or measured any more


@pytest.mark.thorough
def test_a_kept_plan_loses_nothing_without_leave(
    kept: tuple[PyAOConfig, dict[str, Any]], tmp_path: Path
) -> None:
    config, document = kept
    path = tmp_path / "plan.json"
    path.write_text(damaged(document)["lossy"])
    with pytest.raises(PlanError, match="'int8', which is lossy, and allow_lossy is not set"):
        attached(make(), replace(config, plan=str(path)))
    with attached(make(), replace(config, plan=str(path), allow_lossy=True)) as offloader:
        assert offloader.plan is not None


@pytest.mark.thorough
def test_a_kept_plan_that_needs_more_than_there_is_is_made_anew(
    kept: tuple[PyAOConfig, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, document = kept
    path = tmp_path / "plan.json"
    path.write_text(damaged(document)["too large"])
    model = make()
    with attached(model, replace(config, plan=str(path))) as offloader:
        assert offloader.plan is None
        run(model, [batch()] * (NUM_MEASURED + 1), offloader=offloader)
        assert offloader.plan is not None
        assert offloader.plan.facts.peak_bytes < 2**39
    assert "it needs 512.0 GiB on the device, and there is less now" in caplog.text
    assert json.loads(path.read_text())["facts"]["needed_bytes"] < 2**39


@pytest.mark.thorough
def test_a_plan_that_cannot_be_kept_is_followed(
    kept: tuple[PyAOConfig, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = kept
    folder = tmp_path / "file"
    folder.write_text("no folder")
    model = make()
    with attached(model, replace(config, plan=str(folder / "plan.json"))) as offloader:
        run(model, [batch()] * (NUM_MEASURED + 1), offloader=offloader)
        assert offloader.plan is not None
    assert "the plan is not kept" in caplog.text


# ---- threads -------------------------------------------------------------------------------------


def test_other_threads_train_on_while_one_is_told() -> None:
    model = make()
    told: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def before(seen: Any, *, is_first: bool) -> None:
        told.append(threading.current_thread().name)
        inside.set()
        assert go_on.wait(30)
        assert watch.num_elements() == batch(2).numel()

    watch = ForwardWatch(model, object(), before)
    first = threading.Thread(target=model, args=(batch(2),), name="first")
    first.start()
    assert inside.wait(30)
    model(batch(4))
    go_on.set()
    first.join()
    assert told == ["first"]
    watch.remove()


@pytest.mark.thorough
def test_two_threads_train_two_models() -> None:
    def kind() -> nn.Module:
        model = Net()
        for layer in model.layers:
            layer.drop.p = 0.0  # threads share the random numbers
        return model

    sizes = (2, 8, 4, 8, 2, 8)
    expected = run(make(kind), [batch(size) for size in sizes])
    config = replace(AUTO, device_memory_gib=cap_for(kind, batch(8)))
    found: dict[int, list[Gradients]] = {}

    def train(number: int) -> None:
        model = make(kind)
        with attach(model, config):
            found[number] = []
            for size in sizes:
                model.zero_grad()
                model(batch(size)).backward()
                found[number].append([p.grad.clone() for p in model.parameters()])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert_same(found[number], expected)
