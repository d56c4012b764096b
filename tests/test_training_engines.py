"""Each row of the engines is reached, by stand-ins and by the real thing, and known in one place."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hf_pyao
from hf_pyao.auto.ranks.collectives import reason_of_wrappers
from hf_pyao.errors import ConflictError
from hf_pyao.hf.micro_batch.checks import check_sharding
from hf_pyao.model.map.sharding import KnownSharding
from hf_pyao.model.map.wrappers import class_name, unwrap_model
from hf_pyao.training_engines import (
    COMPILED,
    DATA_PARALLEL,
    DDP,
    DEEPSPEED,
    DTENSOR,
    ENGINES,
    FSDP1,
    FSDP2,
    PLAIN,
    ZERO_1_2,
    ZERO_3,
    Answer,
    Feature,
    TrainingEngine,
    engine_of_module,
    engine_of_trainer,
    is_compiled,
    is_compiled_in_place,
)
from tests.engine_table import PAGE, written
from tests.test_ranks import process_group

PACKAGE = Path(hf_pyao.__file__).parent
HOME = PACKAGE / "training_engines.py"
BY_NAME = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
each_engine = pytest.mark.sampled(every=1)


def module_of(name: str, package: str, base: type[nn.Module] = nn.Module) -> nn.Module:
    """Return a module whose class has a base class *name* from *package*."""
    kind = type(name, (base,), {"__module__": f"{package}.somewhere"})
    return type("UsersSubclass", (kind,), {})()


def trainer_of(**attributes: Any) -> Any:
    plugin = attributes.pop("plugin", None)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    return SimpleNamespace(accelerator=accelerator, **attributes)


def signs_of(engine: TrainingEngine) -> list[TrainingEngine]:
    """Return what a stand-in for each of the engine's signs is recognised as."""
    found = [engine_of_module(module_of(*each)) for each in engine.classes.items()]
    for stage in engine.zero_stages:
        found.append(engine_of_trainer(trainer_of(plugin=SimpleNamespace(zero_stage=stage))))
    if engine.trainer_attribute:
        found.append(engine_of_trainer(trainer_of(**{engine.trainer_attribute: True})))
    if engine.parameter_attribute:
        marked = nn.Parameter(torch.ones(2))
        setattr(marked, engine.parameter_attribute, 0)
        found += [each for each in ENGINES if each.has(marked)]
    if engine.source_path:
        found += [each for each in ENGINES if each.source_path == engine.source_path]
    return found


@BY_NAME
@each_engine
def test_each_row_is_reached(engine: TrainingEngine) -> None:
    found = signs_of(engine)
    if engine is PLAIN:
        assert found == []
        assert engine_of_module(nn.Linear(2, 2)) is engine_of_trainer(trainer_of()) is PLAIN
        return
    assert engine in found, "no sign leads to this row"
    # A Trainer does not say which of FSDP's generations it is; both are refused alike.
    assert set(found) <= ({FSDP1, FSDP2} if engine is FSDP1 else {engine})


def test_a_users_class_of_the_same_name_is_no_engine() -> None:
    for engine in ENGINES:
        for name in engine.classes:
            assert engine_of_module(module_of(name, "users")) is PLAIN
            assert not engine.wraps(module_of(name, "users"))


@BY_NAME
@each_engine
def test_each_row_is_consistent(engine: TrainingEngine) -> None:
    outcomes = engine.outcomes
    assert all(outcome.answer is not Answer.WORKS for outcome in outcomes.values())
    assert all(o.reason for o in outcomes.values() if o.answer is Answer.REFUSED)
    assert not outcomes.keys() & engine.untried
    again = outcomes.get(Feature.RUN_AGAIN)
    assert not engine.has_half_way_state or (again and again.answer is Answer.REFUSED)
    assert not engine.reduces_in_backward or again
    assert not engine.gathers_per_layer or engine.reason(Feature.SEGMENTS)


def test_torchs_own_engines_are_recognised() -> None:
    with process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
        units = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(units[0], mesh=mesh)
        fsdp2 = fully_shard(nn.Linear(4, 4), mesh=mesh)
        fsdp1 = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
        )
        parallel = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        compiled = torch.compile(nn.Linear(4, 4), backend="eager")
        assert isinstance(compiled, nn.Module)
        assert is_compiled(compiled)
        assert not is_compiled_in_place(compiled), "what it wraps is found inside"
        for module, engine in (
            *((ddp, DDP), (fsdp2, FSDP2), (fsdp1, FSDP1)),
            *((parallel, PLAIN), (compiled, COMPILED)),
            (nn.DataParallel(nn.Linear(4, 4)), DATA_PARALLEL),
        ):
            assert engine_of_module(module) is engine
            assert engine.wraps(module) == (engine is not PLAIN)
        assert all(map(DTENSOR.has, parallel.parameters()))
        assert not any(map(DTENSOR.has, compiled.parameters()))
        assert all(map(FSDP1.has, fsdp1.parameters()))
        assert not any(map(ZERO_3.has, fsdp1.parameters()))
        assert [type(unwrap_model(m)).__name__ for m in (ddp, fsdp1, compiled)] == ["Linear"] * 3
        assert class_name(fsdp2) == "Linear"
        # A unit inside of a stack, not the stack itself, forbids segments of several layers.
        assert KnownSharding().reason_to_run_alone(fsdp2) is None
        assert "FSDP gathers" in (KnownSharding().reason_to_run_alone(units) or "")


def test_a_compiled_module_that_is_sharded_in_place_is_looked_through() -> None:
    with process_group(0, 2):
        inner = nn.Linear(4, 4)
        compiled = torch.compile(nn.Sequential(inner), backend="eager")
        assert isinstance(compiled, nn.Module)
        sharded = fully_shard(compiled, mesh=init_device_mesh("cpu", (2,)))
        assert engine_of_module(sharded) is FSDP2
        assert unwrap_model(sharded)[0] is inner  # type: ignore[index]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (DEEPSPEED, "DeepSpeed is half-way through it, and cannot begin anew"),
        (FSDP1, "FSDP is half-way through it, and cannot begin anew"),
        (FSDP2, "FSDP is half-way through it, and cannot begin anew"),
        (DDP, "DistributedDataParallel has begun to reduce its gradients"),
        (COMPILED, ""),
    ],
    ids=lambda each: each.name if isinstance(each, TrainingEngine) else "",
)
@each_engine
def test_a_failed_micro_batch_asks_the_row(engine: TrainingEngine, message: str) -> None:
    ((name, package),) = engine.classes.items()
    around, model = module_of(name, package), nn.Linear(2, 2)
    around.model = model
    assert reason_of_wrappers(model, None, has_written=True) == message
    if engine is DDP:
        assert reason_of_wrappers(model, None, has_written=False) == ""


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@each_engine
def test_a_choice_of_micro_batch_asks_the_row(stage: int | None) -> None:
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    trainer = trainer_of(plugin=plugin)
    expected = {None: PLAIN, 0: DEEPSPEED, 1: ZERO_1_2, 2: ZERO_1_2, 3: ZERO_3}[stage]
    assert engine_of_trainer(trainer) is expected
    if stage != 3:
        check_sharding(trainer)
        return
    with pytest.raises(ConflictError, match="DeepSpeed's ZeRO-3 divides its weights"):
        check_sharding(trainer)


def test_the_table_of_engines_is_that_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python tests/engine_table.py`"
    assert all(f"| {engine.name} |" in page for engine in ENGINES)


def test_no_other_file_knows_how_an_engine_is_recognised() -> None:
    names = {name for engine in ENGINES for name in engine.classes}
    for engine in ENGINES:
        names |= {engine.parameter_attribute, engine.trainer_attribute, engine.source_path}
        names |= {engine.inner_attribute} if engine.inner_attribute.startswith("_") else set()
    names -= {""}
    assert len(names) > 10
    for path in PACKAGE.rglob("*.py"):
        if path == HOME:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used = node.value if isinstance(node, ast.Constant) else None
            used = node.attr if isinstance(node, ast.Attribute) else used
            is_class = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
            known = isinstance(used, str) and used in names and not is_class
            assert not known, f"{path}:{getattr(node, 'lineno', 0)} knows {used!r}"
