"""Loading a model once for all processes of a node."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, modeling_utils

from hf_pyao.auto.ranks.rank_exchange import RankExchange
from hf_pyao.engine.stores.host_share import ranks_of_node
from hf_pyao.errors import ConfigError, ConflictError
from hf_pyao.model.weights.shared_weights import adopt, share
from hf_pyao.ranks import process_rank

_ROUND = "shared_weights"
_POLL_S = 0.02
_MEET_S = 600.0
"""How long to wait for the other ranks to enter the context."""
_LOAD_S = 4 * 3600.0
"""How long a follower waits for the weights."""

_METHODS = ("_load_pretrained_model", "_finalize_model_loading")
"""What ``from_pretrained`` calls, in this order, to read weights, and to complete the model."""


@contextlib.contextmanager
def one_copy_per_node() -> Iterator[None]:
    """Let the processes of a node have one copy of the models that are loaded inside of this.

    ```python
    accelerator = Accelerator()  # or TrainingArguments: the ranks must know each other
    with one_copy_per_node():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    ```

    The first process of each node loads as ever, and moves the weights to memory that the others
    may have. The others build the model on the meta device, and let its tensors be that memory.
    Streamed weights stay there; a weight that a process writes becomes its own. All ranks must load
    the same models, in the same order. The memory goes with the last process that has it. With one
    process this does nothing.

    Raises:
        ConfigError: several processes run on this node, and have no process group yet; or this
            version of transformers loads in another way.
        ConflictError: a model is quantised, has a device map, or is divided among ranks by
            DeepSpeed; or the loading process failed.
    """
    num_local, counted_by = ranks_of_node(os.environ)
    if process_rank().num_ranks == 1:
        if num_local > 1:
            raise ConfigError(
                f"one_copy_per_node: {num_local} processes run on this node ({counted_by}), and "
                "they have no process group yet. Make the Accelerator or the TrainingArguments "
                "before the model is loaded, or call torch.distributed.init_process_group().",
                key="one-copy-setup",
            )
        yield
        return
    members = _members()
    if len(members) == 1:
        yield
        return
    missing = [name for name in _METHODS if not hasattr(PreTrainedModel, name)]
    if missing:
        raise ConfigError(
            f"one_copy_per_node: transformers' PreTrainedModel has no {missing[0]} in this "
            "version. Load the model in each process without it.",
            key="one-copy-setup",
        )
    own = {name: PreTrainedModel.__dict__[name] for name in _METHODS}
    loading = _Loading(members, own)
    for name in _METHODS:
        setattr(PreTrainedModel, name, staticmethod(getattr(loading, name.strip("_"))))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(PreTrainedModel, name, method)


@dataclass(frozen=True)
class _Member:
    """A process of this node."""

    rank: int
    process: int
    """Its number."""

    @property
    def is_living(self) -> bool:
        return Path(f"/proc/{self.process}").exists()


def _members() -> list[_Member]:
    """Return the processes that run on this node and see each other, by rank."""
    nodes = RankExchange(f"{_ROUND}/nodes")
    nodes.tell(json.dumps([_node(), os.getpid()]))
    told = nodes.heard(wait_s=_MEET_S)
    if told is None:
        raise ConflictError(
            f"one_copy_per_node: not all of {nodes.num_ranks} ranks came within {_MEET_S:.0f} s. "
            "Enter it on each rank, at the same place.",
            key="one-copy-rank-lost",
        )
    heard = [json.loads(text) for text in told]
    own, _ = heard[nodes.rank]
    return [_Member(rank, process) for rank, (node, process) in enumerate(heard) if node == own]


def _node() -> str:
    """Return what tells nodes, and containers with process numbers of their own, apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return f"process {os.getpid()}"


class _Loading:
    """Stands for what ``from_pretrained`` calls: the first process of the node loads for all."""

    def __init__(self, members: list[_Member], own: dict[str, Any]) -> None:
        self._members = members
        self._leads = process_rank().rank == members[0].rank
        self._load, self._finalize = (own[name].__func__ for name in _METHODS)
        self._round: RankExchange | None = None

    def load_pretrained_model(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, or nothing: the model is on the meta device."""
        self._round = RankExchange(_ROUND)
        if self._leads:
            with self._errors_told():
                return self._load(model, *args, **kwargs)
        info: Any = vars(modeling_utils)["LoadStateDictInfo"]
        empty: dict[str, Any] = {"error_msgs": [], "conversion_errors": {}}
        return info(**{f.name: empty.get(f.name, set()) for f in dataclasses.fields(info)}), None

    def finalize_model_loading(self, model: PreTrainedModel, config: Any, info: Any) -> Any:
        """Complete the model as transformers does, and share it; or take the shared weights."""
        assert self._round is not None
        leader, *followers = self._members
        if not self._leads:
            heard = _hear(self._round, leader)
            with self._errors_told():
                adopt(model, heard, len(self._members))
            self._tell({})
            return info
        with self._errors_told():
            _check(config)
            completed = self._finalize(model, config, info)
            self._tell(share(model, len(self._members)))
        for member in followers:  # the files live as long as this process keeps the model
            _hear(self._round, member)
        return completed

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._tell({"error": f"{type(error).__name__}: {error}"})
            raise

    def _tell(self, value: dict[str, Any]) -> None:
        assert self._round is not None
        self._round.tell(json.dumps({"error": "", **value}))


def _check(config: Any) -> None:
    """Refuse what a model cannot be shared with."""
    device_map = getattr(config, "device_map", None) or {}
    what = ""
    if getattr(config, "hf_quantizer", None) is not None:
        what = "is quantised as it is loaded"
    elif any(str(device) != "cpu" for device in device_map.values()):
        what = "has a device map"
    if what:
        raise ConflictError(
            f"one_copy_per_node: the model {what}. Load it in each process, without this context.",
            key="one-copy-model",
        )


def _hear(meeting: RankExchange, member: _Member) -> dict[str, Any]:
    """Return what *member* tells.

    Raises:
        ConflictError: it failed, it has ended, or it tells nothing.
    """
    until = time.monotonic() + _LOAD_S
    while (told := meeting.heard_from(member.rank)) is None:
        if meeting.num_ranks == 1 or time.monotonic() > until or not member.is_living:
            raise ConflictError(
                f"one_copy_per_node: rank {member.rank} (process {member.process}) has ended, or "
                "loads no model where this rank does.",
                key="one-copy-rank-lost",
            )
        time.sleep(_POLL_S)
    heard: dict[str, Any] = json.loads(told)
    if heard["error"]:
        raise ConflictError(
            f"one_copy_per_node: rank {member.rank}: {heard['error']}", key="one-copy-rank-lost"
        )
    return heard
