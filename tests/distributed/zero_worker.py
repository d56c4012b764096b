"""One of several ranks that transformers' Trainer trains under DeepSpeed's ZeRO, case by case.

Called as ``python -m tests.distributed.zero_worker FOLDER CASE...``, with the variables of a
launcher. Each case is trained without hf_pyao, and again with policy auto.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pyao import PyAOConfig, PyAOTrainer, attach
from hf_pyao.auto import performer
from hf_pyao.config import GIB
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.training_engines import ZERO_3
from tests.distributed.audit import RecogniserAudit
from tests.distributed.models import BATCH, SEQUENCE, VOCAB, batch_of, build_model, layers_of
from tests.distributed.zero_cases import CASES, HOLDS, TIMED, Case
from tests.helpers.ranks import CountedDevice, slots_of
from tests.helpers.vocabulary_rows import VocabularyRows

NUM_STEPS = 20
NUM_COUNTED = 2
"""Last steps, whose counts are compared; of two counts the lower one is taken, see
``sharded_worker.py``."""


def deepspeed_settings(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": case.stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 4000,
        **case.zero,
    }
    if case.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    values = ("lr", "betas", "eps", "weight_decay")
    adam = {"torch_adam": True, **dict.fromkeys(values, "auto")}  # which is not compiled first
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": adam},
        "bf16": {"enabled": "auto"},
    }


def arguments(case: Case, folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        deepspeed=deepspeed_settings(case),
        bf16=case.bf16,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=case.accumulation,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def examples() -> list[dict[str, torch.Tensor]]:
    batches = [batch_of(9, index) for index in range(12)]
    return [
        {key: value[row] for key, value in batch.items()}
        for batch in batches
        for row in range(BATCH)
    ]


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, gathered. All ranks must call it together."""
    # Those that are whole already stay so, as in a run that nobody watches.
    divided = [each for each in model.parameters() if ZERO_3.has(each) and not each.numel()]
    with deepspeed.zero.GatheredParameters(divided):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


class Watch(TrainerCallback):
    """Sees what Trainer trains, and tells an audit its parameters."""

    def __init__(self, audit: RecogniserAudit | None) -> None:
        self.audit = audit
        self.trainer: Any = None
        self.step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the engine; gather the parameters that this step starts with."""
        self.step = state.global_step
        if self.audit is not None:
            self.audit.learn(whole_parameters(self.trainer.model))


def check_engine(trainer: Any, case: Case) -> None:
    """Assert that DeepSpeed trains on all ranks, in the stage that is asked for."""
    engine = trainer.model_wrapped
    assert type(engine).__name__ == "DeepSpeedEngine"
    assert engine.zero_optimization_stage() == case.stage
    assert trainer.accelerator.num_processes == dist.get_world_size() == num_ranks()
    assert trainer.accelerator.distributed_type.value == "DEEPSPEED"
    assert all(ZERO_3.has(each) == (case.stage == 3) for each in trainer.model.parameters())
    assert len(layers_of(trainer.model, case.model)) == 3
    assert (
        bool(getattr(engine.optimizer, "offload_optimizer", False))
        or bool(getattr(engine.optimizer, "cpu_offload", False)) == case.offloads
    )


class Counter:
    """Counts the bytes of a training step on the device, optimizer apart."""

    def __init__(self, trainer: Any, watch: Watch) -> None:
        self.trainer = trainer
        self.watch = watch
        self.device = CountedDevice()
        self.peaks: dict[int, int] = {}
        """Of each step; of several micro-batches in a step the most."""

    def step(self, run: Callable[[], Any]) -> Any:
        """Run a training step, counted."""
        engine, offloader = self.trainer.model_wrapped, getattr(self.trainer, "offloader", None)
        result, nbytes = counted(engine, run, self.device, offloader)
        self.peaks[self.watch.step] = max(nbytes, self.peaks.get(self.watch.step, 0))
        return result


def counted(
    engine: Any, run: Callable[[], Any], device: CountedDevice, offloader: Any
) -> tuple[Any, int]:
    """Run forward and backward; return their result, and the most bytes of the step.

    What DeepSpeed has throughout, as buckets, is beside the step.
    """
    model, optimizer = engine.module, engine.optimizer
    hosted = set(map(storage_of, host_tensors(optimizer)))
    ledger = MemoryLedger(
        lambda storage: (
            storage._cdata in hosted
            or (offloader is not None and offloader.link.tiers.owns(storage))
        )
    )
    for each in model.parameters():
        ledger.note([each.data])
        if ZERO_3.has(each):
            ledger.note([each.ds_tensor])
    ledger.note(model.buffers())
    step_bytes = ledger.live_bytes
    for bucket in optimizer.ipg_buckets.values():
        if isinstance(bucket.buffer, torch.Tensor):
            ledger.note([bucket.buffer])
    parts = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if parts is not None:
        ledger.note([parts])
    for sums in getattr(optimizer, "all_grad_tensors", {}).values():  # of micro-batches before
        ledger.note(sums or ())
    beside_bytes = ledger.live_bytes - step_bytes
    peaks: list[int] = []
    step = engine.step

    def step_uncounted(*args: Any, **kwargs: Any) -> Any:
        peaks.append(ledger.peak_bytes)  # Accelerate's backward steps the optimizer too
        return step(*args, **kwargs)

    with (
        NotingMode(ledger),
        device.counts(ledger),
        mock.patch.object(engine, "step", step_uncounted),
    ):
        result = run()
    return result, (peaks or [ledger.peak_bytes])[0] - beside_bytes


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def host_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what an offloaded optimizer has on the host, which here is the device too."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        for each in getattr(optimizer, name, ()):
            yield each
            if each.grad is not None:
                yield each.grad
    is_offloaded = getattr(optimizer, "offload_optimizer", False)
    parts = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if is_offloaded and parts is not None:
        yield parts


def train(case: Case, config: PyAOConfig | None) -> dict[str, Any]:
    """Train some steps; return what they gave, with hf_pyao if there is a configuration."""
    linear = nn.functional.linear
    audit = None if config is None else RecogniserAudit()
    watch = Watch(audit)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        common: dict[str, Any] = {
            "model": build_model(case.model, "full", ""),
            "args": arguments(case, folder),
            "train_dataset": examples(),
            "callbacks": [watch],
        }
        base: Any = Trainer if config is None else PyAOTrainer
        given = {} if config is None else {"pyao_config": config}

        class Counting(base):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                return counter.step(lambda: super(Counting, self).training_step(*args, **kwargs))

        trainer = Counting(**common, **given)
        counter = Counter(trainer, watch)
        watch.trainer = trainer
        found: dict[str, Any] = {}
        if audit is not None:
            # No clock decides here.
            stack.enter_context(mock.patch.object(performer, "find_off", return_value=None))
            stack.enter_context(mock.patch.object(performer, "loses", return_value=None))
            stack.enter_context(audit.watching())
            stack.enter_context(noted(found))
        trainer.train()
        check_engine(trainer, case)
        if audit is not None:
            found |= audit.findings()
    nn.functional.linear = linear  # which ZeRO-3 has replaced
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found |= {
        "losses": losses,
        "bits": whole_parameters(trainer.model),
        "counted": min([*counter.peaks.values()][-NUM_COUNTED:]),
        "sampled_bytes": sampled_bytes(trainer.model),
    }
    deepspeed.comm.barrier()
    return found


def sampled_bytes(model: nn.Module) -> int:
    """Return the bytes of 64 elements, or a few more, of each weight that is not divided now."""
    steps = [(each, max(1, each.numel() // 64)) for each in model.parameters() if each.numel()]
    return sum(-(-each.numel() // step) * each.element_size() for each, step in steps)


@contextlib.contextmanager
def noted(found: dict[str, Any]) -> Iterator[None]:
    """Note what the run decided, when hf_pyao leaves the model."""
    from hf_pyao.auto.offloader import Offloader

    detach = Offloader.detach

    def noting(offloader: Any, *args: Any, **kwargs: Any) -> Any:
        plan = offloader.plan
        if offloader.auto is not None and "summary" not in found:
            found.update(
                {
                    "summary": offloader.auto.summary,
                    "offloaded_slots": dict(offloader.metrics()).get("offloaded_bytes"),
                    "plan": slots_of(plan),
                    "levers": None if plan is None else plan.levers,
                    "window": None if plan is None else plan.facts.window_bytes,
                    "predicted": None if plan is None else plan.facts.peak_bytes,
                    "unpredicted": offloader.auto.report()["plan"]["figures"]["unpredicted_bytes"],
                    "changes": [
                        [each["forward"], each["to"]]
                        for each in offloader.auto.report()["transitions"]
                    ],
                }
            )
        return detach(offloader, *args, **kwargs)

    with mock.patch.object(Offloader, "detach", noting):
        yield


def compare(case: Case) -> dict[str, Any]:
    settings = {
        "policy": "auto",
        "profile_steps": 2,
        "min_bytes": 0,
        "host_memory_gib": 0.25,
        "device_memory_gib": case.cap_kib * 1024 / GIB,
        **case.config,
    }
    chunked = settings.get("head_loss")
    # The chunked loss has bits of its own: they are compared with those of the loss alone.
    reference = PyAOConfig(policy="off", head_loss=chunked) if chunked else None
    plain = train(case, reference)
    planned = train(case, PyAOConfig(**settings))
    bits = plain.pop("bits"), planned.pop("bits")
    different = [name for name, value in bits[0].items() if not torch.equal(value, bits[1][name])]
    return {"plain": plain, "planned": planned, "different": different, "num": len(bits[0])}


def timed(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what a profile says of collectives, and whether anything of it is left behind."""
    places = [deepspeed.comm.comm.cdb, getattr(engine.optimizer, "parameter_offload", None)]
    places[1] = getattr(places[1], "param_coordinator", None)

    def methods() -> list[Any]:
        return [{n: v for n, v in vars(each or engine).items() if callable(v)} for each in places]

    before = methods()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile = {"profile": str(path), "profile_steps": 2}
        with attach(engine.module, PyAOConfig(policy="all", min_bytes=0, **profile)):
            for _ in range(3):
                engine.backward(engine(**batch).loss)
                engine.step()
            is_off = methods() == before
        dist.barrier()
        if dist.get_rank() > 0:
            return {"is_off": is_off}
        written = json.loads(path.read_text())
    waits_ms = [written["metrics"].get(f"stall_{phase}_ms", 0.0) for phase in PHASES]
    return {"is_off": is_off, "speed": written["collective_gib_per_s"], "waits_ms": waits_ms}


PHASES = "forward", "backward", "head"


def engine_of(case: str) -> Any:
    """Return a model in DeepSpeed's engine, with the thresholds of *case*."""
    architecture, zero = TIMED[case]
    stage = int(zero.get("stage", 3))
    settings = deepspeed_settings(Case(stage, zero=zero))
    settings |= {"train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": False}}
    for filled in ("gradient_accumulation_steps", "train_batch_size", "gradient_clipping"):
        del settings[filled]
    settings["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    name, _, tuning = architecture.partition(" ")
    model = build_model(name, tuning or "full", "")
    engine = deepspeed.initialize(model=model, config=settings)[0]
    assert engine.zero_optimization_stage() == stage
    assert dist.get_world_size() == num_ranks()
    return engine


def held(case: str) -> dict[str, Any]:
    """Return the most rows of logits that the chunked loss makes of a long batch, and those that
    the model's own makes; and the gathered weights that outlive ZeRO-3's hold on them."""
    long = {name: value.repeat(1, LONG) for name, value in batch_of(dist.get_rank(), 0).items()}
    found: dict[str, Any] = {"num_tokens": BATCH * SEQUENCE * LONG, "left": []}
    settings: dict[str, Any] = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1}
    budget = mock.patch("hf_pyao.model.losses.cross_entropy.default_budget_bytes", return_value=1)
    linear = nn.functional.linear
    for loss in ("off", "chunked"):
        engine = engine_of(case)  # ZeRO-3 wants modules in the order of its first micro-batch
        with (
            budget,
            attach(engine.module, PyAOConfig(head_loss=loss, **settings)),
            VocabularyRows(VOCAB) as rows,
            left_noted(engine.module, found["left"]),
        ):
            engine.backward(engine(**long, use_cache=False).loss)
        engine.step()
        nn.functional.linear = linear
        found[loss] = rows.most
    return found


LONG = 20
"""How often a batch's length is taken, so that it has several chunks of 256 tokens."""


def compare_times(case: str) -> dict[str, Any]:
    """Run micro-batches; return what a profile says of collectives, and what a long batch holds."""
    linear = nn.functional.linear
    found = {"timed": timed(engine_of(case), {**batch_of(dist.get_rank(), 3), "use_cache": False})}
    nn.functional.linear = linear
    if case in HOLDS:
        found["held"] = held(case)
        nn.functional.linear = linear
    return found


@contextlib.contextmanager
def left_noted(model: nn.Module, found: list[list[Any]]) -> Iterator[None]:
    """Note the parameters that ZeRO-3 lets go of, and whether nothing else holds what it gathered."""
    refs: dict[str, Any] = {}
    handles = []

    def gathered(module: nn.Module, _: Any) -> None:
        for name, each in module.named_parameters(recurse=False):
            if each.numel():
                refs[paths[module], name] = StorageWeakRef(each.untyped_storage())

    def look(module: nn.Module, *_: Any) -> None:
        for (path, name), ref in list(refs.items()):
            if not model.get_submodule(path).get_parameter(name).numel():
                found.append([f"{path}.{name}", ref.expired()])
                del refs[path, name]

    paths = {module: path for path, module in model.named_modules()}
    for module in paths:
        handles.append(module.register_forward_pre_hook(gathered))
        handles.append(module.register_forward_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    found: dict[str, Any] = {}
    for case in cases:
        try:
            if case in CASES:
                found[case] = compare(CASES[case])
            else:
                found[case] = compare_times(case)
        except Exception:
            found[case] = {"error": traceback.format_exc()}
            break  # the ranks may be apart: later cases are missing
    rank = os.environ["RANK"]
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    status = 1
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads may abort the interpreter while it shuts down
