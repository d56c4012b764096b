"""Notes what a call of a layer finds in modules and arguments; puts it back for a second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from hf_pyao.engine.rerun.inventory import Inventory, Noted
from hf_pyao.errors import RecomputationError, SavedTensorModifiedError


class LayerState:
    """Knows what calls of a layer may change: in its modules, and in objects that it is given.

    Args:
        module: the layer.
        name: the layer, for messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._of_modules = Inventory([module])
        self._of_arguments = Inventory(())

    def now(self, arguments: Sequence[object]) -> StateOfCall:
        """Note the state with which a call begins; *arguments* are the objects that it is given."""
        given = self._of_arguments.note(arguments) if arguments else None
        return StateOfCall(self._name, self._of_modules.note(), given)


class StateOfCall:
    """What one call of a layer has found; see [Note: State of modules] in ``rerun.inventory``."""

    def __init__(self, layer: str, modules: Noted, arguments: Noted | None) -> None:
        self._layer = layer
        self._modules = modules
        self._arguments = arguments

    def reason_unknown(self) -> str:
        """Return why it cannot be noted, or an empty string."""
        if self._arguments is None:
            return self._modules.reason_unknown()
        if self._arguments.has_graph:
            return "an object that it is given holds a tensor that backward goes through"
        return self._modules.reason_unknown() or self._arguments.reason_unknown()

    def reason_not_again(self) -> str:
        """Return why what the call has changed cannot be put back, or an empty string."""
        arguments = self._arguments
        given = "" if arguments is None else arguments.reason_not_again()
        changed = self._modules.changed_parameter()
        changed = changed and f"its forward changes {changed}, a parameter, in place"
        return changed or self._modules.reason_not_again() or given

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the state back inside of this context; changes made inside do not outlast it.

        Raises:
            SavedTensorModifiedError: a parameter was changed since, or a tensor that the layer or
                an argument holds, of which there is no copy.
        """
        changed = self._modules.changed_parameter()
        if changed:
            raise _changed_since(self._layer, f"{changed}, a parameter,")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._modules.put_back())
                if self._arguments is not None:
                    stack.enter_context(self._arguments.put_back())
            except RecomputationError as error:
                raise _changed_since(self._layer, f"{error}") from error
            yield


def _changed_since(layer: str, what: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"layer {layer!r} has to run again in backward (checkpoint_every), and {what} was changed "
        "in place after its forward. Run backward before the optimizer steps, or give "
        "checkpoint_every=0.",
        key="changed-before-second-run",
    )
