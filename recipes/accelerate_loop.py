"""A training loop written by hand with Accelerate, and offloading in two lines of it.

    accelerate launch recipes/accelerate_loop.py
    PYAO_ENABLED=false accelerate launch recipes/accelerate_loop.py     # the same losses, without
    PYAO_POLICY=modules PYAO_MODULES=mlp_act,mlp_down accelerate launch recipes/accelerate_loop.py

The two lines are marked (1) and (2). `PyAOAccelerator()` is `Accelerator()` with both done.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from hf_pyao import PyAOPlugin
from hf_pyao.tools.estimate.model_sizes import DEFAULT_SIZE, MODEL_SIZES, build_config, find_size
from recipe_process import run_recipe
from run_summary import COUNTED_ON_CPU
from text_data import LIBRARY_MIB, split_blocks, standard_library
from tokenization import special_ids, tokenize_with_own_bpe

MIB = 2**20
SHOWN = {
    "would_hold_bytes": "autograd would have held on the device",
    "held_bytes": "held on the device",
    "offloaded_bytes": "moved to the host",
    "reloaded_bytes": "moved back",
}

Batch = dict[str, torch.Tensor]
Batches = DataLoader[Batch]


def train(args: argparse.Namespace) -> None:
    """Train a new model on the standard library's sources, and print what was offloaded.

    Raises:
        PyAOError: a setting cannot be.
    """
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation_steps)
    plugin = PyAOPlugin(policy=policy_for(accelerator))
    plugin.bind(accelerator)  # (1) models prepared from here on are attached
    set_seed(args.seed)

    with accelerator.local_main_process_first():
        documents = standard_library(args.max_text_mib).documents
        tokenizer, tokens = tokenize_with_own_bpe(documents, args.vocab_size)
    train_blocks, eval_blocks = split_blocks(
        tokens, block_size=args.block_size, eval_fraction=0.05, max_eval_blocks=64
    )
    size = find_size(args.architecture, args.model_size)
    config = build_config(
        args.architecture, size, vocab_size=len(tokenizer), **special_ids(tokenizer)
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    # Accelerate steps the scheduler once for every process.
    warmup_steps, num_steps = (n * accelerator.num_processes for n in (10, args.steps))
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup_steps, num_steps)
    train_loader = DataLoader(train_blocks, batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(eval_blocks, batch_size=args.batch_size)
    model, optimizer, scheduler, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )

    accelerator.print(f"loss before: {evaluate(accelerator, model, eval_loader):.4f}")
    num_micro_batches = args.steps * args.accumulation_steps
    micro_batches = itertools.islice(repeat(train_loader), num_micro_batches)
    if accelerator.is_main_process:
        micro_batches = tqdm(micro_batches, total=num_micro_batches)
    for batch in micro_batches:
        # From here to the end of backward nothing differs from a loop without offloading.
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"loss after: {evaluate(accelerator, model, eval_loader):.4f}")

    metrics = plugin.metrics()  # (2) of the last micro-batch; empty if offloading is off
    if metrics and accelerator.device.type == "cpu":
        accelerator.print(COUNTED_ON_CPU)
    for key, label in SHOWN.items():
        if key in metrics:
            accelerator.print(f"{label}: {metrics[key] / MIB:.1f} MiB")
    accelerator.end_training()  # detaches, too


def policy_for(accelerator: Accelerator) -> str | None:
    """Return 'all' on a CPU, where 'auto' would do nothing; None for the environment's, or 'auto'.

    A loop on a GPU needs none of this: ``PyAOPlugin().bind(accelerator)``.
    """
    is_given = any(name in os.environ for name in ("PYAO_POLICY", "PYAO_DEVICE_MEMORY_GIB"))
    return "all" if accelerator.device.type == "cpu" and not is_given else None


def repeat(loader: Batches) -> Iterator[Batch]:
    """Yield the batches of *loader*, over and over."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Batches) -> float:
    """Return the mean loss over *loader*. Nothing is offloaded here: nothing is saved."""
    model.eval()
    losses = [accelerator.gather(model(**batch).loss.reshape(1)) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--architecture", choices=sorted(MODEL_SIZES), default="opt")
    add("--model_size", default=DEFAULT_SIZE, help=f"a shape, new weights ({DEFAULT_SIZE})")
    add("--steps", type=int, default=100, help="optimizer steps (100)")
    add("--batch_size", type=int, default=8, help="blocks in a micro-batch (8)")
    add("--block_size", type=int, default=128, help="tokens in a block (128)")
    add("--max_text_mib", type=float, default=LIBRARY_MIB, help=f"text to read ({LIBRARY_MIB:g})")
    add("--vocab_size", type=int, default=4096, help="most tokens of the BPE (4096)")
    add("--accumulation_steps", type=int, default=1, help="micro-batches for a step (1)")
    add("--seed", type=int, default=42)
    return parser.parse_args()


if __name__ == "__main__":
    run_recipe(lambda: train(parse_arguments()))
