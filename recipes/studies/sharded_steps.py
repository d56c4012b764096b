"""Steps of one of several ranks, by FSDP2 and by ZeRO-3, on fake tensors; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.recording.gathers import Gathers, Unit, reused
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.training_engines import ZERO_3, local_part

NUM_RANKS = 8
ENGINES = FSDP2, ZERO3 = ("fsdp2", "zero3")
MOST_LIVE = 100_000_000
"""``stage3_max_reuse_distance``: a tenth of the default, so that weights are gathered again in
backward, as those of larger models are."""
NUM_BESIDE = 3
"""Reductions that ZeRO-3 lets run beside compute (``overlap_comm``)."""


def programs_of(engine: str, config: object, micro_batch: int, length: int) -> list[StepProgram]:
    """Return the recorded step of a rank; *engine*: :data:`FSDP2` or :data:`ZERO3`.

    ZeRO-3 recomputes nothing within a layer, so a step comes second whose layers run again.
    """
    training = FakeTraining(config=config, training_state="device")
    step = ShardedStep(training, micro_batch, length, engine)
    ways = [NO_LEVERS] if engine == FSDP2 else [NO_LEVERS, Levers(checkpoint_every=1)]
    return [record_fake_step(step, levers=levers)[0].whole() for levers in ways]


@dataclass
class ShardedStep:
    """A step of a rank.

    Under FSDP2 each layer is a unit, and the rest is one. ZeRO-3 has ``overlap_comm``, and the
    size of the bucket and the persistence threshold that transformers puts for ``"auto"``.
    """

    training: FakeTraining
    micro_batch: int
    length: int
    engine: str
    device: None = None

    @property
    def kernels(self) -> KernelSettings:
        """The device that the step is of."""
        return self.training.kernels

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model, and divide its parameters."""
        with self.training.model() as (model, fake_mode):
            for number, each in enumerate(model.parameters()):
                parameter: Any = each
                parameter.ds_tensor = each.new_empty(ceil(each.numel() / NUM_RANKS)).detach()
                if self.engine == ZERO3:
                    setattr(each, ZERO_3.parameter_attribute, number)
                    parameter.ds_persist = each.numel() < 10 * self.training.config.hidden_size
            self._gathers = Gathers([*self._units_of(model)])
            self._gathers.install()
            yield model, fake_mode

    def _units_of(self, model: nn.Module) -> Iterator[Unit]:
        if self.engine == ZERO3:
            users = [each for each in model.modules() if [*each.parameters(recurse=False)]]
            stay = reused(users, MOST_LIVE)
            for module in users:
                yield Unit(
                    modules=(module,),
                    parameters=tuple(module.parameters(recurse=False)),
                    num_ranks=NUM_RANKS,
                    stays=module in stay,
                    num_beside=NUM_BESIDE,
                )
            return
        rest = dict.fromkeys(model.parameters())
        for _, layer in find_layers(model).layers:
            own = tuple(layer.parameters())
            rest = {each: None for each in rest if all(each is not other for other in own)}
            yield self._unit(layer, own)
        yield self._unit(model, tuple(rest), stays=True)

    def _unit(
        self, module: nn.Module, own: tuple[nn.Parameter, ...], *, stays: bool = False
    ) -> Unit:
        return Unit(
            modules=(module,),
            parameters=own,
            num_ranks=NUM_RANKS,
            stays=stays,
            is_buffered=True,
            kept_dtype=own[0].dtype,
        )

    def let_gradients_go(self, model: nn.Module) -> None:
        """They are divided."""

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of this rank's optimizer states, and of what ZeRO-3 has throughout."""
        parts: list[Tensor] = [local_part(each) for each in model.parameters()]
        num_own = sum(each.numel() for each in parts)
        nbytes = self.training.optimizer_bytes * num_own
        if self.engine == ZERO3:
            num_own += self.training.config.hidden_size**2
            nbytes += num_own * parts[0].element_size()
        return nbytes

    def run(
        self, model: nn.Module, label: Callable[[Tensor, str], None], exchanged: Exchanged
    ) -> None:
        """Run forward, loss and backward, and reduce what is left."""
        self._gathers.tell(exchanged)
        self.training.run(model, self.micro_batch, self.length, label=label)
        self._gathers.end_micro_batch()
