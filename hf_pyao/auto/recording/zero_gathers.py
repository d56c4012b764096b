"""When DeepSpeed's ZeRO-3 gathers parameters and lets go of them, on a copy of a model.

ZeRO-3 gathers the parameters that a module has itself before its forward and before its backward,
and lets go of them after each. Once it has seen a micro-batch it also gathers what comes next, as
far as its thresholds allow, and keeps what is needed again soon. :class:`Gathers` follows the same
rules with fake tensors: no process group takes part, and nothing is sent.

Source: deepspeedai/DeepSpeed, ``deepspeed/runtime/zero/partitioned_param_coordinator.py``
(``PartitionedParameterCoordinator``: ``fetch_sub_module``, ``release_sub_module``,
``__params_to_release``, ``reset_step``), ``parameter_offload.py`` (the hooks on modules) and
``partition_parameters.py`` (``all_gather_coalesced``, ``AllGatherCoalescedHandle``), 0.19.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import Collective


class Place(Enum):
    """Where a parameter is."""

    PARTITIONED = "each rank has its part"
    UNDER_WAY = "it is being gathered"
    WHOLE = "all of it is on the device"


@dataclass(eq=False)
class PartitionedParameter:
    """A parameter of the copy."""

    parameter: nn.Parameter
    """Without elements while it is partitioned."""
    shape: torch.Size
    """When it is whole."""
    part: Tensor
    """What this rank has of it throughout."""
    number: int
    """DeepSpeed's ``ds_id``, by which parameters of one all-gather are ordered."""
    persists: bool
    """Whether it stays whole, being smaller than the persistence threshold."""
    is_external: bool
    """Whether modules return it, so that it is never let go of in forward or backward."""
    place: Place = Place.WHOLE
    users: set[nn.Module] = field(default_factory=set)
    """Modules that compute with it now."""

    @property
    def num_elements(self) -> int:
        """Elements when it is whole."""
        return self.shape.numel()

    def let_go(self) -> None:
        """Free what was gathered, unless a view of it is held elsewhere."""
        parameter = self.parameter
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.place = Place.PARTITIONED


class Thresholds(NamedTuple):
    """Settings of ZeRO-3, in elements."""

    prefetched: int
    """``stage3_prefetch_bucket_size``."""
    most_live: int
    """``stage3_max_live_parameters``."""
    reused_within: int
    """``stage3_max_reuse_distance``."""


class _Gather:
    """One all-gather that was begun."""

    def __init__(
        self,
        parameters: Sequence[PartitionedParameter],
        num_ranks: int,
        told: Callable[[Tensor], None],
    ) -> None:
        self._parameters = parameters
        self._is_done = False
        first = parameters[0]
        device = first.parameter.device
        # Where parts are on the host, copies of them go into the collective.
        self._sent = [each.part.to(device) for each in parameters]
        if len(parameters) == 1:
            num_elements = ceil(first.num_elements / num_ranks) * num_ranks
            whole = first.part.new_empty(num_elements, device=device)
            first.parameter.data = whole[: first.num_elements].view(first.shape)
            self._flat = None
            told(whole)
        else:
            num_elements = num_ranks * sum(each.part.numel() for each in parameters)
            self._flat = first.part.new_empty(num_elements, device=device)
            told(self._flat)
        for each in parameters:
            each.place = Place.UNDER_WAY

    def wait(self) -> None:
        """Give each parameter its data; the buffer lives on until all were asked for."""
        if self._is_done:
            return
        self._sent = []
        for each in self._parameters:
            if self._flat is not None:
                each.parameter.data = self._flat.new_empty(each.shape)
            each.place = Place.WHOLE
        self._is_done = True


class _Use(NamedTuple):
    parameter: PartitionedParameter
    step: int


class Gathers:
    """Gathers parameters of a copy as ZeRO-3 does those of the model.

    Args:
        root: the copy. Its modules have hooks from :meth:`install` on.
        parameters_of: returns the parameters that a module gathers for itself.
        thresholds: of the model's engine.
        num_ranks: among which parameters are partitioned.
        is_leaf: says whether a module gathers for all modules inside of it.
        refuse: raises an error that says why the copy cannot be run.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters_of: Callable[[nn.Module], Iterable[PartitionedParameter]],
        thresholds: Thresholds,
        num_ranks: int,
        is_leaf: Callable[[nn.Module], bool],
        refuse: Callable[[str], None],
    ) -> None:
        self._root = root
        self._all_of = parameters_of
        self._thresholds = thresholds
        self._num_ranks = num_ranks
        self._is_leaf = is_leaf
        self._refuse = refuse
        self._exchanged: Exchanged | None = None
        self._runs_ahead = False
        self._modules: list[nn.Module] = []
        """In the order in which a micro-batch came to them, forward and backward."""
        self._is_known = False
        """True once :attr:`_modules` is a whole micro-batch."""
        self._queue: deque[_Use] = deque()
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._num_live = 0
        self._fetched_for: dict[PartitionedParameter, int] = defaultdict(lambda: -(10**10))
        self._under_way: dict[PartitionedParameter, _Gather] = {}
        self._in_backward: dict[nn.Module, None] = {}
        self._run_again: dict[nn.Module, set[PartitionedParameter]] = defaultdict(set)

    def tell(self, exchanged: Exchanged, *, runs_ahead: bool) -> None:
        """Tell of each all-gather from now on.

        Args:
            exchanged: is told.
            runs_ahead: whether all-gathers are on a stream of their own (``overlap_comm``).
        """
        self._exchanged, self._runs_ahead = exchanged, runs_ahead

    def _tell(self, whole: Tensor) -> None:
        if self._exchanged is not None:
            nbytes = whole.nbytes - whole.nbytes // self._num_ranks
            self._exchanged(Collective(nbytes, is_gather=self._runs_ahead), whole)

    def begin_micro_batch(self) -> None:
        """Take the last micro-batch for the order of the next one; before the root's forward."""
        for parameter, gather in self._under_way.items():
            gather.wait()
            self._let_go(parameter)
        self._begin()
        if self._modules:
            self._is_known = True
        uses = [
            _Use(each, step)
            for step, module in enumerate(self._modules)
            for each in self.parameters_of(module)
        ]
        self._queue = deque(uses)

    def end_micro_batch(self) -> None:
        """Let go of what modules without a gradient of their input hold; after backward."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            for each in {*self.parameters_of(module), *self._run_again.pop(module, ())}:
                each.users.discard(module)
                if not each.persists and not each.is_external:
                    self._let_go(each)

    def parameters_of(self, module: nn.Module) -> list[PartitionedParameter]:
        """Return the parameters that *module* gathers, by number."""
        return sorted(set(self._all_of(module)), key=lambda each: each.number)

    def gather_persistent(self, parameters: Iterable[PartitionedParameter]) -> None:
        """Gather what persists and was let go of, as ZeRO-3 does after an optimizer step."""
        for each in parameters:
            if each.persists and each.place is Place.PARTITIONED:
                each.parameter.data = each.part.new_empty(each.shape, device=each.parameter.device)
                each.place = Place.WHOLE

    # ---- before and after a module -------------------------------------------------------------

    @torch.no_grad()
    def enter(self, module: nn.Module, *, is_forward: bool) -> None:
        """Gather what *module* needs, and what comes next."""
        if not self._is_known:
            self._modules.append(module)
        elif self._step >= len(self._modules) or self._modules[self._step] is not module:
            self._refuse("ZeRO-3 gathers in another order from one micro-batch to the next.")
        if not is_forward:
            self._in_backward[module] = None
        needed = self.parameters_of(module)
        self._gather([each for each in needed if each.place is Place.PARTITIONED])
        runs_again = is_forward and torch._C._current_graph_task_id() != -1
        for each in needed:
            each.users.add(module)
            if runs_again and self._in_backward and not each.parameter.requires_grad:
                owner = next(reversed(self._in_backward))
                self._run_again[owner].add(each)
                each.users.add(owner)
            gather = self._under_way.pop(each, None)
            if gather is not None:
                gather.wait()
        if self._is_known:
            self._gather_ahead(needed)
        self._step += 1

    def _gather_ahead(self, needed: Sequence[PartitionedParameter]) -> None:
        new = {each for each in needed if self._fetched_for[each] < self._step}
        passed: set[PartitionedParameter] = set()
        while self._queue and len(passed) < len(new):
            use = self._queue.popleft()
            self._fetched_for[use.parameter] = use.step
            passed.add(use.parameter)
        limits = self._thresholds
        if limits.prefetched <= 0:
            return
        most = min(limits.most_live - self._num_live, limits.prefetched)
        ahead: dict[PartitionedParameter, None] = {}
        num_elements = 0
        while self._queue and num_elements < most:
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for[parameter], step)
            if parameter.place is Place.PARTITIONED and parameter not in ahead:
                ahead[parameter] = None
                num_elements += parameter.num_elements
        self._gather(list(ahead))

    def _gather(self, parameters: Sequence[PartitionedParameter]) -> None:
        if not parameters:
            return
        ordered = sorted(parameters, key=lambda each: each.number)
        self._num_live += sum(each.num_elements for each in ordered)
        gather = _Gather(ordered, self._num_ranks, self._tell)
        self._under_way |= dict.fromkeys(ordered, gather)

    @torch.no_grad()
    def leave(self, module: nn.Module, *, is_forward: bool) -> None:
        """Let go of what *module* has gathered, but for what is needed again soon."""
        own = set(self.parameters_of(module))
        going = self._not_needed_soon(module) if self._is_known else set(own)
        if not is_forward:
            again = self._run_again.pop(module, set())
            going |= {each for each in again if not each.persists}
            own |= again
            self._in_backward.pop(module, None)
        for each in own:
            each.users.discard(module)
            if each in going and not each.is_external:
                self._let_go(each)

    def _not_needed_soon(self, module: nn.Module) -> set[PartitionedParameter]:
        own = self.parameters_of(module)
        going = {
            each for each in own if not each.persists and self._fetched_for[each] <= self._step
        }
        num_elements = 0
        for later in self._modules[self._step :]:
            if num_elements >= self._thresholds.reused_within:
                break
            for each in self.parameters_of(later):
                going.discard(each)
                num_elements += each.num_elements
        return going

    def _let_go(self, parameter: PartitionedParameter) -> None:
        if parameter.place is Place.WHOLE and not parameter.users:
            parameter.let_go()
            self._num_live -= parameter.num_elements

    # ---- hooks ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Put hooks on the copy's modules; they stay as long as the copy."""
        self._root.register_forward_pre_hook(lambda *_: self.begin_micro_batch())
        self._install_in(self._root)

    def _install_in(self, module: nn.Module) -> None:
        if not self._is_leaf(module):
            for child in module.children():
                self._install_in(child)
        counts = _Counts()

        class BeforeBackward(torch.autograd.Function):
            """Gathers before the backward of a module: behind what it returns."""

            @staticmethod
            def forward(ctx: Any, output: Tensor) -> Tensor:
                counts.num_outputs += 1
                return output.detach()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                if counts.num_outputs > 0:
                    gathers.enter(module, is_forward=False)
                    counts.num_outputs -= 1
                return gradients

        class AfterBackward(torch.autograd.Function):
            """Lets go after the backward of a module: before what it is called with."""

            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                counts.num_inputs += value.requires_grad
                return value.detach()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                counts.num_inputs -= 1
                if counts.num_inputs == 0:
                    gathers.leave(module, is_forward=False)
                return gradients

        gathers = self

        def before(module: nn.Module, args: Any) -> Any:
            gathers.enter(module, is_forward=True)
            counts.num_inputs = 0
            return _each_tensor(AfterBackward.apply, args)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            gathers.leave(module, is_forward=True)
            return _each_tensor(BeforeBackward.apply, output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


class _Counts:
    """Tensors of a module whose gradients are to come."""

    def __init__(self) -> None:
        self.num_inputs = 0
        self.num_outputs = 0


def _each_tensor(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply *function* to the tensors in tuples, lists and dictionaries, as DeepSpeed does."""
    if isinstance(value, tuple | list):
        items = [_each_tensor(function, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key in value:
            value[key] = _each_tensor(function, value[key])
        return value
    return function(value) if isinstance(value, Tensor) else value
