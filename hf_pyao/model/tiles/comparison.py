"""Whether a function treats each token by itself, and what a token takes in it: seen once.

[Note: Comparison] Some tokens of the first batch, a tile's and 4,096 at most, run four times,
without a graph and without dropout. In two of the runs half of the tokens are exchanged for others,
each half in turn; the rows of the other half must have the same bits, since the shapes are the
same. The last run gets a few of the tokens alone: their rows must be the same but for rounding,
which differs with the shape. So tokens that mix are seen, and functions of where a token is or of
how many there are. The modules must come out as they were, and draw no numbers but dropout's.

[Note: Graphs of a few tokens] Before that a few tokens run once, with their graph. What autograd
saves of them says how many bytes a token takes, and the nodes say which linear layer is the last.
No trained weight but those of the modules may be in it, since its gradient would be lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import no_hooks
from hf_pyao.errors import ConflictError
from hf_pyao.model.map.sharding import KnownSharding
from hf_pyao.model.tiles.linears import Linears
from hf_pyao.ranks import process_rank
from hf_pyao.text import describe_error

LEAST_TOKENS = 4
"""Fewer tokens are not compared, and run whole."""
MOST_TOKENS = 4096

_FEW_TOKENS = 64
"""So many run with their graph; and as many are compared at least, if a call has them, however
small its tiles are."""
_WIDE = 1.5
"""Times a token's input: a norm that saves more is written out in steps."""


class Known(NamedTuple):
    """What the first call of its kind shows of a function."""

    reason: str = ""
    """Why it may not run on a part of the tokens; empty if it may."""
    token_bytes: int = 0
    """Bytes that a token takes inside, forward and backward, at the peak."""
    last_linear: int = 0
    """Which linear layer a second run leaves out: see [Note: Last products] in ``linears``."""
    is_wide: bool = False
    """Whether a token saves far more than what goes in."""
    is_compared: bool = False
    """Whether its tokens were compared."""
    draws: bool = False
    """Whether it has dropout, as the comparison has seen."""


NOTHING_KNOWN = Known()


@contextmanager
def _aside(modules: Sequence[nn.Module], like: Tensor) -> Iterator[None]:
    """Put back what is done to *modules* and to random numbers inside, which no mode or hook sees.

    Autocast stays as it is. Operations on fake tensors stay those of their mode.
    """
    with ExitStack() as stack:
        stack.callback(StateOfCall(ModuleState(modules, "an MLP"), clones_all=True).undo)
        random = RandomState([] if isinstance(like, FakeTensor) else [like.device])
        for each in (random.kept(), _disable_current_modes(), no_hooks()):
            stack.enter_context(each)
        stack.callback(torch.clear_autocast_cache)  # what is cast here is nobody else's
        if isinstance(like, FakeTensor):
            stack.enter_context(like.fake_mode)
        yield


def look_at(
    function: Callable[..., Any], modules: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> Known:
    """Run a few tokens of *inputs* with their graph; see [Note: Graphs of a few tokens].

    Args:
        function: tensors of shape (..., D_i) -> (..., D_out).
        modules: what it calls, with what is inside. What it changes in them is put back.
        inputs: of a call.
    """
    weights = weights_of(modules)
    others = {weight.untyped_storage()._cdata for weight in weights}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    ones = (1,) * (inputs[0].dim() - 2)
    with _aside(modules, inputs[0]), torch.enable_grad(), Linears({}) as linears:
        try:
            given = [_rows(each)[:_FEW_TOKENS].clone().requires_grad_() for each in inputs]
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = function(*(each.view(*ones, *each.shape) for each in given))
        except Exception as error:  # of the module's own code
            return Known(f"it cannot be run on a part of the tokens: {describe_error(error)}")
        if not isinstance(output, Tensor):
            return Known(f"it returns a {type(output).__name__} and not one tensor")
        if _trains_others(output, [*weights, *given]):
            return Known("it uses a trained weight of another module")
        last_linear = linears.num_linears if linears.end_with(output) else 0
    input_bytes = sum(each.nbytes for each in given)
    # In backward the gradients of two tensors are alive beside what is saved, and input and output.
    peak_bytes = sum(saved.values()) + 2 * max(saved.values(), default=0) + 2 * input_bytes
    is_wide = sum(saved.values()) > _WIDE * input_bytes
    return Known("", -(-peak_bytes // len(given[0])), last_linear, is_wide)


def compare_tokens(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    tile_tokens: int = MOST_TOKENS,
    known: Known = NOTHING_KNOWN,
) -> Known:
    """Return *known*, and whether *function* treats tokens one by one; see [Note: Comparison].

    Waits for the device.

    Args:
        function: tensors of shape (..., D_i) -> (..., D_out).
        modules: what it calls, with what is inside. What it changes in them is put back.
        inputs: of the first batch, with :data:`LEAST_TOKENS` tokens at least.
        tile_tokens: tokens of a tile; more are compared only where a tile has fewer than 64.
        known: what the graph of a few tokens has shown.
    """
    with _aside(modules, inputs[0]), torch.no_grad(), _WithoutDropout() as dropout:
        before, random = StateOfCall(ModuleState(modules, "")), RandomState([inputs[0].device])
        if unsteady := before.reason_unknown():
            return known._replace(reason=unsteady)
        try:
            reason = _reason(function, inputs, tile_tokens)
        except Exception as error:  # of the module's own code
            reason = f"it cannot be run on other tokens: {describe_error(error)}"
        if changed := before.first_change():
            reason = f"it changes {changed}, which is a state"
        elif not random.is_equal(random.now()):
            reason = "it draws random numbers that are not dropout's"
        return known._replace(reason=reason, is_compared=True, draws=dropout.draws)


def _reason(function: Callable[..., Any], inputs: Sequence[Tensor], tile_tokens: int) -> str:
    num_lead = inputs[0].dim() - 1
    num_tokens = inputs[0].shape[:-1].numel()
    most = min(num_tokens, MOST_TOKENS, max(tile_tokens, _FEW_TOKENS))
    num_tokens = most // LEAST_TOKENS * LEAST_TOKENS
    lead = (num_tokens,) if num_lead == 1 else (*(1,) * (num_lead - 2), 2, num_tokens // 2)
    rows = [_rows(each)[:num_tokens] for each in inputs]
    given = [each.clone().view(*lead, -1) for each in rows]
    output = function(*given)
    if output.shape[:-1] != lead:
        return "what it returns is not one row for each token"
    if any(each._version for each in given):
        return "it writes to its input"
    expected = output.reshape(num_tokens, -1)
    places = torch.arange(num_tokens, device=expected.device)
    half = ((places + places // lead[-1]) % 2).bool().unsqueeze(1)
    for is_other in (half, ~half):
        others = [torch.where(is_other, each.flip(0) * -2, each) for each in rows]
        found = function(*(each.view(*lead, -1) for each in others)).reshape(num_tokens, -1)
        is_same = (found == expected) | ((found != found) & (expected != expected))
        if not bool((is_same | is_other).all()):
            return "other tokens change what it computes for a token"
    few = slice(num_tokens // 4, num_tokens // 2)
    alone = function(*(each[few].view(*(1,) * (num_lead - 1), -1, each.shape[-1]) for each in rows))
    wide, error = expected[few].double(), (alone.reshape(-1, expected.shape[1]) - expected[few])
    rounding = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    if not bool(error.double().nan_to_num().norm() <= rounding * wide.nan_to_num().norm()):
        return "it computes with the number or the places of tokens"
    return ""


def _rows(tensor: Tensor) -> Tensor:
    """Return (..., D) as (tokens, D), without its graph."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _trains_others(output: Tensor, weights: Sequence[Tensor]) -> bool:
    """Say whether a leaf that is not among *weights* would get a gradient from *output*."""
    known = set(map(id, weights))
    seen: set[Any] = {None, *(weight.grad_fn for weight in weights)}
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                return True
            nodes.extend(before for before, _ in node.next_functions)
    return False


def weights_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of *parts*, each once; the views that FSDP1 has in their place."""
    sharding = KnownSharding()
    modules = (module for part in parts for module in part.modules())
    every = (weight for module in modules for weight in sharding.weights_of(module))
    return list({id(weight): weight for weight in every}.values())


class _WithoutDropout(TorchFunctionMode):
    """While active, dropout does nothing."""

    draws = False
    """Whether something was to be dropped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func*; of dropout return the input."""
        kwargs = kwargs or {}
        # Looked up now: recordings have another F.dropout, also while this file is imported.
        if func not in (F.dropout, torch.dropout, F.alpha_dropout, torch.alpha_dropout):
            return func(*args, **kwargs)
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        is_training = given.get("training", given.get("train", True))
        self.draws = self.draws or bool(given.get("p", 0.5) and is_training)
        return given["input"]


def agreed(kind: str, name: str, reason: str) -> str:
    """Return why a function may not run on a part of the tokens, as the first rank has seen.

    Waits for no rank: each asks the store by which they found each other.

    Args:
        kind: of the function; equal on all ranks.
        name: of the function, for the message.
        reason: of this rank; empty if it may.

    Raises:
        ConflictError: another rank has accepted what this one has seen to mix tokens.
    """
    if process_rank().num_ranks < 2 or dist.get_backend() == "fake":
        return reason
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"hf_pyao/mlp_tiles/{hashlib.sha256(kind.encode()).hexdigest()}"
    first: str = store.compare_set(key, "", f"={reason}").decode()[1:]
    if reason and not first:
        raise ConflictError(
            f"{name} treats tokens one by one on another rank, and not on this one: "
            f"{reason}. Set mlp_tiles='off' for this model.",
            key="mlp-not-the-same",
        )
    return first
