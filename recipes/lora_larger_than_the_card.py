"""Train adapters on a model whose weights are several times the memory of the device.

    python recipes/lora_larger_than_the_card.py
    python recipes/lora_larger_than_the_card.py --times_larger 5 --num_layers 32
    python recipes/lora_larger_than_the_card.py --device cuda --hidden_size 4096 --num_layers 32 \\
        --dtype bfloat16 --times_larger 3

A Llama-shaped model with new weights gets LoRA adapters (PEFT) and a few steps of training on the
sources of Python's standard library. The cap is the model's weights divided by --times_larger. Its
frozen weights stay on the host and come layer by layer (`stream_weights`). On a CPU the host stands
in for the device: every storage that an operation makes or reads is counted, and the same steps run
with all weights resident, whose losses and adapters have to have equal bits. On an accelerator the
allocator counts, its memory is capped, and the model is never wholly there.

Needs peft: `pip install peft`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from result_file import write_result
from text_data import standard_library
from tokenization import special_ids, tokenize_with_own_bpe

MIB = 2**20
SCHEMA_VERSION = 1
WINDOW_BYTES = 4 * MIB
"""Of activations in flight: a small model has small layers."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a few steps came to."""

    losses: list[float]
    adapters: dict[str, torch.Tensor]
    peak_bytes: int
    """Most bytes on the device in the last step, adapters' gradients and activations included."""
    seconds_per_step: float
    uploads_per_step: float
    said: str


def main(argv: list[str] | None = None) -> int:
    """Run the recipe; return 0 if the bits are equal and the cap holds."""
    args = _parser().parse_args(argv)
    if args.smoke:
        args.hidden_size, args.num_layers, args.sequence_length, args.num_steps = 192, 20, 16, 2
        args.vocab_size, args.text_mb, args.rank = 300, 0.05, 1
    try:
        return run(args)
    except PyAOError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Train streamed, and on a CPU resident too; print and write what that came to."""
    device = torch.device(args.device)
    is_counted = device.type == "cpu"
    weights_bytes = _weights_bytes(_model(args))
    cap_bytes = int(weights_bytes / args.times_larger)
    if not is_counted:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), device)
    streamed = train(
        args,
        device,
        PyAOConfig(
            policy="all",
            window=WINDOW_BYTES,
            keep_last_layers=0,
            stream_weights=args.resident_layers,
        ),
    )
    resident = train(args, device, None) if is_counted else None
    is_within = streamed.peak_bytes <= cap_bytes
    is_equal = resident is None or _are_equal(streamed, resident)
    print(streamed.said)
    say("weights of the model", f"{weights_bytes / MIB:,.1f} MiB")
    say("cap", f"{cap_bytes / MIB:,.1f} MiB")
    how = "counted: the host stands in for the device" if is_counted else "by its allocator"
    say("on the device, at most", f"{streamed.peak_bytes / MIB:,.1f} MiB ({how})")
    if resident is not None:
        say("the same with resident weights", f"{resident.peak_bytes / MIB:,.1f} MiB")
        say("bits of losses and adapters, against resident", "equal" if is_equal else "DIFFER")
    say("uploads a step", f"{streamed.uploads_per_step:,.1f}")
    say("time of a step", f"{streamed.seconds_per_step * 1e3:,.0f} ms")
    say("loss", f"{streamed.losses[0]:.4f} -> {streamed.losses[-1]:.4f}")
    if args.output is not None:
        write_result(
            args.output,
            kind="lora_larger_than_the_card",
            schema_version=SCHEMA_VERSION,
            arguments={k: str(v) for k, v in vars(args).items()},
            weights_bytes=weights_bytes,
            cap_bytes=cap_bytes,
            peak_bytes=streamed.peak_bytes,
            resident_peak_bytes=None if resident is None else resident.peak_bytes,
            bits_are_equal=None if resident is None else is_equal,
            uploads_per_step=streamed.uploads_per_step,
            seconds_per_step=streamed.seconds_per_step,
            losses=streamed.losses,
        )
    return 0 if is_equal and is_within else 1


def say(what: str, figure: str) -> None:
    """Print one line of the table."""
    print(f"{what:48}{figure}")


def train(args: argparse.Namespace, device: torch.device, config: PyAOConfig | None) -> Trained:
    """Train for some steps.

    Args:
        args: sizes and seed.
        device: where compute runs.
        config: None: all weights are on the device, and nothing is offloaded.
    """
    model, blocks = _model(args), [block.to(device) for block in _text(args)]
    context: Any = contextlib.nullcontext()
    if config is not None:
        context = attach(model, config, device=device)
    else:
        model.to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, seconds = [], []
    with context as offloader:
        is_host = _host_memory(offloader)
        before = _uploads(offloader)
        for block in blocks:
            ledger = MemoryLedger(is_host)
            ledger.note([*model.parameters(), *model.buffers(), block])
            began = time.perf_counter()
            with NotingMode(ledger) if block is blocks[-1] else contextlib.nullcontext():
                loss = model(input_ids=block, labels=block, use_cache=False).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
        uploads = (_uploads(offloader) - before) / len(blocks)
        said = "" if offloader is None else offloader.describe()
        counted = ledger.peak_bytes
        if device.type != "cpu":
            counted = torch.cuda.max_memory_allocated(device)
        adapters = {
            name: parameter.detach().cpu().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
    return Trained(
        losses=losses,
        adapters=adapters,
        peak_bytes=counted,
        seconds_per_step=sorted(seconds)[len(seconds) // 2],
        uploads_per_step=uploads,
        said=said,
    )


def _host_memory(offloader: Any) -> Callable[[torch.UntypedStorage], bool]:
    """Return what says of a storage that it is the host's, where the host is the device too."""
    if offloader is None:
        return lambda storage: False
    masters = {block.memory.untyped_storage()._cdata for block in offloader.weights.blocks}
    return lambda storage: offloader.link.tiers.owns(storage) or storage._cdata in masters


def _uploads(offloader: Any) -> int:
    return 0 if offloader is None else offloader.weights.ring.num_uploads


def _are_equal(one: Trained, other: Trained) -> bool:
    same = all(torch.equal(one.adapters[name], other.adapters[name]) for name in other.adapters)
    return same and one.losses == other.losses and one.adapters.keys() == other.adapters.keys()


def _weights_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _model(args: argparse.Namespace) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("adapters need peft, which is not installed: pip install peft") from error
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    size = args.hidden_size
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=size * 11 // 4,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(1, size // 64),
        num_key_value_heads=max(1, size // 64),
        vocab_size=args.vocab_size,
        max_position_embeddings=max(args.sequence_length, 128),
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    lora = LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def _text(args: argparse.Namespace) -> list[torch.Tensor]:
    documents = standard_library(args.text_mb).documents
    tokenizer, tokens = tokenize_with_own_bpe(documents, args.vocab_size)
    assert len(tokenizer) <= args.vocab_size, special_ids(tokenizer)
    needed = args.micro_batch * args.sequence_length * args.num_steps
    text = torch.from_numpy(tokens.astype("int64"))
    text = text.repeat(-(-needed // len(text)))[:needed]
    return list(text.view(args.num_steps, args.micro_batch, args.sequence_length))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu")
    add("--times_larger", type=float, default=3.0, help="the weights against the cap (3)")
    add("--resident_layers", type=int, default=0, help="layers that stay on the device (0)")
    add("--hidden_size", type=int, default=512)
    add("--num_layers", type=int, default=24)
    add("--rank", type=int, default=4)
    add("--vocab_size", type=int, default=2000)
    add("--micro_batch", type=int, default=1)
    add("--sequence_length", type=int, default=128)
    add("--num_steps", type=int, default=4)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--seed", type=int, default=0)
    add("--text_mb", type=float, default=1.0, help="of the standard library's sources")
    add("--output", type=Path, default=None, metavar="FILE.json")
    add("--smoke", action="store_true", help="the smallest sizes that show anything")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
