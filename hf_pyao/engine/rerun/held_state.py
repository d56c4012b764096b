"""What modules hold, to be put back for good: for a micro-batch that runs again, and for a proof.

Put back are attributes, the tables of buffers, and training flags of parameters. What containers,
objects and arrays hold is compared; so are hooks, and which sub-modules and parameters there are.
Generators of random numbers and iterators in attributes cannot be put back.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.rerun.guard import are_ours, change, have_same, look_at
from hf_pyao.engine.rerun.module_state import ModuleState, fill, tensors_in, train


class HeldState:
    """What the modules of *state* hold when this is made."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._modules = state.modules()
        self._look = look = look_at(map(vars, self._modules))
        self._buffers = [{**each["_buffers"]} for each in look.attributes]
        parameters = tensors_in(each["_parameters"] for each in look.attributes)
        self.parameters: list[Parameter] = list(dict.fromkeys(parameters))
        """Those that there were, each once."""
        self._are_trained = [each.requires_grad for each in self.parameters]
        self.tensors: list[Tensor] = [*tensors_in(self._buffers), *look.tensors]
        """Buffers, and tensors that attributes hold."""

    def reason_not_undone(self) -> str:
        """Return why :meth:`undo` cannot bring all of it back, or an empty string."""
        if self._look.unsteady:
            return self.reason_unsteady()
        before = self._look._replace(tensors=[], versions=[])  # these are put back
        changed = change(before, look_at(before.attributes), self._state.names)
        return changed and f"it changes {changed}, which cannot be undone"

    def reason_unsteady(self) -> str:
        """Say why nothing may run again that holds this, whatever it does; or return nothing."""
        return self._look.reason_unsteady(self._state.names)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of one of :attr:`tensors`, for messages."""
        for name, attributes in zip(self._state.names(), self._look.attributes, strict=True):
            for key, each in (*attributes["_buffers"].items(), *attributes.items()):
                if each is tensor:
                    return repr(f"{name}.{key}".strip("."))
        return "a tensor that an attribute holds"

    def first_change(self) -> str:
        """Name what is not as it was, or return an empty string."""
        if not have_same(self._buffers, [module._buffers for module in self._modules]):
            return "a buffer"
        now = look_at(map(vars, self._modules))
        return change(self._look, now, self._state.names)

    def undo(self) -> None:
        """Put it back, but for what this package has put on modules since.

        What :meth:`reason_not_undone` tells of is left as it is.
        """
        train(self.parameters, self._are_trained)
        for module, attributes in zip(self._modules, self._look.attributes, strict=True):
            held = vars(module)
            for key in [key for key in held if key not in attributes]:
                if not are_ours(key, held[key]):
                    del held[key]
            for key, old in attributes.items():
                if not are_ours(key, old, held.get(key)):
                    held[key] = old
        fill([module._buffers for module in self._modules], self._buffers)
