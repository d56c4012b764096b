"""Nothing of a step waits for Python's cyclic collector: what is dropped is gone at once.

The collector is off in every test. Storages are counted by :class:`tests.helpers.live_storages.LiveStorages`,
which knows nothing of hf_pyao, and compared with the same loop without it.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pyao import PyAOCallback, PyAOConfig, PyAOTrainer, attach
from hf_pyao.engine.recompute.segments import Segment
from hf_pyao.engine.transfer.mover import MovedBytes
from tests.helpers import VOCAB, Batch, tiny_batch, tiny_model
from tests.helpers.live_storages import LiveStorages, num_objects_of_hf_pyao
from tests.helpers.simulation.late_transport import LateTransport

pytestmark = pytest.mark.usefixtures("_no_collector")

NUM_STEPS = 6
"""Steps that are counted, after :data:`NUM_FIRST`."""
NUM_FIRST = 5
"""Steps in which pools grow, and policies measure and decide."""
NUM_FIRST_OF_AUTO = 20
"""The same for policy ``auto``, which looks at its plan again, and may make another one."""

SMALL: dict[str, Any] = {"min_bytes": 256, "window": 2**14, "host_memory_gib": 0.1}
"""Tiny models save tiny tensors."""

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "off, chunked": {"policy": "off", "head_loss": "chunked"},
    "all": {"policy": "all"},
    "all, chunked": {"policy": "all", "head_loss": "chunked"},
    "all, window of a layer": {"policy": "all", "head_loss": "chunked", "window": "layer"},
    "modules": {"policy": "modules", "modules": ("mlp_act",)},
    "budget": {"policy": "budget", "budget": 5},
    "pyao": {"policy": "pyao", "profile_steps": 2},
    "auto, limited": {"policy": "auto", "profile_steps": 2, "device_memory_gib": 0.0007},
    "auto, limited, chunked": {
        "policy": "auto",
        "profile_steps": 2,
        "device_memory_gib": 0.0007,
        "head_loss": "chunked",
    },
    "auto, fits": {"policy": "auto", "profile_steps": 2, "device_memory_gib": 1.0},
    "recompute_modules": {"policy": "all", "recompute_modules": ("pointwise",)},
    "mlp_tiles": {"policy": "all", "mlp_tiles": 3},
    "checkpoint_every 1": {"policy": "all", "checkpoint_every": 1},
    "checkpoint_every 2": {"policy": "all", "checkpoint_every": 2, "head_loss": "chunked"},
    "nested": {"policy": "all", "checkpoint_every": 2, "checkpoint_nested": True},
    "save_attention": {"policy": "all", "checkpoint_every": 2, "save_attention": True},
    "long_context": {"policy": "all", "long_context": True},
    "long_context, off": {"policy": "off", "long_context": True},
    "int8": {"policy": "all", "codec": "int8"},
    "fp8": {"policy": "all", "codec": "fp8"},
    "int4": {"policy": "all", "codec": "int4"},
    "bitmask": {"policy": "all", "codec": "bitmask", "head_loss": "chunked"},
}


class Failure(Exception):
    """Raised by the tests."""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # so that counting objects is quick
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


# ---- a micro-batch, and what users do beside it --------------------------------------------------


def plain(model: Any, batch: Batch, kept: list[Any]) -> None:
    model(**batch).loss.backward()


def keeps_its_output(model: Any, batch: Batch, kept: list[Any]) -> None:
    out = model(**batch)
    out.loss.backward()
    kept[:] = [out]


def keeps_its_loss(model: Any, batch: Batch, kept: list[Any]) -> None:
    loss = model(**batch).loss
    loss.backward()
    kept[:] = [loss]


def reads_logits(model: Any, batch: Batch, kept: list[Any]) -> None:
    out = model(**batch)
    out.logits.argmax(-1)
    out.loss.backward()
    kept[:] = [out.logits, out["logits"], out]


def reads_logits_of_another_forward(model: Any, batch: Batch, kept: list[Any]) -> None:
    out = model(**batch)
    out.loss.backward()
    kept[:] = [out.logits.detach().sum()]
    model(**batch).logits.sum().backward()


def reads_hidden_states(model: Any, batch: Batch, kept: list[Any]) -> None:
    out = model(**batch, output_hidden_states=True)
    (out.loss + out.hidden_states[1].square().mean()).backward()
    kept[:] = [out.hidden_states]


def accumulates(model: Any, batch: Batch, kept: list[Any]) -> None:
    for _ in range(2):
        (model(**batch).loss / 2).backward()


def one_backward_of_two_forwards(model: Any, batch: Batch, kept: list[Any]) -> None:
    (model(**batch).loss + model(**batch).loss).backward()


def retains_its_graph(model: Any, batch: Batch, kept: list[Any]) -> None:
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()


def evaluates_between(model: Any, batch: Batch, kept: list[Any]) -> None:
    plain(model, batch, kept)
    model.eval()
    with torch.no_grad():
        kept[:] = [model(**batch).loss]
    model(**batch)  # with a graph, and no backward
    model.train()


def drops_a_forward(model: Any, batch: Batch, kept: list[Any]) -> None:
    model(**batch)
    plain(model, batch, kept)


def fails_in_forward(model: Any, batch: Batch, kept: list[Any]) -> None:
    plain(model, batch, kept)
    middle = layers_of(model)[1]
    handle = list(middle.children())[-1].register_forward_hook(fail)
    with pytest.raises(Failure):
        model(**batch)
    handle.remove()


def fails_in_the_loss(model: Any, batch: Batch, kept: list[Any]) -> None:
    plain(model, batch, kept)
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"], labels=batch["input_ids"] + VOCAB)


def fails_in_backward(model: Any, batch: Batch, kept: list[Any]) -> None:
    plain(model, batch, kept)

    def plant(module: nn.Module, args: Any, result: Any) -> None:
        (result if isinstance(result, torch.Tensor) else result[0]).register_hook(fail)

    handle = layers_of(model)[1].register_forward_hook(plant)
    loss = model(**batch).loss
    handle.remove()
    with pytest.raises(Failure):
        loss.backward()


def keeps_the_error(model: Any, batch: Batch, kept: list[Any]) -> None:
    handle = layers_of(model)[1].register_forward_hook(fail)
    try:
        model(**batch)
    except Failure as error:
        kept[:] = [error]  # with its traceback, until the next step
    handle.remove()
    plain(model, batch, [])


def fail(*_: Any) -> None:
    raise Failure


def layers_of(model: Any) -> list[nn.Module]:
    decoder = getattr(model.model, "decoder", model.model)
    return list(decoder.layers)


LOOPS: tuple[Callable[[Any, Batch, list[Any]], None], ...] = (
    plain,
    keeps_its_output,
    keeps_its_loss,
    reads_logits,
    reads_logits_of_another_forward,
    reads_hidden_states,
    accumulates,
    one_backward_of_two_forwards,
    retains_its_graph,
    evaluates_between,
    drops_a_forward,
    fails_in_forward,
    fails_in_the_loss,
    fails_in_backward,
    keeps_the_error,
)


# ---- counting ------------------------------------------------------------------------------------


def growth(
    settings: dict[str, Any] | None,
    loops: tuple[Callable[..., None], ...],
    num_steps: int = NUM_STEPS,
    model_type: str = "llama",
) -> list[tuple[Counter[int], int]]:
    """Return how many storages, by size, and objects of ours each round adds to the first one.

    A round runs each of *loops* once.
    """
    model: Any = tiny_model(model_type, num_hidden_layers=4)
    model.config.use_cache = False
    batch = tiny_batch(1, size=4, length=32)
    kept: list[Any] = []

    def round_trip() -> None:
        for loop in loops:
            loop(model, batch, kept)
            model.zero_grad()

    def count() -> tuple[Counter[int], int]:
        return storages.sizes(), num_objects_of_hf_pyao()

    storages = LiveStorages()
    offloader = None if settings is None else attach(model, PyAOConfig(**{**SMALL, **settings}))
    try:
        with storages:
            is_auto = settings is not None and settings["policy"] == "auto"
            for _ in range(-(-(NUM_FIRST_OF_AUTO if is_auto else NUM_FIRST) // len(loops))):
                round_trip()
            first_sizes, first_objects = count()
            found = []
            for _ in range(num_steps):
                round_trip()
                sizes, objects = count()
                found.append((sizes - first_sizes, objects - first_objects))
        if offloader is not None:
            check_that_it_acts(offloader, settings or {})
        return found
    finally:
        if offloader is not None:
            offloader.detach()


def check_that_it_acts(offloader: Any, settings: dict[str, Any]) -> None:
    """Fail where nothing would be tested."""
    if settings["policy"] not in ("off", "auto"):
        assert offloader.totals()["offloaded_bytes"] > 0
    if settings["policy"] == "auto":
        assert offloader.plan is not None, offloader.describe()
        keeps_all = offloader.engine.rests
        assert keeps_all == (settings["device_memory_gib"] == 1.0), offloader.describe()
    if "chunked" in settings.values() or settings.get("long_context"):
        assert offloader.head_loss.metrics()["head_loss_num_chunked"] > 0
    if settings.get("mlp_tiles") or settings.get("long_context"):
        assert offloader.mlp_tiles.metrics()["mlp_tiles_num_tiled"] > 0


NOTHING: tuple[Counter[int], int] = (Counter(), 0)


@pytest.mark.sampled(every=89)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_leaves_no_more_than_the_one_before(name: str, loop: Callable[..., None]) -> None:
    assert growth(SETTINGS[name], (loop,)) == [NOTHING] * NUM_STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["llama", "opt"])
@pytest.mark.parametrize("name", SETTINGS)
def test_200_steps_of_every_kind(name: str, model_type: str) -> None:
    num_rounds = -(-200 // len(LOOPS))
    found = growth(SETTINGS[name], LOOPS, num_rounds, model_type)
    assert found == [NOTHING] * num_rounds


@pytest.mark.parametrize(
    "settings", [{"window": 2**30}, {"checkpoint_every": 2}], ids=["window", "segment"]
)
def test_nothing_waits_for_a_backward_that_never_comes(settings: dict[str, Any]) -> None:
    """The graph is dropped while copies are in flight, and while a segment may go on."""
    model: Any = tiny_model("llama")  # of three layers: the second segment is not full
    config = PyAOConfig(policy="all", keep_last_layers=0, **{**SMALL, **settings})
    with attach(model, config, transport=LateTransport()) as offloader:
        for index in range(2):
            plain(model, tiny_batch(index), [])
        assert offloader.totals()["offloaded_bytes"] > 0
        loss = model(**tiny_batch(1)).loss
        assert num_alive(MovedBytes, Segment) > 0
        del loss
        assert num_alive(MovedBytes, Segment) == 0


def num_alive(*kinds: type) -> int:
    return sum(isinstance(each, kinds) for each in gc.get_objects())


def test_a_kept_output_keeps_one_step() -> None:
    model: Any = tiny_model("llama")
    seen: list[StorageWeakRef] = []
    model.model.norm.register_forward_hook(
        lambda module, args, result: seen.append(StorageWeakRef(result.untyped_storage()))
    )
    kept: list[Any] = []
    with attach(model, PyAOConfig(policy="off", head_loss="chunked")):
        for index in range(4):
            keeps_its_output(model, tiny_batch(index), kept)
            assert [each.expired() for each in seen] == [True] * index + [False]
        assert kept[0].logits.detach().shape[-1] == VOCAB
        kept.clear()
        assert all(each.expired() for each in seen)


# ---- trainers ------------------------------------------------------------------------------------


class Counts(TrainerCallback):
    """Counts after each optimizer step."""

    def __init__(self) -> None:
        self.storages = LiveStorages()
        self.found: list[tuple[Counter[int], int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append((self.storages.sizes(), num_objects_of_hf_pyao()))


def trained(
    folder: Path, cls: type[Trainer], settings: dict[str, Any], how: str, num_steps: int
) -> list[tuple[Counter[int], int]]:
    data = [
        {name: rows[0] for name, rows in tiny_batch(seed, length=12).items()} for seed in range(8)
    ]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        dataloader_pin_memory=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=num_steps,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    counts = Counts()
    config = PyAOConfig(**{**SMALL, **settings})
    more: dict[str, Any] = {"pyao_config": config} if how == "mixin" else {}
    callbacks: list[TrainerCallback] = [counts]
    if how == "callback":
        callbacks.append(PyAOCallback(config))
    trainer = cls(
        model=tiny_model("llama"),
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=callbacks,
        **more,
    )
    with counts.storages:
        trainer.train()
    return counts.found


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("how", ["mixin", "callback"])
@pytest.mark.parametrize("name", ["all, chunked", "auto, limited", "long_context"])
def test_a_trainer(name: str, how: str, tmp_path: Path) -> None:
    """Logging of the losses adds a few numbers a step, with us and without."""
    num_steps = 10 + (NUM_FIRST_OF_AUTO // 2 if name.startswith("auto") else 0)
    reference = trained(tmp_path, Trainer, {}, "without", num_steps)
    cls = PyAOTrainer if how == "mixin" else Trainer
    found = trained(tmp_path, cls, SETTINGS[name], how, num_steps)
    pairs = zip(itertools.pairwise(found[-5:]), itertools.pairwise(reference[-5:]), strict=True)
    for (before, after), (before_without, after_without) in pairs:
        assert after[0] - before[0] == after_without[0] - before_without[0]
        assert after[1] == before[1]


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_detached_goes_with_its_last_reference(name: str) -> None:
    """Host memory among it, which may be pinned, and many gigabytes."""
    model: Any = tiny_model("llama")
    offloader = attach(model, PyAOConfig(**{**SMALL, **SETTINGS[name]}))
    for index in range(4):
        plain(model, tiny_batch(index), [])
        model.zero_grad()
    held = [weakref.ref(each) for each in (offloader, offloader.engine, offloader.host_pool, model)]
    held_parameters = [StorageWeakRef(each.untyped_storage()) for each in model.parameters()]
    offloader.detach()
    del offloader
    assert [ref() is None for ref in held] == [True, True, True, False]
    del model
    assert held[-1]() is None
    assert all(each.expired() for each in held_parameters)


@pytest.mark.parametrize("name", ["all", "auto, limited", "save_attention"])
def test_host_memory_goes_with_a_model_that_was_not_detached(name: str) -> None:
    model: Any = tiny_model("llama")
    offloader = attach(model, PyAOConfig(**{**SMALL, **SETTINGS[name]}))
    for index in range(4):
        plain(model, tiny_batch(index), [])
    held = [weakref.ref(each) for each in (offloader, offloader.engine, offloader.host_pool, model)]
    del offloader, model
    assert all(ref() is None for ref in held)
