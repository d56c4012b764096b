"""Steps of one of several ranks, by FSDP2 and by ZeRO-3, on fake tensors; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.auto.recording.zero_gathers import Gathers, PartitionedParameter, Thresholds
from hf_pyao.auto.recording.zero_gradients import BucketSettings, PartitionedGradients
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step
from hf_pyao.training_engines import ZERO_3, local_part

NUM_RANKS = 8
ENGINES = FSDP2, ZERO3 = ("fsdp2", "zero3")
MOST_LIVE = 100_000_000
"""``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``: a tenth of the defaults, so
that weights are gathered again in backward, as those of larger models are."""
NUM_BESIDE = 3
"""Reductions that ZeRO-3 lets run beside compute (``overlap_comm``)."""


def programs_of(engine: str, config: object, micro_batch: int, length: int) -> list[StepProgram]:
    """Return the recorded step of a rank; *engine*: :data:`FSDP2` or :data:`ZERO3`.

    ZeRO-3 recomputes nothing within a layer, so a step comes second whose layers run again.
    """
    if engine == FSDP2:
        sharded = ShardedTraining(config=config, training_state="device")
        with ranks():
            return [record_step(sharded, micro_batch, length)]
    training = FakeTraining(config=config, training_state="device")
    return [
        record_fake_step(ZeroStep(training, micro_batch, length), levers=levers)[0].whole()
        for levers in (NO_LEVERS, Levers(checkpoint_every=1))
    ]


@contextmanager
def ranks() -> Iterator[None]:
    """Be the first of eight ranks, of which there are no others: nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class ShardedTraining(FakeTraining):
    """A rank of FSDP2's: each layer is a unit, and the rest is one; states of AdamW are divided."""

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model, and shard it over ranks that are not there."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with super().model() as (model, fake_mode):
            with unset_fake_temporarily():
                mesh = init_device_mesh("cpu", (NUM_RANKS,))
            for _, layer in find_layers(model).layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            yield model, fake_mode

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of this rank's part of the optimizer's states."""
        return self.optimizer_bytes * sum(local_part(p).numel() for p in model.parameters())


@dataclass
class ZeroStep:
    """A step of a rank of ZeRO-3's, with ``overlap_comm``.

    Sizes of buckets and the persistence threshold are those that transformers puts for ``"auto"``.
    """

    training: FakeTraining
    micro_batch: int
    length: int
    device: None = None
    runs_all_layers: bool = True
    """Thresholds span many layers."""
    _parts: dict[int, PartitionedParameter] = field(default_factory=dict)
    """By id of the parameter."""
    _buffers: list[Tensor] = field(default_factory=list)
    """The bucket, and this rank's part of all gradients."""

    @property
    def kernels(self) -> KernelSettings:
        """The device that the step is of."""
        return self.training.kernels

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model, and partition its parameters."""
        hidden_size = self.training.config.hidden_size
        bucket_elements = hidden_size**2
        thresholds = Thresholds(int(0.9 * bucket_elements), MOST_LIVE, MOST_LIVE)
        with self.training.model() as (model, fake_mode):
            for number, parameter in enumerate(model.parameters()):
                own = parameter.new_empty(ceil(parameter.numel() / NUM_RANKS)).detach()
                setattr(parameter, ZERO_3.parameter_attribute, number)
                parameter.ds_tensor = own  # type: ignore[attr-defined]
                self._parts[id(parameter)] = PartitionedParameter(
                    parameter,
                    parameter.shape,
                    own,
                    number,
                    persists=parameter.numel() < 10 * hidden_size,
                    is_external=False,
                )
            self._gathers = Gathers(
                model, self._parts_of, thresholds, NUM_RANKS, lambda module: False, _refuse
            )
            known = self._parts.values()
            for each in known:
                each.let_go()
            self._gathers.gather_persistent(known)
            self._gathers.install()
            dtype = next(iter(known)).part.dtype
            settings = BucketSettings(
                num_elements=bucket_elements,
                sent_dtype=dtype,
                is_contiguous=True,
                scatters=True,
                overlaps=True,
                is_offloaded=False,
                num_ranks=NUM_RANKS,
                num_beside=NUM_BESIDE,
            )
            bucket = torch.empty(bucket_elements, dtype=dtype)
            self._buffers = [bucket, *(torch.empty_like(each.part) for each in known)]
            self._gradients = PartitionedGradients([*model.parameters()], settings, bucket)
            self._gradients.install()
            yield model, fake_mode

    def _parts_of(self, module: nn.Module) -> list[PartitionedParameter]:
        return [self._parts[id(each)] for each in module.parameters(recurse=False)]

    def let_gradients_go(self, model: nn.Module) -> None:
        """They are partitioned."""

    def before(self, model: nn.Module, exchanged: Exchanged) -> Sequence[Tensor]:
        """Run a micro-batch, from which ZeRO-3 learns the order of modules."""
        self.run(model, lambda tensor, name: None)
        self._gathers.tell(exchanged, runs_ahead=True)
        self._gradients.tell(exchanged)
        known = self._parts.values()
        return [
            each.parameter.data for each in known if each.parameter.numel() and not each.persists
        ]

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of this rank's optimizer states, of the bucket and of its gradients."""
        num_own = sum(each.part.numel() for each in self._parts.values())
        return self.training.optimizer_bytes * num_own + sum(each.nbytes for each in self._buffers)

    def run(self, model: nn.Module, label: Callable[[Tensor, str], None]) -> None:
        """Run forward, loss and backward, and reduce what is left."""
        self.training.run(model, self.micro_batch, self.length, label=label)
        self._gradients.end_micro_batch()
        self._gathers.end_micro_batch()


def _refuse(why: str) -> None:
    raise AssertionError(why)
