"""A function of tokens that runs slice by slice, forward and backward.

[Note: Slices] The function treats each token by itself, so it may be given a part of the tokens at
a time. Forward runs the slices one after the other and keeps nothing of them but their output;
backward runs each slice again, with its graph, and takes its gradients. What is alive inside is of
one slice. Gradients of inputs are written row by row into one tensor; those of weights are summed,
in float32 where the weight has 16 bits, and handed to autograd once, so that hooks that exchange
gradients between ranks run once.

[Note: Saved first] The inputs are saved by a node of their own, before the slices run. Where a
checkpoint runs a layer again, it stops at the last tensor that it needs. If the slices are the
layer's last, their inputs are that tensor, and the slices are not run once more for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.recompute.verification import ForwardCheck
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.rerun.surroundings import Surroundings
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import no_hooks
from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from hf_pyao.model.gradient_buffer import GradientBuffer
from hf_pyao.model.tiles.linears import Linears, NeedsValuesError
from hf_pyao.plan.options.tile_plan import TilePlan


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What is known of a function that runs in slices, for its second run."""

    is_compiled: bool = False
    """Whether the function runs compiled code, which has its own linear layers."""
    last_linear: int = 0
    """Which of its linear layers, counted from 1, a second run may leave out; 0: none. See
    [Note: Last products] in ``linears``."""
    state: Callable[[], StateOfCall] = lambda: StateOfCall(ModuleState((), "a function in tiles"))
    """Returns what else the function depends on: training mode is put back in backward, and the
    rest must be as it was."""
    name: str = ""
    """Of the function, for messages of *check*."""
    check: ForwardCheck | None = None
    """Compares the slices' outputs in backward with those of forward; None: nothing does."""
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the slices run again in backward."""


class _Call(NamedTuple):
    function: Callable[..., Tensor]
    weights: Callable[[], Sequence[Tensor]]
    versions: list[int]
    """Of the weights, as the call began."""
    plan: TilePlan
    rerun: Rerun

    def slices(self, tensors: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield for each slice where its rows are, and these rows of *tensors*, (1, ..., n, D)."""
        rows, ones = list(map(_rows_of, tensors)), (1,) * (tensors[0].dim() - 2)
        for start, stop in self.plan.slices():
            at = slice(start, stop)
            yield at, [each[at].view(*ones, stop - start, each.shape[-1]) for each in rows]


def run_in_slices(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    weights: Callable[[], Sequence[Tensor]],
    slices: TilePlan,
    rerun: Rerun | None = None,
) -> Tensor:
    """Return ``function(*inputs)``, run slice by slice; see [Note: Slices].

    Differentiable once, in *inputs* and the weights. With dropout inside, every slice draws by
    itself, and again the same in backward: the masks are others than without slices. Whoever
    records a step is told of equal slices by ``slices.slices``.

    Args:
        function: tensors of shape (..., n, D_i) -> (..., n, D_out), each token by itself; the
            leading dimensions are 1, as many as in *inputs*. Called again in backward.
        inputs: (..., D_i) each, with equal leading dimensions.
        weights: returns the tensors besides its inputs that the function uses and that may want
            gradients, each once, in the same order whenever it is called.
        slices: how the tokens are cut.
        rerun: what is known of the second run; None: nothing.

    Raises:
        ConflictError: in backward, with ``create_graph=True``.
        SavedTensorModifiedError: in backward, if a weight was written since.
    """
    if slices.num_tiles < 2:
        return function(*inputs)
    current = list(weights())
    call = _Call(function, weights, versions_of(current), slices, rerun or Rerun())
    trained = [weight for weight in current if weight.requires_grad]
    # A node needs an input with a gradient to be one.
    anchors = [] if any(tensor.requires_grad for tensor in inputs) else trained[:1]
    node: list[Any] = []
    token = _SaveInputs.apply(node, len(inputs), *inputs, *anchors)  # type: ignore[no-untyped-call]
    result: Tensor = _RunSlices.apply(node, call, token, len(inputs), *inputs, *trained)  # type: ignore[no-untyped-call]
    return result


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has been written to; -1 where torch does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class _SaveInputs(torch.autograd.Function):
    """See [Note: Saved first]."""

    @staticmethod
    def forward(ctx: Any, node: list[Any], num_inputs: int, *tensors: Tensor) -> Tensor:
        """Save the inputs, and return an empty tensor that ties the two nodes."""
        ctx.save_for_backward(*tensors[:num_inputs])
        ctx.set_materialize_grads(False)
        node.append(ctx)  # by which the second node finds this one
        first = tensors[0]
        return first.new_empty(0, dtype=first.dtype if first.is_floating_point() else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        """Do nothing: the other node has returned the gradients."""
        return (None,) * len(ctx.needs_input_grad)


class _RunSlices(torch.autograd.Function):
    """See [Note: Slices]."""

    @staticmethod
    def forward(
        ctx: Any, node: list[Any], call: _Call, token: Tensor, num_inputs: int, *tensors: Tensor
    ) -> Tensor:
        """Run the slices; nothing that they compute is kept but their output."""
        inputs, rerun = tensors[:num_inputs], call.rerun
        ctx.set_materialize_grads(False)
        ctx.node, ctx.call, ctx.state, ctx.noted = node, call, rerun.state(), []
        has_values = not isinstance(inputs[0], FakeTensor)  # fake tensors draw nothing
        ctx.surroundings = Surroundings([inputs[0].device], with_random=has_values)
        whole: Any = None  # no view: what comes next may write to it
        try:
            for at, given in call.slices(inputs):
                part = _rows_of(call.function(*given))
                if whole is None:
                    whole = part.new_empty(*inputs[0].shape[:-1], part.shape[-1])
                _rows_of(whole)[at] = part
                if rerun.check is not None:
                    ctx.noted.append(rerun.check.note(rerun.name, part))
                del part
        finally:
            if ctx.surroundings.is_cast:
                # What autocast casts here has no graph: nobody else may find it in its cache.
                torch.clear_autocast_cache()
        result: Tensor = whole
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run each slice again and take its gradients."""
        num_other = 4
        needs = ctx.needs_input_grad[num_other:]
        if grad_output is None:
            return (None,) * (num_other + len(needs))
        if torch.is_grad_enabled():
            raise ConflictError(
                "create_graph=True differentiates the gradients again, but an MLP in tiles keeps "
                "no graph of them. Set mlp_tiles='off' for training that needs second derivatives.",
                key="second-derivatives",
            )
        inputs, rerun = ctx.node[0].saved_tensors, ctx.call.rerun
        # Outputs that are compared must be there: no product is left out.
        left_out = rerun.last_linear if rerun.check is None else 0
        with rerun.watch():
            try:
                with ctx.surroundings.put_back(), ctx.state.put_back():
                    found = _gradients(ctx, inputs, needs, grad_output, left_out)
            except NeedsValuesError:
                with ctx.surroundings.put_back(), ctx.state.put_back():
                    found = _gradients(ctx, inputs, needs, grad_output, 0)
        return (*(None,) * num_other, *found)


def _gradients(
    ctx: Any, inputs: Sequence[Tensor], needs: Sequence[bool], grad_output: Tensor, left_out: int
) -> list[Tensor | None]:
    """Return the gradients of inputs and trained weights, None where none is needed."""
    call: _Call = ctx.call
    of_inputs, of_weights = needs[: len(inputs)], needs[len(inputs) :]
    weights = list(call.weights())
    if versions_of(weights) != call.versions:
        raise SavedTensorModifiedError(
            "a weight of an MLP in tiles was modified by an inplace operation between forward and "
            "backward, which runs the MLP again with it. Step the optimizer after backward.",
            key="changed-before-second-run",
        )
    trained = [weight for weight in weights if weight.requires_grad]
    wanted = [weight for weight, need in zip(trained, of_weights, strict=True) if need]
    sums = {id(weight): GradientBuffer.of(weight) for weight in wanted}
    grads = [
        each.new_empty(each.shape) if need else None
        for each, need in zip(inputs, of_inputs, strict=True)
    ]

    def add_slice(index: int, at: slice, given: Sequence[Tensor], grad: Tensor) -> None:
        for each, need in zip(given, of_inputs, strict=True):
            each.requires_grad_(need)
        output = _run_again(call, given, sums, left_out)
        if (check := call.rerun.check) is not None:
            before = ctx.noted[index]
            check.compare([before], [check.note_again(before, _rows_of(output))])
        leaves = [each for each in given if each.requires_grad]
        found: Sequence[Tensor | None] = (None,) * (len(leaves) + len(wanted))
        if output.requires_grad:
            grad = grad.to(output.dtype)
            found = torch.autograd.grad(output, [*leaves, *wanted], grad, allow_unused=True)
        del output
        wholes = [whole for whole in grads if whole is not None]
        for whole, part in zip(wholes, found, strict=False):
            _rows_of(whole)[at] = 0 if part is None else _rows_of(part)
        for weight, gradient in zip(wanted, found[len(leaves) :], strict=True):
            if gradient is not None:
                sums[id(weight)].add(gradient)

    with _no_tensor_hooks(trained), no_hooks(), torch.enable_grad():
        detached = [each.detach() for each in (*inputs, grad_output)]
        for index, (at, (*given, grad)) in enumerate(call.slices(detached)):
            add_slice(index, at, given, grad)
    totals = (sums[id(weight)].total(weight.shape) for weight in wanted)
    return [*grads, *(next(totals) if need else None for need in of_weights)]


def _run_again(
    call: _Call, given: Sequence[Tensor], sums: dict[int, GradientBuffer], left_out: int
) -> Tensor:
    """Return the function's output, of one slice, with its graph.

    Raises:
        NeedsValuesError: it ends otherwise than with the linear layer that is left out.
    """
    if call.rerun.is_compiled:
        return call.function(*given)
    with Linears(sums, left_out) as linears:
        output = call.function(*given)
    if left_out and not (linears.num_linears == left_out and linears.end_with(output)):
        raise NeedsValuesError
    return output


@contextmanager
def _no_tensor_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run no hooks on the gradients of *tensors*: they see each once and whole, when we return."""
    tables = [table for tensor in tensors if (table := tensor._backward_hooks)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _rows_of(tensor: Tensor) -> Tensor:
    """Return (..., D) as (tokens, D)."""
    return tensor.reshape(-1, tensor.shape[-1])
