"""One node of a local cluster: trains every point of a sweep, and tells of each step.

Started in each node by ``accelerate launch`` (``cluster_supervisor.py`` does); the argument is a
JSON file with :class:`cluster_settings.NodeSettings`. It trains as ``train_*.py`` do: their
arguments, text, tokenizer, models and ``PyAOTrainer``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, default_data_collator, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from causal_lm import TrainingText, prepare_text
from cluster.cluster_engine import (
    build_arguments,
    check_engine,
    forbid_compiling,
    limit_waiting,
    time_collectives,
)
from cluster.cluster_settings import (
    EVENT_PREFIX,
    INTERFACE,
    NodeSettings,
    PointPlan,
    links_reply,
)
from cluster.cluster_volume import gradient_bytes, link_seconds
from experiments.communication import find_engine, sent_bytes
from hf_pyao import PyAOTrainer
from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.files import read_json_object
from hf_pyao.plan.documents.schema import read_fields
from recipe_model import build_model

_PAUSE_S = 0.05


def main(path: str) -> None:
    """Train what the file at *path* says, and end this process.

    It ends at once (``os._exit``): gloo's threads may still hold tensors of a
    DistributedDataParallel model when Python ends, and would then abort it.
    """
    status = 1
    try:
        run(read_fields(NodeSettings, read_json_object(path, ConfigError, expected=""), path))
        status = 0
    except PyAOError as error:
        emit("failed", error=str(error))
        status = 2
    except BaseException as error:
        traceback.print_exc()
        emit("failed", error=describe_error(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(settings: NodeSettings) -> None:
    """Train every point: a few steps with the links unshaped, if asked for, then shaped."""
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    limit_waiting(settings.timeout_s)
    if settings.engine != "ddp":
        forbid_compiling()
    emit("started")
    _meet(settings)
    sweep = _Sweep(settings)
    for index, point in enumerate(settings.points):
        if settings.compute_steps:
            few = dataclasses.replace(point, steps=settings.compute_steps + 1)
            sweep.set_links(is_shaped=False)
            sweep.train(index, few, is_shaped=False)
        sweep.set_links(is_shaped=True)
        sweep.train(index, point, is_shaped=True)
    if dist.is_initialized():
        dist.barrier()
    emit("done")


class _Sweep:
    """The points of one process, one after the other."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self._texts: dict[str, TrainingText] = {}
        self._is_shaped = False
        self._num_changes = 0

    def train(self, index: int, point: PointPlan, *, is_shaped: bool) -> None:
        """Train one point for its steps, from the same weights every time."""
        settings = self.settings
        arguments = build_arguments(settings, point, saves=is_shaped)
        model_args, data_args, training_args = arguments
        text = self._text(point.architecture, model_args, data_args)
        set_seed(training_args.seed)
        model = build_model(point.architecture, model_args, text.tokenizer, data_args.block_size)
        num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        _check_timeout(settings, num_parameters)
        _check_text(settings, point, len(text.train_blocks))
        observer = StepObserver(settings, index, point, is_shaped)
        trainer = ClusterTrainer(
            model=model,
            args=training_args,
            train_dataset=text.train_blocks,
            processing_class=text.tokenizer,
            data_collator=default_data_collator,
            callbacks=[observer],
        )
        observer.trainer = trainer
        emit("point", point=index, is_shaped=is_shaped, num_parameters=num_parameters)
        folder = str(training_args.output_dir)
        checkpoint = newest_checkpoint(folder) if settings.resume else None
        trainer.train(resume_from_checkpoint=checkpoint if is_shaped else None)
        moved = trainer.offload_metrics.get("offloaded_bytes", 0)
        emit("trained", point=index, is_shaped=is_shaped, offloaded_bytes=moved)
        if not is_shaped:
            repeats = settings.compute_steps
            emit(
                "collectives",
                point=index,
                seconds=time_collectives(settings, point, num_parameters, repeats),
            )
        del trainer, model, observer
        gc.collect()

    def _text(self, architecture: str, model_args: Any, data_args: Any) -> TrainingText:
        if architecture not in self._texts:
            # One machine, one cache: the first node fills it. The others wait for a file, because a
            # collective would not wait as long as a slow machine may take.
            is_ready = Path(self.settings.work_dir, f"text_{architecture}")
            if _rank() != 0:
                _wait_for([is_ready])
            self._texts[architecture] = prepare_text(model_args, data_args)
            is_ready.touch()
        return self._texts[architecture]

    def set_links(self, *, is_shaped: bool) -> None:
        """Have the supervisor give the links their rate, or take it off; wait until it has."""
        if is_shaped == self._is_shaped:
            return
        if dist.is_initialized():
            dist.barrier()
        emit("links", is_shaped=is_shaped, change=self._num_changes)
        _wait_for([links_reply(self.settings.work_dir, self._num_changes)])
        self._is_shaped = is_shaped
        self._num_changes += 1


class ClusterTrainer(PyAOTrainer):
    """Keeps the loss of each micro-step of this process, as it is before any averaging."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_step_losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do what the base class does, and note the loss."""
        loss = super().training_step(*args, **kwargs)
        self.micro_step_losses.append(loss.item())
        return loss


class StepObserver(TrainerCallback):
    """Tells of each optimizer step: its time, its bytes on the wire, its loss on this node."""

    def __init__(
        self, settings: NodeSettings, index: int, point: PointPlan, is_shaped: bool
    ) -> None:
        self.trainer: ClusterTrainer | None = None
        """Whose steps are told of; to be set before training."""
        self._settings, self._index, self._point = settings, index, point
        self._is_shaped = is_shaped
        self._start_s, self._received, self._sent = 0.0, 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the engine, and start the clock."""
        check_engine(self._settings, self._point, self.trainer)
        self._mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell of the step."""
        assert self.trainer is not None
        start_s, received, sent = self._start_s, self._received, self._sent
        self._mark()
        losses = self.trainer.micro_step_losses
        emit(
            "step",
            point=self._index,
            is_shaped=self._is_shaped,
            step=state.global_step,
            seconds=self._start_s - start_s,
            rx_bytes=self._received - received,
            tx_bytes=self._sent - sent,
            loss=sum(losses),
        )
        losses.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the writing of a checkpoint out of the next step's time."""
        self._mark()

    def _mark(self) -> None:
        self._start_s = time.perf_counter()
        self._received, self._sent = interface_bytes(INTERFACE)


def interface_bytes(interface: str, path: str = "/proc/self/net/dev") -> tuple[int, int]:
    """Return the bytes that *interface* of this network namespace has received and sent."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            values = counters.split()
            return int(values[0]), int(values[8])
    return 0, 0


def newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint in *folder* that was written to its end; None: there is none.

    A Trainer's state is the last thing that it writes.
    """
    found = [
        (int(path.name.rpartition("-")[2]), str(path))
        for path in Path(folder).glob("checkpoint-*")
        if (path / "trainer_state.json").is_file()
    ]
    return max(found)[1] if found else None


def _meet(settings: NodeSettings) -> None:
    """Wait until every node has come here: imports take longer on some than on others."""
    here = [Path(settings.work_dir, f"here_{rank}") for rank in range(settings.nodes)]
    here[_rank()].touch()
    _wait_for(here)


def _wait_for(paths: Sequence[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(_PAUSE_S)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _check_timeout(settings: NodeSettings, num_parameters: int) -> None:
    one = gradient_bytes(settings.engine, settings.precision, num_parameters)
    num_bytes = sent_bytes(find_engine("ddp"), settings.nodes, one)
    needed_s = link_seconds(num_bytes, settings.rate_mbit)
    if needed_s > 0.5 * settings.timeout_s:
        raise ConfigError(
            f"one all-reduce of this model's gradient takes {needed_s:.0f} s at "
            f"{settings.rate_mbit:g} Mbit/s, and --timeout is {settings.timeout_s:g} s. Give a "
            f"smaller --model-size, a higher --rate, or --timeout {2 * needed_s:.0f} or more."
        )


def _check_text(settings: NodeSettings, point: PointPlan, num_blocks: int) -> None:
    needed = settings.nodes * point.micro_batch * point.gradient_accumulation
    if num_blocks < needed:
        raise ConfigError(
            f"one optimizer step takes {needed} samples, and the text has {num_blocks} blocks. "
            "Give a smaller --micro-batches, or behind -- a larger --max_text_mib."
        )


def describe_error(error: BaseException) -> str:
    """Return an error in one line, without what torch says about itself."""
    first = next(iter(str(error).splitlines()), "")
    first = re.sub(r"\[\S+\.(cc|cpp):\d+\] ", "", first).partition(" This is typically")[0]
    return f"{type(error).__name__}: {first}"


def emit(event: str, **content: Any) -> None:
    """Print an event: one line, written at once."""
    line = EVENT_PREFIX + json.dumps({"event": event, "node": _rank(), **content}) + "\n"
    os.write(1, line.encode("utf-8"))


if __name__ == "__main__":
    main(sys.argv[1])
