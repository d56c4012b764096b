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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_pyao.engine.recompute.verification import ForwardCheck
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.rerun.surroundings import Surroundings
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import no_hooks
from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from hf_pyao.model.gradient_buffer import GradientBuffer
from hf_pyao.model.tiles.linears import Ending, Linears, NeedsValuesError
from hf_pyao.model.tiles.tensor_hooks import NoTensorHooks
from hf_pyao.plan.options.tile_plan import TilePlan


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What is known of a function that runs in slices, for its second run."""

    is_compiled: bool = False
    """Whether the function runs compiled code, which has its own linear layers."""
    state: Callable[[], StateOfCall] = lambda: StateOfCall(ModuleState((), "a function in tiles"))
    """Returns what else the function depends on: training mode is put back in backward, and the
    rest must be as it was."""
    ending: Ending = field(default_factory=Ending)
    """What is known of the function's end; one for all calls of it."""
    name: str = ""
    """Of the function, for messages of *check*."""
    check: ForwardCheck | None = None
    """Compares the slices' outputs in backward with those of forward; None: nothing does."""
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the slices run again in backward."""


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
    call = _Call(function, weights, slices, rerun or Rerun())
    current = list(weights())
    trained = [weight for weight in current if weight.requires_grad]
    # A node needs an input with a gradient to be one.
    anchors = [] if any(tensor.requires_grad for tensor in inputs) else trained[:1]
    node: list[Any] = []
    token = _SaveInputs.apply(node, len(inputs), *inputs, *anchors)  # type: ignore[no-untyped-call]
    result: Tensor = _RunSlices.apply(  # type: ignore[no-untyped-call]
        node, call, versions_of(current), token, len(inputs), *inputs, *trained
    )
    return result


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has been written to; -1 where torch does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Tensor]
    weights: Callable[[], Sequence[Tensor]]
    slices: TilePlan
    rerun: Rerun


class _SaveInputs(torch.autograd.Function):
    """See [Note: Saved first]."""

    @staticmethod
    def forward(ctx: Any, node: list[Any], num_inputs: int, *tensors: Tensor) -> Tensor:
        """Save the inputs, and return an empty tensor that ties the two nodes."""
        ctx.save_for_backward(*tensors[:num_inputs])
        ctx.set_materialize_grads(False)
        ctx.num_tensors = len(tensors)
        node.append(ctx)  # by which the second node finds this one
        first = tensors[0]
        dtype = first.dtype if first.is_floating_point() else torch.float32
        return first.new_empty(0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Do nothing: the other node has returned the gradients."""
        num_inputs: int = 2 + ctx.num_tensors
        return (None,) * num_inputs


class _RunSlices(torch.autograd.Function):
    """See [Note: Slices]."""

    @staticmethod
    def forward(
        ctx: Any,
        node: list[Any],
        call: _Call,
        versions: list[int],
        token: Tensor,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        """Run the slices; nothing that they compute is kept but their output."""
        inputs = tensors[:num_inputs]
        ctx.set_materialize_grads(False)
        ctx.node, ctx.call, ctx.versions = node, call, versions
        ctx.state = call.rerun.state()
        has_values = not isinstance(inputs[0], FakeTensor)  # fake tensors draw nothing
        ctx.surroundings = Surroundings([inputs[0].device], with_random=has_values)
        ctx.noted = []
        try:
            return _run_forward(call, inputs, ctx.noted)
        finally:
            if ctx.surroundings.is_cast:
                # What autocast casts here has no graph: nobody else may find it in its cache.
                torch.clear_autocast_cache()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run each slice again and take its gradients."""
        num_other = 5
        needs = ctx.needs_input_grad[num_other:]
        if grad_output is None:
            return (None,) * (num_other + len(needs))
        if torch.is_grad_enabled():
            raise ConflictError(
                "create_graph=True differentiates the gradients again, but an MLP in tiles keeps "
                "no graph of them. Set mlp_tiles='off' for training that needs second derivatives.",
                key="second-derivatives",
            )
        rerun = ctx.call.rerun
        # Outputs that are compared must be there: no product is left out.
        ending = rerun.ending if rerun.check is None else Ending()
        inputs = ctx.node[0].saved_tensors
        with rerun.watch():
            try:
                found = _run_backward(ctx, inputs, needs, grad_output, ending)
            except NeedsValuesError:
                ending.leave_out_none()
                found = _run_backward(ctx, inputs, needs, grad_output, ending)
        return (*(None,) * num_other, *found)


def _run_forward(call: _Call, inputs: Sequence[Tensor], noted: list[Any]) -> Tensor:
    """Return the function's output, of all tokens; *noted* gets what the call's check notes."""
    lead, rerun = inputs[0].shape[:-1], call.rerun
    rows = [_rows_of(tensor) for tensor in inputs]
    whole: Tensor | None = None  # no view: what comes next may write to it
    for start, stop in call.slices.slices():
        given = [_slice_of(each, start, stop, len(lead)) for each in rows]
        if rerun.is_compiled or rerun.ending.last is not None:
            part = _rows_of(call.function(*given))
        else:  # the first time: its end is looked at
            with Linears(rerun.ending) as linears:
                part = _rows_of(call.function(*given))
            linears.note_ending()
        if whole is None:
            whole = part.new_empty(*lead, part.shape[-1])
        _rows_of(whole)[start:stop] = part
        if rerun.check is not None:
            noted.append(rerun.check.note(rerun.name, part))
        del part
    assert whole is not None
    return whole


def _run_backward(
    ctx: Any,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    grad_output: Tensor,
    ending: Ending,
) -> list[Tensor | None]:
    """Return the gradients of inputs and trained weights, None where none is needed."""
    call: _Call = ctx.call
    of_inputs, of_weights = needs[: len(inputs)], needs[len(inputs) :]
    with ctx.surroundings.put_back(), ctx.state.put_back():
        weights = list(call.weights())
        if versions_of(weights) != ctx.versions:
            raise SavedTensorModifiedError(
                "a weight of an MLP in tiles was modified by an inplace operation between "
                "forward and backward, which runs the MLP again with it. Step the optimizer "
                "after backward.",
                key="changed-before-second-run",
            )
        trained = [weight for weight in weights if weight.requires_grad]
        wanted = [weight for weight, need in zip(trained, of_weights, strict=True) if need]
        sums = {id(weight): GradientBuffer.of(weight) for weight in wanted}
        grads = [
            each.new_empty(_rows_of(each).shape) if need else None
            for each, need in zip(inputs, of_inputs, strict=True)
        ]
        rows, grad_rows = [_rows_of(each.detach()) for each in inputs], _rows_of(grad_output)
        num_lead = inputs[0].dim() - 1

        def add_slice(index: int, start: int, stop: int) -> None:
            given = [
                _slice_of(each, start, stop, num_lead).detach().requires_grad_(need)
                for each, need in zip(rows, of_inputs, strict=True)
            ]
            output = _run_again(call, given, ctx.noted, index, ending, sums)
            grad = _slice_of(grad_rows, start, stop, num_lead)
            leaves = [each for each, need in zip(given, of_inputs, strict=True) if need]
            found = _gradients(output, grad, [*leaves, *wanted])
            del output
            wholes = (whole for whole in grads if whole is not None)
            for whole, part in zip(wholes, found, strict=False):
                whole[start:stop] = 0 if part is None else _rows_of(part)
            for weight, gradient in zip(wanted, found[len(leaves) :], strict=True):
                if gradient is not None:
                    sums[id(weight)].add(gradient)

        with NoTensorHooks(trained), no_hooks(), torch.enable_grad():
            for index, (start, stop) in enumerate(call.slices.slices()):
                add_slice(index, start, stop)
    totals = (sums[id(weight)].total(weight.shape) for weight in wanted)
    return [
        *(g if g is None else g.view(each.shape) for g, each in zip(grads, inputs, strict=True)),
        *(next(totals) if need else None for need in of_weights),
    ]


def _run_again(
    call: _Call,
    given: Sequence[Tensor],
    noted: Sequence[Any],
    index: int,
    ending: Ending,
    sums: dict[int, GradientBuffer],
) -> Tensor:
    """Return the function's output, of one slice, with its graph."""
    rerun = call.rerun
    if rerun.is_compiled:
        output = call.function(*given)
    else:
        with Linears(ending, sums) as linears:
            output = call.function(*given)
        linears.check(output)
    if rerun.check is not None:
        before = noted[index]
        rerun.check.compare([before], [rerun.check.note_again(before, _rows_of(output))])
    return output


def _gradients(output: Tensor, grad: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of *wanted*; None for what has no part in *output*."""
    if not output.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(output, wanted, grad.to(output.dtype), allow_unused=True)


def _rows_of(tensor: Tensor) -> Tensor:
    """Return (..., D) as (tokens, D)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _slice_of(rows: Tensor, start: int, stop: int, num_lead: int) -> Tensor:
    """Return rows *start* to *stop* with *num_lead* dimensions before the last one."""
    part = rows[start:stop]
    return part.view(*(1,) * (num_lead - 1), stop - start, rows.shape[-1])
