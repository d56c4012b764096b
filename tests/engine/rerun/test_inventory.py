"""The inventory of a module's state: whatever changes is seen, put back, and named if it cannot be.

Each change is made to a module between a note and what follows. What is compared is a picture of
the module that knows nothing of inventories.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.rerun.inventory import Inventory
from hf_pyao.engine.rerun.values import MOST_ITEMS, MOST_TENSOR_BYTES
from hf_pyao.errors import RecomputationError
from tests.helpers import tiny_model


class Pair(NamedTuple):
    tensor: torch.Tensor
    number: int


class Data:
    def __init__(self) -> None:
        self.count = 0
        self.inner: list[int] = []


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class Furnished(nn.Module):
    """Has one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("missing", None)
        self.norm = nn.BatchNorm1d(3)
        self.child = nn.Linear(2, 2)
        self.number = 1
        self.ratio = 1.0
        self.none = None
        self.items: list[Any] = [1, [2]]
        self.named: dict[Any, Any] = {"a": 1, 7: None}
        self.ordered: OrderedDict[str, int] = OrderedDict(a=1, b=2)
        self.some = {1, 2}
        self.recent: deque[int] = deque([1], maxlen=3)
        self.array = numpy.zeros(2)
        self.raw = bytearray(b"ab")
        self.data, self.slotted = Data(), Slotted()
        self.pair = Pair(torch.zeros(2), 0)
        self.nested = (1, [3])
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.plain = torch.zeros(2)
        self.empty: list[int] = []
        self.register_forward_hook(lambda *_: None)


def picture(value: Any, seen: set[int] | None = None) -> Any:
    """Return *value* in plain terms: contents by value, functions and types by identity."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        hooks = dict(value._backward_hooks or {}) if value.is_leaf else {}
        return ("tensor", value.tolist(), value.requires_grad, sorted(hooks))
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return [(key, picture(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(picture(each, seen) for each in value)]
    if isinstance(value, Slotted):
        return [(name, getattr(value, name, "absent")) for name in ("a", "b")]
    if isinstance(value, nn.Module | Data):
        if id(value) in seen:
            return "again"
        seen.add(id(value))
        return picture(vars(value), seen)
    if isinstance(value, bytearray):
        return bytes(value)
    return repr(value) if isinstance(value, bool | int | float | str | None) else id(value)


def exchanges_a_hook(m: Any) -> None:
    m._forward_hooks.clear()
    m.register_forward_hook(lambda *_: None)


def renames_a_key(m: Any) -> None:
    m.named[8] = m.named.pop(7)


def exchanges_a_list_for_an_equal_one(m: Any) -> None:
    m.items = [1, [2]]
    m.items.append(9)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "counts": lambda m: setattr(m, "number", m.number + 1),
    "a number becomes an equal one of another type": lambda m: setattr(m, "number", 1.0),
    "a zero becomes negative": lambda m: setattr(m, "ratio", -0.0),
    "adds an attribute": lambda m: setattr(m, "added", 1),
    "deletes an attribute": lambda m: delattr(m, "ratio"),
    "fills what was None": lambda m: setattr(m, "none", [1]),
    "fills a buffer that was None": lambda m: setattr(m, "missing", torch.ones(2)),
    "adds a buffer": lambda m: m.register_buffer("further", torch.ones(1)),
    "writes a buffer": lambda m: m.table.add_(1),
    "writes a buffer without a version": lambda m: m.norm(torch.randn(4, 3)),
    "writes a plain tensor": lambda m: m.plain.add_(1),
    "exchanges a plain tensor": lambda m: setattr(m, "plain", torch.ones(2)),
    "writes a tensor in a tuple": lambda m: m.pair.tensor.add_(1),
    "exchanges a tuple": lambda m: setattr(m, "pair", m.pair._replace(number=3)),
    "appends": lambda m: m.items.append(1),
    "appends to an inner list": lambda m: m.items[1].append(1),
    "appends to a list in a tuple": lambda m: m.nested[1].append(1),
    "appends to an empty list": lambda m: m.empty.append(1),
    "exchanges a list for an equal one, and appends": exchanges_a_list_for_an_equal_one,
    "renames a key": renames_a_key,
    "moves a key to the end": lambda m: m.ordered.move_to_end("a"),
    "adds to a set": lambda m: m.some.add(3),
    "rotates": lambda m: m.recent.append(2),
    "writes an array": lambda m: m.array.__setitem__(0, 1.0),
    "writes bytes": lambda m: m.raw.__setitem__(0, 0),
    "counts in an object": lambda m: setattr(m.data, "count", 1),
    "appends in an object": lambda m: m.data.inner.append(1),
    "sets a slot": lambda m: setattr(m.slotted, "b", 1),
    "draws": lambda m: torch.rand(1, generator=m.generator),
    "draws in Python": lambda m: m.random.random(),
    "freezes": lambda m: m.weight.requires_grad_(False),
    "evaluates": lambda m: m.child.eval(),
    "adds a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "adds a hook to a child": lambda m: m.child.register_forward_pre_hook(lambda *_: None),
    "exchanges a hook": exchanges_a_hook,
    "removes a hook": lambda m: m._forward_hooks.clear(),
    "adds a module": lambda m: m.add_module("further", nn.Linear(1, 1)),
    "removes a module": lambda m: delattr(m, "child"),
    "exchanges a module": lambda m: setattr(m, "child", nn.Linear(2, 2)),
    "exchanges a method": lambda m: setattr(m.child, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_undone(change: Callable[[Any], Any]) -> None:
    module = Furnished()
    before = picture(module)
    noted = Inventory([module]).note(copies_all=True)
    change(module)
    changed = picture(module)
    assert changed != before

    assert not noted.reason_not_undone()
    noted.undo()

    assert picture(module) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_put_back_for_a_while(change: Callable[[Any], Any]) -> None:
    """Inside, all is as it was noted; afterwards, as it was before, whatever was done inside."""
    module = Furnished()
    before = picture(module)
    noted = Inventory([module]).note()
    change(module)
    changed = picture(module)

    with noted.put_back():
        assert picture(module) == before
        change(module)

    assert picture(module) == changed
    with noted.put_back():
        assert picture(module) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_note_holds_the_change(change: Callable[[Any], Any]) -> None:
    """One that was kept because nothing seemed to have changed would bring back an older state."""
    module = Furnished()
    inventory = Inventory([module])
    inventory.note(copies_all=True)
    change(module)
    changed = picture(module)
    noted = inventory.note(copies_all=True)
    for name in ("number", "ratio", "none", "plain"):
        setattr(module, name, object())
    module.items.append(5)

    noted.undo()

    assert picture(module) == changed


def test_a_note_of_what_has_not_changed_walks_once() -> None:
    module = Furnished()
    inventory = Inventory([module])
    first = inventory.note()
    assert inventory.note()._found is first._found
    module.number += 1
    assert inventory.note()._found is not first._found


def add_a_hook(layer: nn.Module) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]


def put_another_in_place_of_ours(layer: nn.Module) -> None:
    hooks = layer.mlp._forward_pre_hooks  # type: ignore[union-attr]
    hooks.clear()
    layer.mlp.register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr]
    layer.mlp.register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [add_a_hook, put_another_in_place_of_ours])
def test_hooks_of_others_are_seen_beside_those_of_this_package(
    change: Callable[[nn.Module], None],
) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1]  # type: ignore[union-attr, index]
    with attach(model, PyAOConfig(policy="all", min_bytes=0)):
        inventory = Inventory([layer])
        noted = inventory.note()
        before = picture(layer.mlp._forward_hooks), picture(layer.mlp._forward_pre_hooks)
        assert all(before)
        assert inventory.note()._found is noted._found
        change(layer)
        assert inventory.note()._found is not noted._found
        with noted.put_back():
            assert before == (
                picture(layer.mlp._forward_hooks),
                picture(layer.mlp._forward_pre_hooks),
            )


# ---- what cannot be put back ---------------------------------------------------------------------


def test_what_cannot_be_noted_is_named() -> None:
    module = Furnished()
    module.child.positions = iter([1, 2])  # type: ignore[assignment]
    assert "'child.positions'" in Inventory([module]).note().reason_unknown()
    module.child.positions = list(range(MOST_ITEMS + 1))  # type: ignore[assignment]
    assert str(MOST_ITEMS + 1) in Inventory([module]).note().reason_unknown()
    module.child.positions = list(range(MOST_ITEMS))  # type: ignore[assignment]
    assert not Inventory([module]).note().reason_unknown()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_tensors_without_a_storage_are_known_by_their_versions(is_buffer: bool) -> None:
    module = Furnished()
    table = torch.eye(3).to_sparse()
    if is_buffer:
        module.register_buffer("sparse", table)
    else:
        module.sparse = table  # type: ignore[assignment]
    inventory = Inventory([module])
    for _ in range(2):
        noted = inventory.note(copies_all=True)
        noted.learn()
        with noted.put_back():
            assert not noted.reason_not_undone()
        table.mul_(2)
        assert "'sparse' was changed in place" in noted.reason_not_undone()


def test_hooks_on_parameters_are_undone_and_those_of_a_second_run_do_not_last() -> None:
    module = Furnished()
    before = picture(module)
    noted = Inventory([module]).note()
    module.weight.register_hook(lambda g: g)
    changed = picture(module)
    with noted.put_back():
        module.weight.register_hook(lambda g: g * 2)
    assert picture(module) == changed != before
    noted.undo()
    assert picture(module.weight) == picture(Furnished().weight)


@pytest.mark.parametrize("appends", [False, True])
def test_a_large_tensor_outside_of_buffers_that_is_written_is_never_put_back(
    appends: bool,
) -> None:
    module = Furnished()
    module.large = torch.zeros(MOST_TENSOR_BYTES // 4, 2)
    inventory = Inventory([module])
    for _ in range(2):
        noted = inventory.note()
        assert not noted.reason_not_again()
        module.large.add_(1)
        if appends:
            module.items.append(1)
        assert "large" in noted.reason_not_again()
        with pytest.raises(RecomputationError, match="large"), noted.put_back():
            pass


def test_a_large_buffer_that_is_written_cannot_be_put_back_the_first_time() -> None:
    module = Furnished()
    module.register_buffer("large", torch.zeros(MOST_TENSOR_BYTES // 4, 2))
    inventory = Inventory([module])
    noted = inventory.note()
    assert not noted.reason_not_again()
    module.large.add_(1)  # type: ignore[operator]
    assert "large" in noted.reason_not_again()
    with pytest.raises(RecomputationError, match="large"), noted.put_back():
        pass
    noted = inventory.note()  # it has learned that this one changes
    module.large.add_(1)  # type: ignore[operator]
    assert not noted.reason_not_again()
    with noted.put_back():
        assert module.large.unique().tolist() == [1.0]  # type: ignore[operator]
    assert module.large.unique().tolist() == [2.0]  # type: ignore[operator]


def test_a_large_tensor_that_was_exchanged_is_named_while_it_is_gone() -> None:
    module = Furnished()
    module.large = torch.zeros(MOST_TENSOR_BYTES // 4, 2)
    kept = module.large
    noted = Inventory([module]).note()
    module.large = torch.ones(1)
    assert "large" in noted.reason_not_again()
    noted.undo()
    assert module.large is kept
    module.large = torch.ones(1)
    del kept
    assert "large" in noted.reason_not_undone()


def test_a_parameter_that_was_written_is_named() -> None:
    module = Furnished()
    noted = Inventory([module]).note()
    assert not noted.changed_parameter()
    with torch.no_grad():
        module.child.bias.add_(1)
    assert "child.bias" in noted.changed_parameter()


def test_arguments_that_hold_a_graph_are_told() -> None:
    data = Data()
    assert not Inventory(()).note([data]).has_graph
    data.hidden = torch.ones(2, requires_grad=True) * 2  # type: ignore[attr-defined]
    assert Inventory(()).note([data]).has_graph
