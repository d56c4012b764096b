"""The inventory of what a forward may change in modules and arguments: noted, compared, put back.

[Note: State of modules]
A forward may count its calls, draw from a generator of its own, fill a buffer that was None, or add
an attribute. Between a forward and its backward, a script may freeze weights, call ``eval()``, put
other weights in (``torch.func.functional_call``), add a hook or exchange a method. Nothing of this
reaches what autograd has saved. So a second run must find all of it as the first run did, and must
leave it as it was before the second run.

Noted is what can be reached from the modules: their attributes and torch's tables (parameters,
buffers, sub-modules, hooks), lists, dictionaries, sets, tuples, deques, arrays and objects in them,
generators, and hooks on parameters. Each is noted by a shallow copy, so that what is absent is
noted too: an attribute that was added is removed, one that was deleted comes back. Tensors are
noted by identity and version. What they hold is copied only where it may change in place: see
:meth:`Inventory.note`.

Not noted: globals, class attributes, what functions close over, modules that are not registered,
objects of torch and of engines that shard or move weights, and what lies in tensors beyond
``MOST_TENSOR_BYTES`` or in containers beyond ``MOST_ITEMS``. Where one of the last two has changed,
or an iterator is found, a second run is refused by name.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hf_pyao.engine.rerun.generators import same_state
from hf_pyao.engine.rerun.kinds import Kinds
from hf_pyao.engine.rerun.names import name_of
from hf_pyao.engine.rerun.parameter_hooks import ParameterHooks
from hf_pyao.engine.rerun.values import (
    MOST_TENSOR_BYTES,
    Found,
    Holder,
    Loose,
    NotedTensor,
    are_equal,
    entries,
    entry_of,
    exchanged,
    living,
    put,
    tensor_of,
    version_of,
    versions_of,
    with_present,
    without_ours,
)
from hf_pyao.engine.rerun.walk import Walk
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import RecomputationError

_IS_TRAINED = operator.attrgetter("requires_grad")


class Inventory:
    """Notes what the forwards of *roots* may change; see [Note: State of modules].

    Args:
        roots: modules, held weakly; those inside of them count too.
        copies: copy tensors that may change in place. Without, one that changes is told by its
            version, and cannot be put back.
    """

    def __init__(self, roots: Iterable[nn.Module], *, copies: bool = True) -> None:
        forget = weakly(self._forget, None)  # [Note: Who owns whom] in `weak_calls`
        self._roots = [weakref.ref(root, forget) for root in roots]
        self._newest: Found | None = None
        self._copies = copies
        self._writes_any = False
        self.kinds = Kinds()
        """Of what was found so far."""
        self._written: dict[int, weakref.ref[Tensor]] = {}
        """Tensors that were seen to change in place."""
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Tensors of the note before, and their versions."""

    def note(self, also: Iterable[object] = (), *, copies_all: bool = False) -> Noted:
        """Return the state at the moment.

        Copied are tensors that were seen to change in place; the running statistics of norms, and
        other tensors of one dimension, since kernels write such without a version telling; and, in
        the first note, all that are small enough.

        Args:
            also: other objects that count, such as arguments.
            copies_all: copy all tensors, to the host, where they take no memory of a device.
        """
        also, found = tuple(also), self._newest
        if also or found is None or not found.is_same():
            found = Walk(self.kinds).run([*self.living_roots(), *also])
            self._newest = None if also else found
        tensors = self._note_tensors(found, copies_all) if found.tensors else []
        return Noted(self, found, tensors, also)

    def _forget(self, _: object) -> None:
        """Let go of what a root holds that is gone."""
        self._newest = None

    def living_roots(self) -> list[nn.Module]:
        """Return the roots that are there still."""
        return [root for ref in self._roots if (root := ref()) is not None]

    def learn_written(self, tensor: Tensor) -> None:
        """Record that *tensor* changes in place, so that it is copied from now on."""
        self._written[id(tensor)] = weakref.ref(tensor)
        self._writes_any = self._writes_any or not self._roots

    def _note_tensors(self, found: Found, copies_all: bool) -> list[NotedTensor]:
        before, self._seen = self._seen, {}
        tensors = []
        for tensor, is_statistic in found.tensors:
            key, version = id(tensor), version_of(tensor)
            seen = before.get(key)
            if seen is not None and seen[0]() is tensor and seen[1] != version:
                self.learn_written(tensor)
            self._seen[key] = (weakref.ref(tensor), version)
            copy = None
            if copies_all and has_storage(tensor) and not tensor.is_meta:
                copy = tensor.detach().to("cpu", copy=True)
            elif self._copies and self._is_to_copy(tensor, is_statistic, is_first=not before):
                copy = tensor.detach().clone()
            tensors.append(NotedTensor(tensor, version, copy))
        return tensors

    def _is_to_copy(self, tensor: Tensor, is_statistic: bool, *, is_first: bool) -> bool:
        if tensor.is_meta or not has_storage(tensor):
            return False
        known = self._written.get(id(tensor))
        if (known is not None and known() is tensor) or is_statistic:
            return True
        if tensor.nbytes > MOST_TENSOR_BYTES:
            return False
        return is_first or self._writes_any or (tensor.dim() <= 1 and tensor.is_floating_point())


class Noted:
    """State that was noted: compared with the present, put back for a while, or for good.

    Args:
        inventory: whose roots it is of.
        found: what was found there.
        tensors: those that are no parameters.
        also: other objects that it is of.
    """

    def __init__(
        self, inventory: Inventory, found: Found, tensors: list[NotedTensor], also: tuple[Any, ...]
    ) -> None:
        self._inventory = inventory
        self._found = found
        self._tensors = tensors
        self._also = also
        kinds = inventory.kinds.generators
        self._generators = [(each, kinds[type(each)].get(each)) for each in found.generators]
        self._are_trained = list(map(_IS_TRAINED, found.parameters))
        self._hooks = ParameterHooks(found.parameters)
        self.versions = versions_of(found.parameters)
        """Of :attr:`parameters`."""
        self._versions_of_loose = {id(each): each.version() for each in found.loose}

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that there were, each once."""
        return self._found.parameters

    # ---- comparing -----------------------------------------------------------------------------

    def reason_unknown(self) -> str:
        """Return why the state cannot be noted, or an empty string."""
        if not self._found.unknown:
            return ""
        value = self._found.unknown[0]
        what = f"{self._name(value)} is a {type(value).__name__}"
        if hasattr(value, "__len__"):
            return f"{what} of {len(value)} items, which is too long to note"
        return f"{what}, whose position cannot be put back"

    @property
    def has_graph(self) -> bool:
        """Whether a tensor among it was made by an operation that backward goes through."""
        tensors = [each.ref() for each in self._found.loose]
        return any(each is not None and each.grad_fn is not None for each in tensors)

    def reason_not_again(self) -> str:
        """Return why what has changed since cannot be put back, or an empty string."""
        reason = self.reason_unknown()
        for each in self._tensors:
            if each.is_written and each.copy is None:
                self._inventory.learn_written(each.tensor)
                if not reason:
                    name = self._name(each.tensor)
                    reason = f"{name} was changed in place, which had not changed before"
        for holder, key, loose in self._loose_entries():
            is_other = entry_of(holder.holder, key) is not loose.ref()
            if is_other and loose.value is None and not reason:
                reason = f"{self._name(holder.holder)} has exchanged {key!r}, a large tensor"
            if self._is_written(loose) and not reason:
                reason = f"{key!r} of {self._name(holder.holder)} was changed in place"
        return reason

    def reason_not_undone(self) -> str:
        """Return why :meth:`undo` cannot bring the state back, or an empty string."""
        reason = self.reason_not_again()
        for holder, key, loose in self._loose_entries():
            if loose.ref() is None:
                reason = reason or f"{self._name(holder.holder)} has let go of {key!r}, a tensor"
        return reason

    def first_change(self) -> str:
        """Name what is not as it was, or return an empty string.

        What generators have drawn is left to :meth:`drew`.
        """
        for empty in self._found.empty:
            if empty:
                return self._name(empty)
        for each in self._found.holders:
            if not self._is_same(each):
                now = dict(entries(each.content.copy(each.holder)))
                before = dict(entries(exchanged(each.copy, tensor_of)))
                keys = [k for k in {**before, **now} if now.get(k, now) is not before.get(k, now)]
                return f"{keys[0]!r}" if keys else self._name(each.holder)
        return next((self._name(each.tensor) for each in self._tensors if each.is_written), "")

    def changed_parameter(self) -> str:
        """Name a parameter that was changed in place, or return an empty string."""
        versions = versions_of(self.parameters)
        if versions == self.versions:
            return ""
        changed = [a != b for a, b in zip(versions, self.versions, strict=True)].index(True)
        return self._name(self.parameters[changed])

    def learn(self) -> None:
        """Copy from now on, in each note, the tensors that have changed in place, by any means."""
        for each in self._tensors:
            now = each.tensor
            if each.is_written or (each.copy is not None and not are_equal(now, each.copy)):
                self._inventory.learn_written(now)

    def drew(self) -> bool:
        """Say whether a generator has given numbers since."""
        kinds = self._inventory.kinds.generators
        return any(
            not same_state(kinds[type(generator)].get(generator), state)
            for generator, state in self._generators
        )

    def _is_same(self, each: Holder) -> bool:
        if each.content.same(each.holder, each.copy):
            return True
        return bool(self._found.loose) and each.content.same(
            each.holder, exchanged(each.copy, tensor_of)
        )

    def _loose_entries(self) -> Iterator[tuple[Holder, Any, Loose]]:
        for holder in self._found.holders if self._found.loose else ():
            for key, item in entries(holder.copy):
                for each in item if isinstance(item, tuple) else (item,):
                    if isinstance(each, Loose):
                        yield holder, key, each

    def _is_written(self, loose: Loose) -> bool:
        """Say whether a tensor that is not held was changed in place; it cannot be put back."""
        return loose.version() not in (-1, self._versions_of_loose[id(loose)])

    def _name(self, value: Any) -> str:
        return name_of(value, self._inventory.living_roots(), self._also)

    # ---- putting back --------------------------------------------------------------------------

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the state back inside of this context; changes made inside do not outlast it.

        Tensors whose content was copied are replaced by copies, so that nothing is written into
        the ones that others hold.

        Raises:
            RecomputationError: something of it is gone.
        """
        wanted = self._wanted()
        with contextlib.ExitStack() as stack:
            self._put_parameters(stack)
            self._put_generators(stack)
            if wanted is None and self._found.is_same():
                stack.callback(self._restore_if_changed)
                yield
                return
            holders = self._found.holders
            before = [each._replace(copy=each.content.copy(each.holder)) for each in holders]
            filled = [self._as_holder(each) for each in self._found.empty if each]
            stack.callback(self._restore, before, filled)
            copies = wanted or [each.copy for each in holders]
            for each, copy in zip(holders, copies, strict=True):
                put(each, copy)
            for each in filled:
                each.content.put(each.holder, type(each.copy)())
            yield

    def _restore_if_changed(self) -> None:
        if not self._found.is_same():
            self._restore(
                [
                    each._replace(copy=exchanged(each.copy, tensor_of))
                    for each in self._found.holders
                ],
                [],
            )

    def _restore(self, before: list[Holder], filled: list[Holder]) -> None:
        for each in self._found.empty:
            if each:
                holder = self._as_holder(each)
                holder.content.put(each, type(holder.copy)())
        for each in (*before, *filled):
            put(each, each.copy)

    def _as_holder(self, container: Any) -> Holder:
        content = self._inventory.kinds.content(type(container))
        return Holder(container, content, content.copy(container))

    def _wanted(self) -> list[Any] | None:
        """Return what each holder is to hold in a second run; None: what it was noted with."""
        instead: dict[int, Tensor] = {}
        for each in self._tensors:
            if each.copy is not None:
                instead[id(each.tensor)] = each.copy.to(each.tensor.device, copy=True)
            elif each.is_written:
                self._inventory.learn_written(each.tensor)
                raise self._changed(each.tensor)

        def exchange(value: Any) -> Any:
            if type(value) is Loose:
                if self._is_written(value):
                    raise self._changed(value.ref())
                return living(value)
            return instead.get(id(value), value) if type(value) is Tensor else value

        if not instead and not self._found.loose:
            return None
        return [exchanged(each.copy, exchange) for each in self._found.holders]

    def _changed(self, tensor: Tensor | None) -> RecomputationError:
        return RecomputationError(
            f"{self._name(tensor)} was changed in place after the forward that has to run again as "
            "it was.",
            key="changed-before-second-run",
        )

    def _put_parameters(self, stack: contextlib.ExitStack) -> None:
        stack.callback(ParameterHooks(self.parameters).restore)
        stack.callback(self._train_those, list(map(_IS_TRAINED, self.parameters)))
        self._train_those(self._are_trained)

    def _train_those(self, are_trained: list[bool]) -> None:
        """Freeze and thaw the parameters, so that those are trained that *are_trained*."""
        if list(map(_IS_TRAINED, self.parameters)) == are_trained:
            return
        for parameter, is_trained in zip(self.parameters, are_trained, strict=True):
            if parameter.requires_grad != is_trained and parameter.is_leaf:
                parameter.requires_grad_(is_trained)

    def _put_generators(self, stack: contextlib.ExitStack) -> None:
        kinds = self._inventory.kinds.generators
        for generator, state in self._generators:
            kind = kinds[type(generator)]
            stack.callback(kind.set, generator, kind.get(generator))
            kind.set(generator, state)

    def undo(self) -> None:
        """Put the state back for good, into the objects that hold it.

        What :meth:`reason_not_undone` tells of is left as it is, and so is what this package has
        put on modules since.
        """
        kinds = self._inventory.kinds.generators
        self._train_those(self._are_trained)
        self._hooks.restore()
        for generator, state in self._generators:
            kinds[type(generator)].set(generator, state)
        for holder in self._found.holders:
            copy = exchanged(holder.copy, tensor_of) if self._found.loose else holder.copy
            if not holder.content.same(holder.holder, copy):
                wanted = with_present(holder.holder, without_ours(holder.holder, copy))
                holder.content.put(holder.holder, wanted)
        for empty in filter(None, self._found.empty):
            each = self._as_holder(empty)
            each.content.put(empty, without_ours(empty, type(each.copy)()))
        with torch.no_grad():
            for noted in self._tensors:
                if noted.copy is not None and not are_equal(noted.tensor, noted.copy):
                    noted.tensor.copy_(noted.copy)
