"""An MLP without a module of its own, such as OPT's: its call is put off until it is whole.

[Note: Put off MLPs] The up projection returns a stand-in: its input, and the operations to apply to
it. Activations and dropout that follow are added to them. When the down projection is called with
the stand-in, the whole chain runs in tiles. Any other use of a stand-in computes it, as if nothing
had been put off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.model.losses.stand_in import TensorStandIn, in_full
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, Method
from hf_pyao.model.tiles.sliced import versions_of
from hf_pyao.model.tiles.tiled_mlp import Part, TiledMLP

_POINTWISE: frozenset[Any] = frozenset(
    {F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, torch.relu, torch.tanh, torch.sigmoid}
)
"""Functions that join the chain: element by element, of one tensor."""

_Step = tuple[nn.Module | None, Callable[[Tensor], Tensor]]


class SpreadPart(Part):
    """Answers for one of the modules of a spread MLP.

    Args:
        mlp: how the MLP runs in tiles.
        is_first: the module goes up.
        is_last: it goes down.
    """

    def __init__(self, mlp: TiledMLP, *, is_first: bool, is_last: bool) -> None:
        self._mlp = mlp
        self._is_first = is_first
        self._is_last = is_last

    def with_tiles(self, tiles: int | str) -> SpreadPart:
        """Return the same with another number of tiles."""
        mlp = self._mlp.with_tiles(tiles)
        return SpreadPart(mlp, is_first=self._is_first, is_last=self._is_last)

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Begin the chain, join it, or run it in tiles."""
        given = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(given, PutOffMLP) and given.is_put_off:
            chain = given.then(module, own)
            return chain.finish() if self._is_last else chain
        args, kwargs = in_full(args, "its own modules"), in_full(kwargs, "its own modules")
        if self._is_first and not kwargs and len(args) == 1 and self._mlp.takes(module, args):
            return PutOffMLP(args[0], self._mlp, ((module, own),))
        return own(*args, **kwargs)


class PutOffMLP(TensorStandIn):
    """What an MLP's first module returns; see [Note: Put off MLPs].

    Args:
        hidden: (..., D) input of the MLP.
        mlp: how it runs in tiles.
        steps: what is to be done, each with the module that does it.
    """

    def __init__(self, hidden: Tensor, mlp: TiledMLP, steps: tuple[_Step, ...]) -> None:
        self._hidden = hidden
        self._version = versions_of([hidden])
        self._mlp = mlp
        self._steps = steps
        self._tensor: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let activations join the chain; run all else on the tensor."""
        given = dict(kwargs or {})
        is_alone = bool(args) and isinstance(args[0], cls) and args[0].is_put_off
        joins = func in _POINTWISE or func is F.dropout  # looked up now: recordings have another
        if joins and is_alone and not given.get("inplace") and "out" not in given:
            rest = tuple(args[1:])
            return args[0].then(None, lambda tensor: func(tensor, *rest, **given))
        return super().__torch_function__(func, types, args, kwargs)

    def then(self, module: nn.Module | None, step: Callable[[Tensor], Tensor]) -> PutOffMLP:
        """Return what stands in for *step* of this, by *module*."""
        self._check_unchanged()
        return PutOffMLP(self._hidden, self._mlp, (*self._steps, (module, step)))

    @property
    def is_put_off(self) -> bool:
        """Whether nobody has needed its elements yet."""
        return self._tensor is None

    def finish(self) -> Any:
        """Return the MLP's output."""
        parts = [part for part, _ in self._steps if part is not None]
        return self._mlp.tiled(partial(_run, self._steps), parts, (self._hidden,))

    def materialize(self, reason: str) -> Tensor:
        """Return the tensor, computed as without tiles. *reason* says what needs it."""
        if self._tensor is None:
            self._check_unchanged()
            self._mlp.say(f"its intermediate tensor is needed for {reason}")
            self._tensor = _run(self._steps, self._hidden)
        return self._tensor

    def _check_unchanged(self) -> None:
        if versions_of([self._hidden]) != self._version:
            raise SavedTensorModifiedError(
                "the input of an MLP in tiles was modified by an inplace operation before the MLP "
                "was through. Set mlp_tiles='off' for this model.",
                key="changed-before-second-run",
            )


def _run(steps: Sequence[_Step], hidden: Tensor) -> Tensor:
    for _, step in steps:
        hidden = step(hidden)
    return hidden
