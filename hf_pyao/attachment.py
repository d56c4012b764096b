"""``attach()``: the only place where the parts are wired together."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable

import torch
from torch import nn

from hf_pyao.auto.deciding import Deciding
from hf_pyao.auto.install.conflicts import check_model, check_other_checkpointing
from hf_pyao.auto.install.links import device_of, link_for
from hf_pyao.auto.install.run_record import RunRecord
from hf_pyao.auto.install.weights import StreamedLayers, streaming_of
from hf_pyao.auto.install.wiring import make_lifecycle
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.parts import Parts, parts_of
from hf_pyao.auto.retry.failure_message import explain_uncaught
from hf_pyao.auto.retry.out_of_memory import MicroBatchRunner
from hf_pyao.auto.retry.second_run_guard import SecondRunGuard
from hf_pyao.config import SWITCHED_OFF, PyAOConfig, is_switched_off
from hf_pyao.engine.recompute.dispatch_modes import stop_left_behind
from hf_pyao.engine.recompute.verification import REBUILT, SEGMENT, SecondRunCheck, SecondRuns
from hf_pyao.engine.runtime.backward_order import BackwardOrder
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.stores import Store
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import pop_left_behind
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.levers import Levers
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.options.plan_levers import levers_of_plan
from hf_pyao.plan.policies.by_name import given_plan

logger = logging.getLogger(__name__)


def attach(
    model: nn.Module,
    config: PyAOConfig | None = None,
    *,
    transport: Transport | None = None,
    host_pool: Store | None = None,
    link: LinkContext | None = None,
    backward_order: BackwardOrder | None = None,
    device: torch.device | str | None = None,
) -> Offloader:
    """Offload what *model*'s decoder layers save for backward, from its next forward on.

    The model may be wrapped (DDP, FSDP, DeepSpeed, PEFT, ``torch.compile``). Attaching again with
    an equal configuration returns the same offloader.

    Args:
        model: a causal LM, a sequence-to-sequence model, or one registered with
            :func:`~hf_pyao.register_module_map`.
        config: what to offload and how; the defaults if None.
        transport: how bytes move; None picks by device.
        host_pool: where bytes go that leave the device: host memory to share with another
            model's offloader (its ``host_pool``), or another :class:`~hf_pyao.engine.stores.Store`.
        link: transport, host memory and window to share with another model's offloader (its
            ``link``); each reports its own figures. In place of *transport* and *host_pool*.
        backward_order: in which order the forwards that wait have their backward, where that is not
            the newest first; :class:`~hf_pyao.engine.runtime.backward_order.OldestFirst` for
            pipelines.
        device: where compute runs, for ``stream_weights``: what is not streamed is moved there, and
            the streamed weights stay on the host. None: where the model is. Load the model on the
            CPU, and give the accelerator here. Without ``stream_weights`` it has no effect.

    Returns:
        The offloader, usable as a context manager that detaches at its end. With ``PYAO=off`` in
        the environment it is attached to nothing, so that a script runs as if without it.

    Raises:
        ConfigError: a role or module name in *config* is unknown to this model, or no report can
            be written to the path that it gives.
        ConflictError: something else moves or recomputes the same tensors, or the model is attached
            with another configuration.
        NoLayersFoundError: no layers were found.
    """
    config = _checked(model, config)
    is_off = is_switched_off()
    if is_off:
        if device is not None and config.stream_weights != "off":
            model.to(device)
        config = PyAOConfig(policy="off")
    parts = parts_of(config)
    found = find_layers(model, parts.layers.names, field=parts.layers.label)
    pop_left_behind()
    stop_left_behind()
    if not is_off:
        check_model(model)
    plan = given_plan(parts.policy)
    levers = parts.levers.levers if plan is None else levers_of_plan(plan, parts.levers)
    if levers.checkpoint_every:
        check_other_checkpointing(model, levers.checkpoint_every)
    attached = _attached_already(model, config, found)
    if attached is not None:
        return attached
    place = device_of(model)
    if device is not None and parts.streaming.value != "off":
        place = torch.empty(0, device=device).device  # with its index
    link = link_for(place, transport, host_pool, link, parts.link)
    limit = None
    if parts.streaming.need_limit:
        limit = parts.auto.device_limit(place)
    streaming = streaming_of(model, found, parts.streaming.as_planned(plan), link, place, limit)
    offloader = _wire(model, found, config, parts, plan, levers, link, backward_order, streaming)
    try:
        logger.info("%s", SWITCHED_OFF if is_off else offloader.describe())
        if offloader.record.keeps_all_layers and len(offloader.layer_names) > 1:
            offloader.engine.idle_warnings.all_layers_kept(
                f"{config.label('keep_last_layers')}={parts.fixed.keep_last_layers}",
                len(offloader.layer_names),
            )
        return offloader
    except BaseException:
        offloader.detach()
        raise


def offloader_of(model: nn.Module) -> Offloader | None:
    """Return the offloader that *model*, or a part of it, is attached to, if there is one."""
    for module in model.modules():
        hooks: Iterable[object] = module._forward_pre_hooks.values()
        for hook in hooks:
            if isinstance(hook, ModelHook):
                owner: Offloader | None = hook.lifecycle.owner
                return owner
    return None


def _checked(model: object, config: object) -> PyAOConfig:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {model!r}; expected a torch.nn.Module.", key="wrong-argument")
    config = config or PyAOConfig()
    if not isinstance(config, PyAOConfig):
        raise ConfigError(
            f"config is {config!r}; expected a PyAOConfig or None.", key="wrong-argument"
        )
    return config


def _attached_already(model: nn.Module, config: PyAOConfig, found: FoundLayers) -> Offloader | None:
    """Return the offloader that *model* has with the same configuration; None if it has none.

    Raises:
        ConflictError: it has one with another configuration, or with other layers.
    """
    attached = offloader_of(model)
    if attached is None:
        return None
    if not attached.is_attached:
        attached.detach()  # it was interrupted as it was made, or as it was detached
        return None
    if attached.config == config and attached.is_of(found):
        return attached
    raise ConflictError(
        "the model, or a part of it, is attached already, with another configuration or other "
        "layers. Detach it first (offloader.detach()), or pass the same model and "
        "configuration.",
        key="attached-already",
    )


def _wire(
    model: nn.Module,
    found: FoundLayers,
    config: PyAOConfig,
    parts: Parts,
    plan: Plan | None,
    levers: Levers,
    link: LinkContext,
    backward_order: BackwardOrder | None,
    streaming: StreamedLayers | None,
) -> Offloader:
    """Make the parts of an attachment, connect them, and install them on *model*.

    All that may refuse is made before anything is installed: a failed attach leaves the model as
    it was.
    """
    device = device_of(model) if streaming is None else streaming.device
    check = SecondRunCheck(parts.verify_recompute)
    deciding = Deciding(
        model,
        found,
        parts,
        plan,
        levers,
        link,
        device,
        backward_order,
        second_runs=SecondRuns(check, REBUILT),
        streaming=streaming,
    )
    engine, switch = deciding.engine, deciding.switch
    record = RunRecord(
        config,
        engine,
        link.transport,
        device,
        layer_names=tuple(fqn for fqn, _ in found.layers),
        how_found=found.how,
        auto_summary=weakly(deciding.summary, ""),  # a record outlives its offloader
        levers=lambda: switch.levers,
        run_once=lambda: switch.run_once,
    )
    guard = SecondRunGuard(model, check, deciding.without_second_runs)

    def before_forward() -> None:
        guard.before_forward()
        if streaming is not None:
            streaming.rearrange()

    lifecycle = make_lifecycle(
        engine,
        found,
        levers,
        segments_may_come="checkpoint_every" in deciding.may_come,
        second_runs=SecondRuns(check, SEGMENT),
        before_forward=before_forward,
    )

    def note_tightened(sentence: str) -> None:
        deciding.made_room()
        record.note_tightened(sentence)

    measured_memory = weakly(deciding.measured_memory, "")
    remedies = dataclasses.replace(parts.remedies, measured_memory=measured_memory)
    micro_batches = MicroBatchRunner(
        model, lifecycle, remedies, device, deciding.tightening, note_tightened, guard
    )
    explain = functools.partial(explain_uncaught, engine=engine, device=device, remedies=remedies)
    offloader = Offloader(
        model, found, config, deciding, record, micro_batches, guard, explain=explain
    )
    offloader.install(model, found, lifecycle, levers, check, streaming)
    return offloader
