"""One of several ranks that load one copy of a model: ``-m tests.distributed.shared_loading_worker``.

Arguments: the folder for what was seen, how, and the folder of the model.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach, one_copy_per_node
from hf_pyao.errors import PyAOError
from tests.helpers import tiny_batch
from tests.helpers.ranks import join_group, write_result

CONFIG = PyAOConfig(policy="off", stream_weights=0, host_memory_gib=1.0)


def proportional_bytes() -> int:
    """Return this process's memory, by the kernel; what n processes have counts by an n-th."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Pss")


def loaded(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()


def train(model: Any, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(**tiny_batch(10 * step + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def same(one: Any, other: Any) -> bool:
    found, expected = one.state_dict(), other.state_dict()
    return list(found) == list(expected) and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def see(rank: int, folder: Path, model_folder: Path) -> dict[str, Any]:
    dist.barrier()
    before = proportional_bytes()
    with one_copy_per_node():
        model = loaded(model_folder)
    offloader = attach(model, CONFIG)
    says = f"in one copy for {dist.get_world_size()} processes"
    facts: dict[str, Any] = {"same description": says in offloader.describe()}
    for parameter in model.parameters():
        parameter.sum()  # each page is read
    dist.barrier()
    facts["shared_bytes"] = proportional_bytes() - before
    dist.barrier()
    plain = loaded(model_folder)
    facts["same before"] = same(model, plain)
    facts["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    facts["same losses"] = all(map(torch.equal, train(model, rank), train(plain, rank)))
    facts["uploads"] = offloader.weights.figures()["num_uploads"]
    facts["same after"] = same(model, plain)
    name, frozen = next((n, p) for n, p in model.named_parameters() if "q_proj.base" in n)
    if rank == 0:  # as merging does: it must not reach the other rank
        frozen.data.add_(1)
        dict(model.named_parameters())["base_model.model.model.embed_tokens.weight"].data.add_(1)
    dist.barrier()
    facts["same after another rank wrote"] = same(model, plain) == (rank != 0)
    copied = copy.deepcopy(model.base_model.model)
    facts["copied"] = all(
        torch.equal(value, model.base_model.model.state_dict()[key])
        for key, value in copied.state_dict().items()
    )
    del name
    return facts


def main() -> None:
    folder, how, model_folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    if how != "no group":
        join_group(folder)
    facts: dict[str, Any] = {}
    try:
        if how == "train":
            facts = see(rank, folder, model_folder)
        elif how == "wait":
            with one_copy_per_node():
                model = loaded(model_folder)
            write_result(folder, {})
            time.sleep(600)
        elif how == "leader dies":
            with one_copy_per_node():
                if rank == 0:
                    os.kill(os.getpid(), 9)
                model = loaded(model_folder)
        elif how == "other models":
            with one_copy_per_node():
                model = loaded(model_folder if rank == 0 else folder / "other")
        else:
            with one_copy_per_node():
                model = loaded(model_folder / "missing" if how == "missing" else model_folder)
            del model
    except (PyAOError, OSError) as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    write_result(folder, facts)
    if how == "train":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
