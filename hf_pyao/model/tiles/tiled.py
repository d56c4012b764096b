"""A function of tokens that runs tile by tile, forward and backward.

[Note: Tiles] The function treats each token by itself, so it may be given a part of the tokens at a
time. Forward runs the tiles one after the other and keeps nothing of them but their output;
backward runs each tile again, with its graph, and takes its gradients. What is alive inside is of
one tile. Gradients of inputs are written row by row into one tensor; those of weights are summed,
in float32 where the weight has 16 bits, and handed to autograd once, so that hooks that exchange
gradients between ranks run once.

[Note: Saved first] The inputs are saved by a node of their own, before the tiles run. Where a
checkpoint runs a layer again, it stops at the last tensor that it needs. If the tiles are the
layer's last, their inputs are that tensor, and the tiles are not run once more for nothing.
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
from hf_pyao.model.tiles.endings import Ending, NeedsValuesError, SeenEnding
from hf_pyao.model.tiles.tensor_hooks import NoTensorHooks
from hf_pyao.model.tiles.weight_sums import SummedProducts, WeightSums
from hf_pyao.plan.options.tile_plan import TilePlan


@dataclass(frozen=True, kw_only=True)
class TiledCall:
    """What runs tile by tile."""

    function: Callable[..., Tensor]
    """Tensors of shape (..., n, D_i) -> (..., n, D_out), each token by itself; the leading
    dimensions are 1, as many as in the call. Called again in backward."""
    weights: Callable[[], Sequence[Tensor]]
    """Returns the tensors besides its inputs that the function uses and that may want gradients,
    each once, in the same order whenever it is called."""
    plan: TilePlan
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
    """Compares the tiles' outputs in backward with those of forward; None: nothing does."""
    watch: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the tiles run again in backward."""


def run_in_tiles(call: TiledCall, *inputs: Tensor) -> Tensor:
    """Return ``call.function(*inputs)``, run tile by tile; see [Note: Tiles].

    Differentiable once, in *inputs* and the weights. With dropout inside, every tile draws by
    itself, and again the same in backward: the masks are others than without tiles.

    Args:
        call: the function, its weights, and how the tokens are cut.
        inputs: (..., D_i) each, with equal leading dimensions and ``call.plan.num_tokens`` tokens.
    """
    if call.plan.num_tiles < 2:
        return call.function(*inputs)
    weights = list(call.weights())
    trained = [weight for weight in weights if weight.requires_grad]
    saved = _Saved()
    # A node needs an input with a gradient to be one.
    anchors = [] if any(tensor.requires_grad for tensor in inputs) else trained[:1]
    token = _SaveInputs.apply(saved, len(inputs), *inputs, *anchors)  # type: ignore[no-untyped-call]
    result: Tensor = _RunTiles.apply(  # type: ignore[no-untyped-call]
        saved, call, versions_of(weights), token, len(inputs), *inputs, *trained
    )
    return result


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has been written to; -1 where torch does not count."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Saved:
    """Where the second node finds the first one, and with it the inputs."""

    node: Any = None


class _SaveInputs(torch.autograd.Function):
    """See [Note: Saved first]."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, num_inputs: int, *tensors: Tensor) -> Tensor:
        """Save the inputs, and return an empty tensor that ties the two nodes."""
        ctx.save_for_backward(*tensors[:num_inputs])
        ctx.set_materialize_grads(False)
        ctx.num_tensors = len(tensors)
        saved.node = ctx
        first = tensors[0]
        dtype = first.dtype if first.is_floating_point() else torch.float32
        return first.new_empty(0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Do nothing: the other node has returned the gradients."""
        num_inputs: int = 2 + ctx.num_tensors
        return (None,) * num_inputs


class _RunTiles(torch.autograd.Function):
    """See [Note: Tiles]."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: _Saved,
        call: TiledCall,
        versions: list[int],
        token: Tensor,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        """Run the tiles; nothing that they compute is kept but their output."""
        inputs = tensors[:num_inputs]
        ctx.set_materialize_grads(False)
        ctx.saved, ctx.call, ctx.versions = saved, call, versions
        ctx.state = call.state()
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
        """Run each tile again and take its gradients."""
        num_other = 5
        needs = ctx.needs_input_grad[num_other:]
        if grad_output is None:
            return (None,) * (num_other + len(needs))
        call: TiledCall = ctx.call
        if torch.is_grad_enabled():
            raise ConflictError(
                "create_graph=True differentiates the gradients again, but an MLP in tiles keeps "
                "no graph of them. Set mlp_tiles='off' for training that needs second derivatives.",
                key="second-derivatives",
            )
        inputs = ctx.saved.node.saved_tensors
        with call.watch():
            try:
                found = _run_backward(ctx, inputs, needs, grad_output)
            except NeedsValuesError:
                call.ending.leave_out_none()
                found = _run_backward(ctx, inputs, needs, grad_output)
        return (*(None,) * num_other, *found)


def _run_backward(
    ctx: Any, inputs: Sequence[Tensor], needs: Sequence[bool], grad_output: Tensor
) -> list[Tensor | None]:
    """Return the gradients of inputs and trained weights, None where none is needed."""
    call: TiledCall = ctx.call
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
        backward = _Backward(call, inputs, trained, needs, ctx.noted)
        with NoTensorHooks(trained), no_hooks(), torch.enable_grad():
            backward.run(grad_output)
    return backward.results()


def _run_forward(call: TiledCall, inputs: Sequence[Tensor], noted: list[Any]) -> Tensor:
    """Return the function's output, of all tokens; *noted* gets what the call's check notes."""
    lead = inputs[0].shape[:-1]
    rows = [rows_of(tensor) for tensor in inputs]
    whole: Tensor | None = None  # no view: what comes next may write to it
    for start, stop in call.plan.slices():
        tile = rows_of(_output_of(call, [tile_of(each, start, stop, len(lead)) for each in rows]))
        if whole is None:
            whole = tile.new_empty(*lead, tile.shape[-1])
        rows_of(whole)[start:stop] = tile
        if call.check is not None:
            noted.append(call.check.note(call.name, tile))
        del tile
    assert whole is not None
    return whole


def _output_of(call: TiledCall, tiles: Sequence[Tensor]) -> Tensor:
    """Return the function's output; the first time, its end is looked at."""
    if call.ending.last is not None or call.is_compiled:
        return call.function(*tiles)
    with SeenEnding(call.ending) as seen:
        output = call.function(*tiles)
    seen.end()
    return output


class _Backward:
    """The gradients of one call, tile by tile."""

    def __init__(
        self,
        call: TiledCall,
        inputs: Sequence[Tensor],
        trained: Sequence[Tensor],
        needs: Sequence[bool],
        noted: Sequence[Any],
    ) -> None:
        self._call = call
        self._noted = noted
        # Outputs that are compared must be there: no product is left out.
        self._ending = call.ending if call.check is None else Ending()
        self._inputs = inputs
        self._needs = needs[: len(inputs)]
        self._weights = [
            weight for weight, need in zip(trained, needs[len(inputs) :], strict=True) if need
        ]
        self._sums = WeightSums(self._weights)
        self._weight_needs = needs[len(inputs) :]
        self._grads = [
            torch.empty(rows_of(tensor).shape, dtype=tensor.dtype, device=tensor.device)
            if need
            else None
            for tensor, need in zip(inputs, self._needs, strict=True)
        ]

    def run(self, grad_output: Tensor) -> None:
        """Go through the tiles. Gradients must be on."""
        rows = [rows_of(tensor.detach()) for tensor in self._inputs]
        grad_rows = rows_of(grad_output)
        for index, (start, stop) in enumerate(self._call.plan.slices()):
            self._run_tile(index, rows, grad_rows, start, stop)

    def _run_tile(
        self, index: int, rows: Sequence[Tensor], grad_rows: Tensor, start: int, stop: int
    ) -> None:
        num_lead = self._inputs[0].dim() - 1
        tiles = [
            tile_of(each, start, stop, num_lead).detach().requires_grad_(need)
            for each, need in zip(rows, self._needs, strict=True)
        ]
        wanted = [tile for tile, need in zip(tiles, self._needs, strict=True) if need]
        grad = tile_of(grad_rows, start, stop, num_lead)
        call = self._call
        if call.is_compiled:
            output = call.function(*tiles)
        else:
            with SummedProducts(self._sums, self._ending) as products:
                output = call.function(*tiles)
            products.check(output)
        if call.check is not None:
            noted = self._noted[index]
            call.check.compare([noted], [call.check.note_again(noted, rows_of(output))])
        found = _gradients(output, grad, [*wanted, *self._weights])
        del output
        self._sums.add(found[len(wanted) :])
        of_tiles = iter(found[: len(wanted)])
        for whole in self._grads:
            if whole is not None:
                of_tile = next(of_tiles)
                if of_tile is None:
                    whole[start:stop].zero_()
                else:
                    whole[start:stop] = rows_of(of_tile)

    def results(self) -> list[Tensor | None]:
        """Return the gradients of inputs and trained weights, None where none is needed."""
        sums = iter(self._sums.finish())
        of_inputs = [
            None if grad is None else grad.view(tensor.shape)
            for grad, tensor in zip(self._grads, self._inputs, strict=True)
        ]
        return [*of_inputs, *(next(sums) if need else None for need in self._weight_needs)]


def _gradients(output: Tensor, grad: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of *wanted*; None for what has no part in *output*."""
    if not output.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(output, wanted, grad.to(output.dtype), allow_unused=True)


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., D) as (tokens, D)."""
    return tensor.reshape(-1, tensor.shape[-1])


def tile_of(rows: Tensor, start: int, stop: int, num_lead: int) -> Tensor:
    """Return rows *start* to *stop* with *num_lead* dimensions before the last one."""
    tile = rows[start:stop]
    return tile.view(*(1,) * (num_lead - 1), stop - start, rows.shape[-1])
