"""When streaming frozen weights pays, on the clock, and two tables of others.

    python recipes/studies/streaming_pays.py
    python recipes/studies/streaming_pays.py --result recipes/results/streaming_pays.json
    python recipes/studies/streaming_pays.py --parts weights
    python recipes/studies/streaming_pays.py --smoke

Nothing is trained, and no GPU is needed. Steps with LoRA adapters are recorded on fake tensors, and
their frozen weights are streamed on the step clock, with all that the layers save kept on the
device. The parts:

    overlap   the overlap table of "ZO2 CPU-GPU Offloading Mechanism Evaluation", section 2.2
    pays      step, device and host memory over the tokens of a micro-batch and the link
    weights   what stays on the device of the weights of models that others published figures for
    bases     step and device memory of Llama 3.1 8B with adapters over weights in 16, 8 and 4 bits
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.step.step_program import FORWARD, Operation, Resident, Segment, StepProgram
from hf_pyao.plan.step.streamed_step import block_bytes, with_streamed_blocks
from hf_pyao.plan.weights.base_names import ALL_LINEAR, BASES, PLAIN
from hf_pyao.plan.weights.hiding import tokens_by_clock, tokens_by_formula
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from result_file import write_result

SCHEMA_VERSION = 1
WINDOW_BYTES = 2**28
CARD = "rtx4090"
LENGTHS = (512, 1024, 2048, 4096, 8192)
LINKS_GB_PER_S = (12.5, 25.0, 50.0)

ZO2 = (
    ("OPT-1.3B", "opt:hidden_size=2048,ffn_dim=8192", 24, 54.2, 12.0, 3.0),
    ("OPT-6.7B", "opt:hidden_size=4096,ffn_dim=16384", 32, 209.0, 35.0, 11.0),
    ("OPT-30B", "opt:hidden_size=7168,ffn_dim=28672", 48, 625.0, 85.0, 32.0),
)
"""Model, one layer of it, layers; published: MB of a block, and ms of its compute and upload."""

ZO2_LINKS = (
    ("1 byte a parameter, 19 GB/s", 1.0, 19.0),
    ("2 bytes a parameter, 25 GB/s", 2.0, 25.0),
)
"""What the published times come to, and half precision over PCIe 4.0 x16."""

MODELS = {
    "Qwen2.5-7B": (
        "qwen2:hidden_size=3584,intermediate_size=18944,num_hidden_layers=28,"
        "num_attention_heads=28,num_key_value_heads=4,vocab_size=152064,"
        "tie_word_embeddings=false"
    ),
    "Llama 3.1 8B": "llama:8b",
    "gpt-oss-120b": (
        "gpt_oss:num_hidden_layers=36,num_local_experts=128,hidden_size=2880,"
        "intermediate_size=2880,num_attention_heads=64,num_key_value_heads=8,head_dim=64,"
        "vocab_size=201088,num_experts_per_tok=4"
    ),
}

WEIGHTS = (
    ("Qwen2.5-7B", "bf16", ALL_LINEAR),
    ("Llama 3.1 8B", "bf16", ALL_LINEAR),
    ("Llama 3.1 8B", "nf4", ALL_LINEAR),
    ("Llama 3.1 8B", "nf4-double", ALL_LINEAR),
    ("gpt-oss-120b", "bf16", "q_proj,k_proj,v_proj,o_proj"),
)
"""Model, how its frozen linear layers are stored, modules with adapters."""

PARTS = ("overlap", "pays", "weights", "bases")

BASE_LENGTH = 2048
BASE_LINKS_GB_PER_S = (25.0,)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A row of the overlap table, on the clock."""

    model: str
    assumed: str
    block_mb: float
    published_block_mb: float
    upload_ms: float
    published_upload_ms: float
    compute_ms: float
    """Of a block, as published."""
    pass_ms: float
    """A forward over all blocks, as on the clock; the ring is as a pass before it has left it."""
    hidden: float
    """Compute over that; published: 1.0."""


@dataclass(frozen=True, kw_only=True)
class Pays:
    """A step with all blocks resident, and with all streamed. Sizes are in bytes."""

    model: str
    base: str
    """How frozen linear layers are stored, as ``pyao estimate --base`` takes it."""
    tokens: int
    link_gb_per_s: float
    checkpointing: bool
    weights_bytes: int
    """Of the model, adapters and scales included."""
    resident_bytes: int
    """Peak, with gradients and moments of the adapters."""
    streamed_bytes: int
    host_bytes: int
    resident_ms: float
    streamed_ms: float
    tokens_by_clock: float
    """From which on uploads are hidden."""
    tokens_by_formula: float
    """The same by arithmetic alone."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What of a model's weights is on the device with all blocks streamed, in bytes."""

    model: str
    base: str
    """How frozen linear layers are stored, as ``pyao estimate --base`` takes it."""
    all_bytes: int
    stay_bytes: int
    """Embeddings, head, norms, adapters."""
    ring_bytes: int
    num_blocks: int
    """Layers, or groups of experts and what else their layers have."""


def link_of(gb_per_s: float, copy_engines: int = 2) -> LinkModel:
    """Return a link of 1e9 bytes a second, equally fast both ways."""
    speed = gb_per_s * 1e9 / GIB
    return LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed, copy_engines=copy_engines)


def overlaps() -> Iterator[Overlap]:
    """Yield the overlap table: a forward over blocks whose compute takes what was published."""
    for name, layer, num_layers, block_mb, compute_ms, upload_ms in ZO2:
        num_parameters = sum(parameter.numel() for parameter in _layer(layer).parameters())
        for assumed, bytes_per_parameter, gb_per_s in ZO2_LINKS:
            nbytes = int(num_parameters * bytes_per_parameter)
            link = link_of(gb_per_s)
            program = with_streamed_blocks(_forward_of(num_layers, nbytes), range(num_layers))
            times_ms = [compute_ms] * num_layers
            found = predict(program, [], window_bytes=0, times_ms=times_ms, link=link)
            yield Overlap(
                model=name,
                assumed=assumed,
                block_mb=nbytes / 1e6,
                published_block_mb=block_mb,
                upload_ms=link.copy_ms("reload", nbytes),
                published_upload_ms=upload_ms,
                compute_ms=compute_ms,
                pass_ms=found.step_ms,
                hidden=found.compute_ms / found.step_ms,
            )


def _forward_of(num_layers: int, nbytes: int) -> StepProgram:
    """Return a forward of one operation for each layer."""
    return StepProgram(
        [Operation("layer", "", 0.0, 0, is_kernel=True)] * num_layers,
        [],
        [],
        [Segment(FORWARD, layer, layer, layer + 1) for layer in range(num_layers)],
        num_layers * nbytes,
        tuple(f"layers.{layer}" for layer in range(num_layers)),
        residents=[Resident(layer, nbytes, is_streamable=True) for layer in range(num_layers)],
    )


def _layer(spec: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        config = config_of(parse_model(f"{spec},num_hidden_layers=1,num_attention_heads=32"))
        model = AutoModelForCausalLM.from_config(config)
    return model.model.decoder.layers[0]


def pays(
    model: str,
    lengths: Sequence[int],
    links_gb_per_s: Sequence[float] = LINKS_GB_PER_S,
    base: str = PLAIN,
    optimizer_bytes: int = 4,
) -> Iterator[Pays]:
    """Yield steps of *model* with LoRA at each length, over each link, without and with
    checkpointing."""
    hardware = find_hardware(CARD)
    for length in tqdm(lengths, desc="steps", unit="length", disable=not sys.stderr.isatty()):
        for checkpointing in (False, True):
            training = FakeTraining(
                config=config_of(parse_model(model)),
                lora_rank=16,
                base=base,
                adapter_dtype="float32",
                training_state="device",
                optimizer_bytes=optimizer_bytes,
                checkpointing=checkpointing,
                kernels=hardware.kernels,
            )
            program = record_step(training, 1, length)
            times_ms = operation_times_ms(program, hardware.device)
            streamed = with_streamed_blocks(program, range(program.num_layers))
            leaves = [False] * len(program.slots)
            for gb_per_s in links_gb_per_s:
                link = link_of(gb_per_s)
                both = [
                    predict(each, leaves, window_bytes=WINDOW_BYTES, times_ms=times_ms, link=link)
                    for each in (program, streamed)
                ]
                yield Pays(
                    model=model,
                    base=base,
                    tokens=length,
                    link_gb_per_s=gb_per_s,
                    checkpointing=checkpointing,
                    weights_bytes=sum(each.nbytes for each in program.residents),
                    resident_bytes=both[0].peak_bytes,
                    streamed_bytes=both[1].peak_bytes,
                    host_bytes=streamed.streamed.host_bytes,
                    resident_ms=both[0].step_ms,
                    streamed_ms=both[1].step_ms,
                    tokens_by_clock=tokens_by_clock(program, times_ms, link, length),
                    tokens_by_formula=tokens_by_formula(BASES[base], hardware.device, link),
                )


def weights() -> Iterator[Weights]:
    """Yield what stays on the device of the weights of models of other projects' figures."""
    for name, base, targets in WEIGHTS:
        training = FakeTraining(
            config=config_of(parse_model(MODELS[name])),
            lora_rank=16,
            lora_targets=targets,
            base=base,
            training_state="device",
        )
        program = record_step(training, 1, 64)
        streamed = with_streamed_blocks(program, range(program.num_layers)).streamed
        all_bytes = sum(each.nbytes for each in program.residents)
        yield Weights(
            model=name,
            base=base,
            all_bytes=all_bytes,
            stay_bytes=all_bytes - sum(block_bytes(program)),
            ring_bytes=streamed.device_bytes,
            num_blocks=len(streamed.blocks),
        )


def bases() -> Iterator[Pays]:
    """Yield a step of one sample over each base, with AdamW's moments in 32 bits."""
    for base in BASES:
        yield from pays(MODELS["Llama 3.1 8B"], (BASE_LENGTH,), BASE_LINKS_GB_PER_S, base, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama:8b")
    parser.add_argument("--result", type=Path, metavar="FILE.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two lengths")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    overlap_rows = list(overlaps()) if "overlap" in args.parts else []
    for row in overlap_rows:
        print(
            f"{row.model:9} {row.assumed:29} block {row.block_mb:7.1f} MB ({row.published_block_mb}"
            f"), upload {row.upload_ms:6.1f} ms ({row.published_upload_ms}), compute "
            f"{row.compute_ms:.0f} ms: {row.hidden:.1%} of a pass is compute"
        )
    model, lengths = ("llama:tiny", (64, 128)) if args.smoke else (args.model, LENGTHS)
    pays_rows = list(pays(model, lengths)) if "pays" in args.parts else []
    base_rows = list(bases()) if "bases" in args.parts and not args.smoke else []
    for each in (*pays_rows, *base_rows):
        what = "checkpointing" if each.checkpointing else "all kept"
        print(
            f"{each.base:10} {each.tokens:6} tokens, {each.link_gb_per_s:4.1f} GB/s, {what:13}: "
            f"weights {each.weights_bytes / 1e9:5.2f} GB, "
            f"{each.resident_ms:9.1f} -> {each.streamed_ms:9.1f} ms "
            f"({each.streamed_ms / each.resident_ms - 1:+.1%}), "
            f"{each.resident_bytes / 1e9:6.2f} -> {each.streamed_bytes / 1e9:6.2f} GB; hides from "
            f"{each.tokens_by_formula:,.0f} tokens, by the clock {each.tokens_by_clock:,.0f}"
        )
    weight_rows = list(weights()) if "weights" in args.parts and not args.smoke else []
    for found in weight_rows:
        print(
            f"{found.model}, {found.base}: {found.all_bytes / 1e9:.2f} GB of weights; "
            f"{found.stay_bytes / 1e9:.2f} GB stay, ring {found.ring_bytes / 1e9:.2f} GB, "
            f"{found.num_blocks} blocks"
        )
    if args.result is not None:
        write_result(
            args.result,
            kind="streaming_pays",
            schema_version=SCHEMA_VERSION,
            card=asdict(find_hardware(CARD)),
            overlap=overlap_rows,
            pays=pays_rows,
            weights=weight_rows,
            bases=base_rows,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
