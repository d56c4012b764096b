"""torch's ``activation_memory_budget`` for single compiled layers, changed between forwards.

torch's min-cut partitioner decides which values a compiled graph saves, and which it computes again
in backward. Its budget is the share of the default's bytes that may be saved: 1 is torch's default,
0 saves only the graph's inputs (``torch._functorch.config.activation_memory_budget``). torch reads
it when a graph is compiled. :class:`BudgetedBackend` therefore sets it around the backend that the
module was compiled with: each layer can have its own, and nothing changes for other compiled code
in the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_pyao.errors import ConflictError
from hf_pyao.levers import describe_budget
from hf_pyao.model.compiled.compiled_calls import (
    Backend,
    CompiledCall,
    compiled_calls,
    new_context,
)
from hf_pyao.model.map.found_layers import FoundLayers

Budget = str | float | tuple[float, ...]
"""``"off"``: torch's own setting holds; a share for all layers; or one share for each layer."""

OFF = "off"


class BudgetedBackend:
    """Compiles graphs by another backend, within a share of the memory for saved tensors.

    Two of the same are equal, so that equal layers share their compiled code.

    Args:
        inner: the backend.
        budget: from 0 to 1.
    """

    def __init__(self, inner: Backend, budget: float) -> None:
        self.inner = inner
        self.budget = budget
        self.compiler_name = getattr(inner, "compiler_name", type(inner).__name__)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile *graph*."""
        import torch._functorch.config as config

        with config.patch(activation_memory_budget=self.budget):
            return self.inner(graph, inputs, **options)

    def __eq__(self, other: object) -> bool:
        """Say whether *other* compiles alike."""
        if not isinstance(other, BudgetedBackend):
            return False
        return self.budget == other.budget and self.inner == other.inner

    def __hash__(self) -> int:
        """Hash by the budget: a backend need not have a hash."""
        return hash(self.budget)

    def reset(self) -> None:
        """Reset the backend, when torch drops all compiled code."""
        reset = getattr(self.inner, "reset", None)
        if reset is not None:
            reset()


def base_backend(backend: Backend | None) -> Backend | None:
    """Return the backend that was given to torch.compile, without a budget around it."""
    given = getattr(backend, "compiler_fn", backend)  # torch wraps what is given to it
    return given.inner if isinstance(given, BudgetedBackend) else backend


class MemoryBudgets:
    """Sets the budgets of a model's compiled layers.

    Args:
        model: as it was attached.
        found: its layers.
    """

    def __init__(self, model: nn.Module, found: FoundLayers) -> None:
        self._num_layers = len(found.layers)
        self._budget: Budget = OFF
        self._calls: list[tuple[CompiledCall, Backend, int | None]] = []
        """What is compiled, by what, and in which layer; None: the model as a whole."""
        numbers = {
            id(part): number
            for number, (_, layer) in enumerate(found.layers)
            for part in layer.modules()
        }
        for call in compiled_calls(model):
            if call.by.backend is not None:
                self._calls.append((call, call.by.backend, numbers.get(id(call.module))))

    def set_budgets(self, budget: Budget) -> None:
        """Have the layers compiled within *budget* from the next forward on.

        Raises:
            ConflictError: there is one number for each layer, and the model is compiled as a whole,
                or has another number of layers.
        """
        if budget == self._budget:
            return
        if isinstance(budget, tuple):
            self._check_per_layer(budget)
        contexts: list[tuple[BudgetedBackend, Mapping[str, Any], Any]] = []
        for call, backend, layer in self._calls:
            share = self._share_of(budget, layer)
            if share is None:
                call.put_back()
                continue
            compiles, options = BudgetedBackend(backend, share), call.by.options
            known = (each[2] for each in contexts if each[:2] == (compiles, options))
            context = next(known, None)
            if context is None:
                context = new_context(compiles, options)
                contexts.append((compiles, options, context))
            call.use(context)
        self._budget = budget

    def _share_of(self, budget: Budget, layer: int | None) -> float | None:
        if isinstance(budget, tuple):
            return None if layer is None else budget[layer]
        return None if isinstance(budget, str) else budget

    def _check_per_layer(self, budget: Sequence[float]) -> None:
        if len(budget) != self._num_layers:
            raise ConflictError(
                f"activation_memory_budget has {len(budget)} numbers, and the model has "
                f"{self._num_layers} layers. Give one number for each layer, or one for all.",
                key="memory-budget",
            )
        if any(layer is None for _, _, layer in self._calls):
            raise ConflictError(
                "activation_memory_budget has a number for each layer, and the model is compiled "
                "as a whole. Give one number for all, or compile its layers one by one "
                "(layer.compile()).",
                key="memory-budget",
            )

    def uninstall(self) -> None:
        """Compile by the backends alone again. Twice is fine."""
        self.set_budgets(OFF)

    def metrics(self) -> dict[str, float]:
        """Return how many compiled modules have a budget, for reports."""
        has_budget = self._budget != OFF
        return {
            "memory_budget_num_compiled": float(len(self._calls)),
            "memory_budget_num_modules": float(len(self._calls) if has_budget else 0),
        }

    def describe(self) -> str:
        """Return a sentence for the log."""
        if not self._calls:
            return "Memory budget: nothing of the model is compiled, so it has no effect."
        return (
            f"Memory budget of compiled code: {len(self._calls)} modules, "
            f"{'as torch has it' if self._budget == OFF else describe_budget(self._budget)}."
        )
