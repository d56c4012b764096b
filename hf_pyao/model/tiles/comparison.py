"""Whether a function treats each token by itself: it is compared with itself, once.

[Note: Comparison] Some tokens of the first batch, a tile's and 4,096 at most, run four times,
without a graph and without dropout. In two of the runs half of the tokens are exchanged for others,
each half in turn; the rows of the other half must have the same bits, since the shapes are the
same. The last run gets a few of the tokens alone: their rows must be the same but for rounding,
which differs with the shape. So tokens that mix are seen, and functions of where a token is or of
how many there are. The modules must come out as they were, and draw no numbers but dropout's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import no_hooks
from hf_pyao.errors import ConflictError
from hf_pyao.ranks import process_rank
from hf_pyao.text import describe_error

LEAST_TOKENS = 4
"""Fewer tokens are not compared, and run whole."""
MOST_TOKENS = 4096

_LEAST_COMPARED = 64
"""As many tokens are compared at least, if a call has them, however small its tiles are."""
_DROPOUTS = frozenset({F.dropout, torch.dropout, F.alpha_dropout, torch.alpha_dropout})


class Verdict(NamedTuple):
    """What the comparison says of a function."""

    reason: str = ""
    """Why it may not run on a part of the tokens; empty if it may."""
    draws: bool = False
    """Whether it has dropout."""


def compare_tokens(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    tile_tokens: int = MOST_TOKENS,
) -> Verdict:
    """Say whether *function* treats the tokens of *inputs* one by one; see [Note: Comparison].

    Waits for the device.

    Args:
        function: tensors of shape (..., D_i) -> (..., D_out).
        modules: what it calls, with what is inside. What it changes in them is put back.
        inputs: of the first batch, with :data:`LEAST_TOKENS` tokens at least.
        tile_tokens: tokens of a tile; more are compared only where a tile has fewer than 64.
    """
    device = inputs[0].device
    state = ModuleState(modules, "an MLP")
    before, random = StateOfCall(state, clones_all=True), RandomState([device])
    if unsteady := before.reason_unknown():
        return Verdict(unsteady)
    autocast = torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,  # what is cast here has no graph
    )
    with ExitStack() as stack:
        stack.callback(before.undo)
        for each in (random.kept(), _disable_current_modes(), no_hooks(), torch.no_grad()):
            stack.enter_context(each)
        stack.enter_context(autocast)
        dropout = stack.enter_context(_WithoutDropout())
        as_run = StateOfCall(state)
        try:
            reason = _reason(function, inputs, tile_tokens)
        except Exception as error:  # of the module's own code
            reason = f"it cannot be run on other tokens: {describe_error(error)}"
        if changed := as_run.first_change():
            reason = f"it changes {changed}, which is a state"
        elif not random.is_equal(random.now()):
            reason = "it draws random numbers that are not dropout's"
        return Verdict(reason, dropout.draws)


def _reason(function: Callable[..., Any], inputs: Sequence[Tensor], tile_tokens: int) -> str:
    num_lead = inputs[0].dim() - 1
    num_tokens = inputs[0].shape[:-1].numel()
    most = min(num_tokens, MOST_TOKENS, max(tile_tokens, _LEAST_COMPARED))
    num_tokens = most // LEAST_TOKENS * LEAST_TOKENS
    lead = (num_tokens,) if num_lead == 1 else (*(1,) * (num_lead - 2), 2, num_tokens // 2)
    rows = [each.detach().reshape(-1, each.shape[-1])[:num_tokens] for each in inputs]
    given = [each.clone().view(*lead, -1) for each in rows]
    output = function(*given)
    if not isinstance(output, Tensor):
        return f"it returns a {type(output).__name__} and not one tensor"
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


class _WithoutDropout(TorchFunctionMode):
    """While active, dropout does nothing."""

    draws = False
    """Whether something was to be dropped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func*; of dropout return the input."""
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        is_training = given.get("training", given.get("train", True))
        self.draws = self.draws or bool(given.get("p", 0.5) and is_training)
        return given["input"]


def agreed(kind: str, name: str, verdict: Verdict) -> Verdict:
    """Return the same verdict on all ranks that train together: that of the first one.

    Waits for no rank: each asks the store by which they found each other.

    Args:
        kind: of the function; equal on all ranks.
        name: of the function, for the message.
        verdict: of this rank.

    Raises:
        ConflictError: another rank has accepted what this one has seen to mix tokens.
    """
    if process_rank().num_ranks < 2 or dist.get_backend() == "fake":
        return verdict
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"hf_pyao/mlp_tiles/{hashlib.sha256(kind.encode()).hexdigest()}"
    first = store.compare_set(key, "", f"={verdict.reason}").decode()[1:]
    if verdict.reason and not first:
        raise ConflictError(
            f"{name} treats tokens one by one on another rank, and not on this one: "
            f"{verdict.reason}. Set mlp_tiles='off' for this model.",
            key="mlp-not-the-same",
        )
    return verdict._replace(reason=first)
