"""The proof that a function treats each token by itself: it is run once on tensors without values.

:class:`TokenWatch` follows the tokens through every operation, by the rules of ``row_rules``. Its
tensors have prime numbers of tokens, which no other dimension has, so that a size tells tokens from
features. What it cannot follow it refuses, and says at which operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pyao.engine.rerun.bare_thread import bare_thread
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.torch_hooks.custom_operators import runner_of
from hf_pyao.model.tiles.row_rules import (
    NUMBERS_OF_SIZES,
    NotTokenWise,
    Operation,
    Rows,
    has_lead,
    made,
    rule_of,
)
from hf_pyao.text import describe_error
from hf_pyao.training_engines import FSDP1, Feature, whole_shape

_SIZES = ((1009, 2003), (1013, 2011))
"""Tokens of two runs, by dimension. No model has such sizes; if one has, it is not tiled."""


class TokenWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, follows tokens through operations, and raises where they meet.

    Args:
        leads: sizes of the dimensions of tokens.
    """

    def __init__(self, leads: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._leads = tuple(leads)
        self._known: dict[int, tuple[Tensor, Rows | None]] = {}  # holds them, so that ids stay
        self._outside: set[int] = set()
        self.numbers: list[tuple[str, tuple[Any, ...]]] = []
        """Each operation with its numeric operands."""
        self.draws = False
        """Whether random numbers were drawn."""
        self.refusal: NotTokenWise | None = None
        """Why the tokens could not be followed further; None if they could."""

    def note(self, tensor: Tensor, rows: Rows | None) -> None:
        """Take down where the tokens are in *tensor*; None: it is the same for all of them."""
        self._known[id(tensor)] = (tensor, rows)

    def rows_of(self, tensor: Any) -> Rows | None:
        """Return where the tokens are in *tensor*; None: it is the same for all of them."""
        _, rows = self._known.get(id(tensor), (None, None))
        return rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and follow the tokens.

        A refusal is not raised from here: autograd does not expect it of every operation.
        """
        result = None
        try:
            if self.refusal is None:
                result = self._follow(func, args, kwargs or {})
        except NotTokenWise as refusal:
            self.refusal = refusal
        return runner_of(func)(*args, **(kwargs or {})) if result is None else result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{func.namespace}.{func._opname}"
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        named = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(named, args, strict=False)) | kwargs
        self._check_arguments(func, name, arguments)
        result = runner_of(func)(*args, **kwargs)
        if func.namespace == "prim" or name in _ABOUT_SHAPES:
            return result
        operation = Operation(name, arguments, result, self._leads, self.rows_of)
        rule = rule_of(func)
        if not operation.tracked() and rule is not made:
            self._check_free(func, operation)
            return result
        if rule is None:
            raise operation.refuse("is not known to treat tokens one by one")
        if rule.__name__ not in NUMBERS_OF_SIZES:
            self.numbers.append((name, _numbers(arguments)))
        results = result if isinstance(result, tuple | list) else [result]
        for tensor, rows in zip(results, rule(operation), strict=True):
            if isinstance(tensor, Tensor):
                if has_lead(tensor.shape, self._leads) != (rows is not None):
                    raise operation.refuse("returns tokens in a way that cannot be followed")
                self.note(tensor, rows)
        return result

    def _check_arguments(self, func: Any, name: str, arguments: dict[str, Any]) -> None:
        for leaf in tree_leaves(list(arguments.values())):
            if isinstance(leaf, torch.Generator):
                raise NotTokenWise(f"{name} draws from a generator of its own")
            if isinstance(leaf, Tensor) and id(leaf) not in self._known:
                if has_lead(leaf.shape, self._leads):
                    raise NotTokenWise(f"{name} has tokens from an unknown place")
                if leaf.requires_grad:
                    raise NotTokenWise(f"{name} uses a trained weight of another module")
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(arguments.get(argument.name)) if is_written else ():
                if isinstance(leaf, Tensor) and not self._is_own(leaf):
                    raise NotTokenWise(f"{name} writes to a tensor from outside, which is a state")

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether an operation here has made *tensor*."""
        is_known = id(tensor) in self._known
        return is_known and tensor.untyped_storage()._cdata not in self._outside

    def begin(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Take down the function's inputs, with tokens in all dimensions but the last, and weights.

        Other tensors that want a gradient would not get it.
        """
        for weight in weights:
            self.note(weight, None)
        self._outside = {each.untyped_storage()._cdata for each in (*inputs, *weights)}
        for tensor in inputs:
            self.note(tensor, Rows(0, tensor.dim() - 1))

    def _check_free(self, func: Any, operation: Operation) -> None:
        """Take down the result of an operation without tokens."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise operation.refuse("draws numbers that all tokens share")
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        arguments = tree_leaves(list(operation.arguments.values()))
        is_outside = is_view and not all(
            self._is_own(a) for a in arguments if isinstance(a, Tensor)
        )
        for tensor in tree_leaves(operation.result):
            if isinstance(tensor, Tensor):
                if has_lead(tensor.shape, self._leads):
                    raise operation.refuse("makes numbers of where a token is")
                if is_outside:
                    self._outside.add(tensor.untyped_storage()._cdata)
                self.note(tensor, None)


def _numbers(arguments: dict[str, Any]) -> tuple[Any, ...]:
    leaves = tree_leaves(list(arguments.values()))
    return tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float))


def reason_not_token_wise(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    *,
    widths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    num_lead: int,
    on_draw: Callable[[], None] = lambda: None,
) -> str | None:
    """Return why *function* may not run on a part of the tokens at a time; None if it may.

    Args:
        function: tensors of shape (..., width) -> one of the same tokens.
        modules: all that it calls and what is in them. What it changes in them is put back.
        widths: features of each of its inputs.
        dtype: of the inputs.
        device: of the inputs.
        num_lead: dimensions of the inputs before the last one, 1 or 2.
        on_draw: called if it draws random numbers.
    """
    traces = []
    try:
        for sizes in _SIZES:
            with faked(modules) as fake_mode:
                known = [weight for module in modules for weight in module.parameters()]
                run = partial(_trace, function, fake_mode, sizes[:num_lead], known, on_draw)
                traces.append(run(widths, dtype, device))
        if traces[0] != traces[1]:
            return "it computes with the number of tokens"
    except NotTokenWise as refusal:
        return str(refusal)
    except Exception as error:  # of the module's own code
        if any(FSDP1.has(weight) for module in modules for weight in module.parameters()):
            return FSDP1.reason(Feature.MLP_TILES)
        return f"it cannot be run on tensors without values: {describe_error(error)}"
    return None


def _trace(
    function: Callable[..., Any],
    fake_mode: FakeTensorMode,
    leads: Sequence[int],
    known: Sequence[Tensor],
    on_draw: Callable[[], None],
    widths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Any]:
    """Run *function* once; return the numeric operands of its operations."""
    with fake_mode:
        inputs = [
            torch.empty(*leads, width, dtype=dtype, device=device, requires_grad=True)
            for width in widths
        ]
        watch = TokenWatch(leads)
        watch.begin(inputs, known)
        with watch:
            result = function(*inputs)
    if watch.draws:
        on_draw()
    if watch.refusal is not None:
        raise watch.refusal
    if not isinstance(result, Tensor):
        raise NotTokenWise(f"it returns a {type(result).__name__} and not one tensor")
    if watch.rows_of(result) != Rows(0, len(leads)) or result.dim() != len(leads) + 1:
        raise NotTokenWise("what it returns is not one row for each token")
    return watch.numbers


@contextmanager
def faked(modules: Sequence[nn.Module]) -> Iterator[FakeTensorMode]:
    """Let *modules* run, as in training, on fake tensors, and put back what they change.

    Yields the mode, which is to be entered. Operations are those of a mode of their own: no other
    one, such as a recording, sees them. Weights that are sharded are whole meanwhile.
    """
    everything = list(dict.fromkeys(m for module in modules for m in module.modules()))
    weights = [p for module in everything for p in module._parameters.values() if p is not None]
    fake = next((weight.fake_mode for weight in weights if isinstance(weight, FakeTensor)), None)
    fake_mode = fake or FakeTensorMode(allow_non_fake_inputs=True)
    state = ModuleState(modules, "")
    before, random = StateOfCall(state), RandomState(())
    with ExitStack() as stack:
        stack.enter_context(bare_thread())
        stack.callback(before.undo)
        stack.enter_context(random.kept())
        for module in everything:
            vars(module)["training"] = True
            for name, weight in module._parameters.items():
                if weight is not None and (shape := whole_shape(weight)) is not None:
                    with fake_mode:
                        whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
                    whole.requires_grad_(weight.requires_grad)
                    # Sharded parameters are left to the engine that has sharded them.
                    stack.callback(module._parameters.__setitem__, name, weight)
                    module._parameters[name] = whole  # type: ignore[assignment]
        as_run = StateOfCall(state)
        yield fake_mode
        changed = as_run.first_change()
        has_drawn = not random.is_equal(random.now())
    if unsteady := before.reason_unknown():
        raise NotTokenWise(unsteady)
    if changed:
        raise NotTokenWise(f"it changes its attribute {changed}, which is a state")
    if has_drawn:
        raise NotTokenWise("it draws random numbers that are not torch's")


_ABOUT_SHAPES = {
    f"aten.{name}" for name in ("sym_size", "sym_numel", "sym_stride", "is_contiguous")
}
