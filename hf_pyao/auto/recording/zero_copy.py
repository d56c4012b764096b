"""The copy of a model that DeepSpeed trains with ZeRO: whole parameters, gathered as ZeRO-3 does.

Under ZeRO-3 the model's own parameters are empty between their uses, and a copy of them would run
nothing. So the copy has fake parameters of the whole shapes, which :mod:`zero_gathers` gathers and
lets go of by ZeRO-3's rules, with the thresholds of the model's own engine. What becomes of
gradients under ZeRO-1, 2 and 3 is in :mod:`zero_gradients`.

DeepSpeed has no way to ask a model for its engine: it is looked for among all objects. Its
settings are read from attributes of the engine's optimizer (``deepspeed/runtime/zero/stage3.py``,
``stage_1_and_2.py``). What of them is not followed is refused.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.recording.sharded_copy import CopyError
from hf_pyao.auto.recording.zero_gathers import Gathers, PartitionedParameter, Place, Thresholds
from hf_pyao.auto.recording.zero_gradients import (
    BucketedGradients,
    BucketSettings,
    Gradients,
    PartitionedGradients,
)
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import DEEPSPEED, ZERO_3

_BESIDE_3 = 3
"""Reductions that ZeRO-3 lets run beside compute: it waits for the third last
(``max_param_reduce_events`` of 2 in ``stage3.py``)."""


class ZeroCopy:
    """What ZeRO does with a model, and the same with its copy.

    Args:
        model: trained by DeepSpeed, or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_partitioned = any(map(ZERO_3.has, model.parameters()))
        engine = zero_engine_of(model)
        self._optimizer = None if engine is None else engine.optimizer
        # On a CPU all is queued from the one thread that computes.
        self._overlaps = (
            engine is not None and bool(engine.zero_overlap_comm()) and self.device.type != "cpu"
        )
        self._memo: dict[int, Any] = {}
        self._partitioned: dict[int, PartitionedParameter] = {}
        """By id of a parameter of the copy."""
        self._gathers: Gathers | None = None
        self._gradients: Gradients | None = None
        self._buffers: list[Tensor] = []
        """What the engine has on the device throughout, beside parameters."""

    def __bool__(self) -> bool:
        """Return True if ZeRO trains the model, in whatever stage."""
        return self._is_partitioned or self._optimizer is not None

    @property
    def device(self) -> torch.device:
        """Where the model computes, wherever its parts are."""
        found: torch.device = next(self._model.parameters()).device
        return found

    @property
    def runs_all_layers(self) -> bool:
        """True where layers that stand for others would not do.

        Thresholds may span many layers, and so does this rank's part of the gradients.
        """
        return bool(self) and (self._is_partitioned or not self._is_offloaded)

    @property
    def _is_offloaded(self) -> bool:
        optimizer = self._optimizer
        names = ("offload_optimizer", "cpu_offload")
        return any(bool(getattr(optimizer, name, False)) for name in names)

    # ---- the copy ------------------------------------------------------------------------------

    def make_whole(self, memo: dict[int, Any], fake_mode: FakeTensorMode) -> None:
        """Put whole copies of partitioned parameters into *memo*, where ``deepcopy`` looks.

        Raises:
            CopyError: the model is partitioned in a way that is not followed.
        """
        self._memo = memo
        if not self._is_partitioned:
            return
        if self._optimizer is None:
            _refuse("DeepSpeed's engine was not found, whose settings say what ZeRO-3 gathers")
        device = self.device
        registry = getattr(self._model, "ds_inflight_param_registry", None)
        if registry is not None:  # handles of collectives
            memo[id(registry)] = {}
        for parameter in filter(ZERO_3.has, self._model.parameters()):
            _check(parameter)
            part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            shape: Any = parameter.ds_shape  # type: ignore[attr-defined]
            with fake_mode:
                whole = nn.Parameter(
                    torch.empty(shape, dtype=parameter.dtype, device=device),
                    requires_grad=parameter.requires_grad,
                )
                own = torch.empty(part.shape, dtype=part.dtype, device=part.device)
            number = getattr(parameter, ZERO_3.parameter_attribute)
            setattr(whole, ZERO_3.parameter_attribute, number)
            whole.ds_tensor = own  # type: ignore[attr-defined]
            whole.ds_persist = parameter.ds_persist  # type: ignore[attr-defined]
            # DeepSpeed's own linear layers ask whether a weight is there; they may not gather it.
            whole.ds_status = Place.WHOLE  # type: ignore[attr-defined]
            memo[id(parameter)] = whole
            self._partitioned[id(whole)] = PartitionedParameter(
                whole,
                shape,
                own,
                number,
                bool(parameter.ds_persist),  # type: ignore[attr-defined]
                bool(parameter.is_external_param),  # type: ignore[attr-defined]
            )

    def install(self, copy: nn.Module) -> None:
        """Have parameters of *copy* gathered, and its gradients reduced; under the fake mode.

        Raises:
            CopyError: the engine reduces in a way that is not followed.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        if self._is_partitioned:
            self._install_gathers(copy, optimizer)
        self._gradients = self._make_gradients(copy, optimizer)
        if self._gradients is not None:
            self._gradients.install()

    def before(self, run: Callable[[], None], exchanged: Exchanged) -> list[Tensor]:
        """Run a micro-batch of the copy, of whose order ZeRO-3 makes use in the next one.

        Args:
            run: runs it.
            exchanged: is told of the collectives that follow.

        Returns:
            What is there since then, and may go.
        """
        if self._gathers is not None:
            run()
            self._gathers.tell(exchanged, runs_ahead=self._overlaps)
        if self._gradients is not None:
            self._gradients.tell(exchanged)
        if self._gathers is None:
            return []
        known = self._partitioned.values()
        self._gathers.gather_persistent(known)
        left = [each.parameter for each in known if each.parameter.numel() and not each.persists]
        return [each.data for each in left]

    def end_micro_batch(self) -> None:
        """Do what ZeRO does when backward has ended."""
        if self._gradients is not None:
            self._gradients.end_micro_batch()
        if self._gathers is not None:
            self._gathers.end_micro_batch()

    def buffer_bytes(self) -> int:
        """Return the bytes on the device of buffers that are there throughout."""
        return sum(each.nbytes for each in self._buffers)

    def _install_gathers(self, copy: nn.Module, optimizer: Any) -> None:
        offload = getattr(optimizer, "parameter_offload", optimizer)
        if getattr(offload, "fast_sharding_for_leaf_module", False):
            _refuse("stage3_module_granularity_threshold is set")
        thresholds = Thresholds(
            offload._prefetch_bucket_sz,
            offload._max_available_parameters_in_numel,
            offload._max_reuse_distance_in_numel,
        )
        self._gathers = Gathers(
            copy, self._parameters_of, thresholds, _num_ranks(self._model), _is_leaf, _refuse
        )
        for each in self._partitioned.values():
            each.let_go()
        self._gathers.gather_persistent(self._partitioned.values())
        self._gathers.install()

    def _parameters_of(self, module: nn.Module) -> Iterable[PartitionedParameter]:
        """Yield what *module*, of the copy, gathers: its own parameters, and others it was seen to
        use."""
        own = list(module.parameters(recurse=_is_leaf(module)))
        own += getattr(module, "_external_params", {}).values()
        for each in own:
            found = self._partitioned.get(id(each))
            if found is not None:
                yield found

    def _make_gradients(self, copy: nn.Module, optimizer: Any) -> Gradients | None:
        if not hasattr(optimizer, "reduce_bucket_size"):
            return None  # parameters alone are partitioned
        trained = list(copy.parameters())
        settings = _bucket_settings(
            optimizer,
            self._is_offloaded,
            _num_ranks(self._model),
            (_BESIDE_3 if self._is_partitioned else 1) if self._overlaps else 0,
        )
        if self._is_partitioned:
            bucket = next(iter(optimizer.ipg_buckets.values())).buffer
            buffer = None if bucket is None else bucket.new_empty(bucket.shape)
            self._buffers = [] if buffer is None else [buffer]
            parts = optimizer.grad_partitions_flat_buffer
            if parts is not None and not self._is_offloaded:
                self._buffers.append(parts.new_empty(parts.shape))
            return PartitionedGradients(trained, settings, buffer)
        owners = self._owners(optimizer)
        stage_1 = not optimizer.partition_gradients
        accumulates = getattr(optimizer, "gradient_accumulation_steps", 1) > 1
        if accumulates and not settings.is_offloaded and not stage_1:
            # The sum of the micro-batches before, of this rank's part.
            rank = torch.distributed.get_group_rank(optimizer.dp_process_group, process_rank().rank)
            mine = [each for each in trained if rank in owners.get(id(each), ())]
            self._buffers = [torch.empty_like(each) for each in mine]
        by_id = {id(each): each for each in trained}
        return BucketedGradients(
            [by_id[each] for each in owners if each in by_id],
            settings,
            owners,
            at_end=stage_1 and not settings.overlaps,
        )

    def _owners(self, optimizer: Any) -> dict[int, frozenset[int]]:
        """Return by id of a parameter of the copy the ranks that keep parts of its gradient."""
        found = {}
        for number, group in enumerate(optimizer.bit16_groups):
            ranks = optimizer.param_to_partition_ids[number]
            for parameter in group:
                whole = self._memo.get(id(parameter))
                if whole is not None:
                    found[id(whole)] = frozenset(ranks[optimizer.get_param_id(parameter)])
        return found


def zero_engine_of(model: nn.Module) -> Any:
    """Return the ``DeepSpeedEngine`` around *model*; None if there is none, or ZeRO is off.

    Slow where there is one: it looks at all objects.
    """
    if "deepspeed" not in sys.modules:
        return None
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and DEEPSPEED.wraps(each):
            if any(module is model for module in each.modules()):
                return each if each.zero_optimization_stage() else None
    return None


def _refuse(why: str) -> NoReturn:
    """Raise the error that says why the copy cannot be run.

    Raises:
        CopyError: always.
    """
    raise CopyError(f"it is trained by DeepSpeed, and {why.rstrip('.')}.")


def _check(parameter: Any) -> None:
    """Check that *parameter* is gathered as :mod:`zero_gathers` has it.

    Raises:
        CopyError: it is not; says why.
    """
    part = parameter.ds_tensor
    if getattr(parameter, "nvme_swapper", None) is not None:
        _refuse("its parameters are on NVMe")
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        _refuse(
            "its parameters are partitioned a second time within a node (zero_hpz_partition_size)"
        )
    if hasattr(part, "ds_quant_scale") or part.dtype != parameter.dtype:
        _refuse("its parameters are gathered in another type than they have")


def _is_leaf(module: nn.Module) -> bool:
    return bool(getattr(module, "_z3_leaf", False))


def _num_ranks(model: nn.Module) -> int:
    for parameter in model.parameters():
        if ZERO_3.has(parameter):
            return int(parameter.ds_zero_partition_world_size)  # type: ignore[attr-defined]
    return process_rank().num_ranks


def _bucket_settings(
    optimizer: Any, is_offloaded: bool, num_ranks: int, num_beside: int
) -> BucketSettings:
    """Return how *optimizer* reduces.

    Raises:
        CopyError: it reduces in several types, or in a way that is not followed.
    """
    if getattr(optimizer, "zenflow", False):
        _refuse("ZenFlow selects gradients by value")
    dtypes = list(optimizer.ipg_buckets)
    if len(dtypes) != 1:
        _refuse("its gradients are reduced in several types")
    accumulated = getattr(optimizer, "gradient_accumulation_dtype", optimizer.dtype)
    if accumulated != optimizer.dtype:
        _refuse(f"its gradients are accumulated in {accumulated}, and are {optimizer.dtype}")
    scatters = bool(optimizer.reduce_scatter)
    return BucketSettings(
        num_elements=int(optimizer.reduce_bucket_size),
        sent_dtype=dtypes[0],
        is_contiguous=bool(optimizer.contiguous_gradients),
        scatters=scatters,
        overlaps=bool(getattr(optimizer, "overlap_comm", False)),
        is_offloaded=is_offloaded,
        num_ranks=num_ranks,
        sums_all=not scatters or bool(getattr(optimizer, "use_multi_rank_bucket_allreduce", True)),
        num_beside=num_beside,
    )
