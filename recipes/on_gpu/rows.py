"""The rows of the GPU day: one way to train one model, for a few steps. Plain values, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

CAP_GIB = 10.8
"""What a card of 12 GiB has for a process's allocator: 1.2 GiB are the driver's and the context,
which the allocator's cap does not count."""

CARD_24_GIB = 24.0 - 0.65

ADAPTERS_CAP_GIB = 76.0
"""Less than either card has, so that the same sizes fit."""

BUCKET_GIB = 1e9 / 2**30
"""DeepSpeed's bucket of 5e8 half-precision gradients, as in the PyAO paper's runs."""

HOST_MEMORY_GIB = 96.0
"""What may be pinned of 128 GiB. Given, as half of what is free may be little at the start."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train: something of others, or hf_pyao with settings, or both."""

    peer: str = "none"
    """A method of ``pyao bench``, which is installed first."""
    settings: Mapping[str, Any] | None = None
    """Of ``PyAOConfig``; None: hf_pyao is not attached."""
    estimate: str | None = None
    """What ``pyao estimate`` calls it; None: it does not predict it."""


_CHUNKED = {"head_loss": "chunked"}
_LONG_CONTEXT = {"policy": "all", "long_context": True, "verify_recompute": "off"}
"""Without checks of second runs: these are in a run's first three micro-batches and in few later
ones, and rows have fewer steps than that."""

_AUTO: dict[str, Any] = {"policy": "auto", "profile_steps": 3}
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "nothing": Way(estimate="none"),
        "nothing + chunked": Way(
            settings={"policy": "off", **_CHUNKED}, estimate="none + chunked loss"
        ),
        "checkpointing": Way(peer="checkpoint", estimate="checkpointing"),
        "checkpointing + chunked": Way(
            peer="checkpoint",
            settings={"policy": "off", **_CHUNKED},
            estimate="checkpointing + chunked loss",
        ),
        "checkpointing, offload=True": Way(peer="checkpoint-offload"),
        "all over checkpointing": Way(
            peer="checkpoint", settings={"policy": "all", "keep_last_layers": 0}
        ),
        "all over checkpointing + chunked": Way(
            peer="checkpoint", settings={"policy": "all", **_CHUNKED}
        ),
        "save_on_cpu": Way(peer="save-on-cpu"),
        "TRL": Way(peer="trl-streams"),
        "Liger's loss": Way(peer="bench.board_peers:liger_loss"),
        "DeepSpeed": Way(peer="deepspeed"),
        "all": Way(settings={"policy": "all"}, estimate="policy all"),
        "auto": Way(settings=_AUTO, estimate="policy auto"),
        "auto + chunked": Way(
            settings={**_AUTO, **_CHUNKED}, estimate="policy auto + chunked loss"
        ),
        "long_context": Way(settings=_LONG_CONTEXT, estimate="long context"),
        "checkpointing, streamed": Way(
            peer="checkpoint", settings={"policy": "off", "stream_weights": 0}
        ),
        "long_context, streamed": Way(settings={**_LONG_CONTEXT, "stream_weights": 0}),
    }
)
"""By name."""

LLAMA_3B = (
    "llama:hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,"
    "num_key_value_heads=8,vocab_size=128256,max_position_embeddings=131072,"
    "tie_word_embeddings=true,rope_theta=500000.0"
)
QWEN3_8B = (
    "qwen3:hidden_size=4096,intermediate_size=12288,num_hidden_layers=36,num_attention_heads=32,"
    "num_key_value_heads=8,head_dim=128,vocab_size=151936,max_position_embeddings=40960,"
    "tie_word_embeddings=false"
)
QWEN3_8_LAYERS = (
    "qwen3:hidden_size=1024,intermediate_size=3072,num_hidden_layers=8,num_attention_heads=16,"
    "num_key_value_heads=8,head_dim=128,vocab_size=1024,max_position_embeddings=40960"
)
LLAMA_8B_2_LAYERS = (
    "llama:hidden_size=4096,intermediate_size=14336,num_hidden_layers=2,num_attention_heads=32,"
    "num_key_value_heads=8,vocab_size=128256,max_position_embeddings=1048576,rope_theta=500000.0"
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        LLAMA_3B: "llama 3.2 3b",
        QWEN3_8B: "qwen3 8b",
        QWEN3_8_LAYERS: "qwen3, 8 layers",
        LLAMA_8B_2_LAYERS: "2 layers of llama 8b",
    }
)


@dataclass(frozen=True)
class Row:
    """One way to train one model, measured for a few steps."""

    part: str
    model: str
    """As ``pyao estimate --model`` takes it."""
    way: str
    """A key of :data:`WAYS`."""
    micro_batch: int
    tokens: int = 512
    dtype: str = "bfloat16"
    lora_rank: int | None = None
    """Rank of PEFT's adapters on all linear layers; None: all parameters are trained."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of ``PyAOConfig``, beside those of the way."""
    attention: str = "cudnn"
    """``cudnn``, which torch prefers on Hopper, or ``flash``: ``enable_cudnn_sdp(False)``."""
    engine: str = "zero2"
    """``zero2``: gradients go as they come, beside a bucket, and no optimizer runs. ``plain``:
    gradients stay. ``adamw``: and AdamW runs."""
    cap_gib: float | None = None
    """Most that the allocator may hold."""
    ballast_gib: float = 0.0
    """Memory that is taken beforehand, in place of layers that are left out."""
    num_warmup: int = 2
    num_steps: int = 5
    may_run_out: bool = False
    """Whether it is expected not to fit."""
    predicted_on: str | None = None
    """A card whose times are predicted in place of this one's; None: this one."""
    published: Mapping[str, float] = field(default_factory=dict)
    """What others measured of this, by the names of figures."""
    source: str = ""
    ours: str = ""
    """The way of ours that stands beside theirs."""

    @property
    def name(self) -> str:
        """What the row is called: unique over all rows."""
        model = NAMES.get(self.model, self.model.replace(":", " "))
        lora = "" if self.lora_rank is None else f" LoRA {self.lora_rank}"
        kernel = "" if self.attention == "cudnn" else f", {self.attention}"
        kernel += "" if self.dtype == "bfloat16" else f", {self.dtype}"
        cap = "" if self.cap_gib is None else f", cap {self.cap_gib:g} GiB"
        budget = self.settings.get("device_memory_gib")
        cap += f", budget {budget:g} GiB" if budget and not self.cap_gib else ""
        shape = f"{self.micro_batch} x {self.tokens}"
        return f"{self.part}: {model}{lora} {shape}, {self.way}{kernel}{cap}"

    @property
    def setup(self) -> tuple[Any, ...]:
        """What rows that can share a built model have in common."""
        return (self.model, self.dtype, self.lora_rank)


_SPEED = (("opt:1.3b", 16), ("gpt2:0.8b", 16), ("llama:1.2b", 8))
_SPEED_WAYS = (
    *("nothing", "checkpointing", "checkpointing, offload=True", "save_on_cpu", "TRL", "all"),
    *("auto", "auto + chunked"),
)
_SLOW = {"save_on_cpu": 2}
_BUDGET = {"device_memory_gib": CAP_GIB}


def speed_rows() -> list[Row]:
    """Part F: bf16 without a cap; ``auto`` plans for one. Then flash, for the two that matter.

    What is slow, or pins memory that nobody else can use, runs on the last model alone.
    """
    rows = [
        Row(
            *("F", model, way, size),
            settings=_BUDGET if way.startswith("auto") else {},
            **(_steps(1, _SLOW[way]) if way in _SLOW else _steps(2, 5)),
        )
        for model, size in _SPEED
        for way in _SPEED_WAYS
        if way not in _SLOW or model == _SPEED[-1][0]
    ]
    return rows + [
        dataclasses.replace(row, attention="flash", num_steps=3)
        for row in rows
        if row.way in ("checkpointing", "auto") and row.model == _SPEED[0][0]
    ]


LARGEST: Mapping[str, Mapping[tuple[str, str], tuple[int, int]]] = MappingProxyType(
    {
        "G": {
            ("opt:1.3b", "checkpointing"): (16, 17),
            ("opt:1.3b", "all"): (14, 15),
            ("opt:1.3b", "auto + chunked"): (122, 142),
            ("opt:1.3b", "long_context"): (213, 230),
            ("llama:1.2b", "checkpointing"): (7, 8),
            ("llama:1.2b", "all"): (5, 6),
            ("llama:1.2b", "auto + chunked"): (75, 90),
        },
        "G2": {("opt:1.3b", "checkpointing"): (18, 19), ("opt:1.3b", "all"): (19, 20)},
    }
)
"""Samples that are predicted to fit into the cap with cuDNN's attention, and not to; in part G2
with expandable segments."""


def cap_rows(part: str) -> list[Row]:
    """Parts G and G2: a predicted micro-batch fits within the cap, and a larger one does not."""
    return [
        Row(
            *(part, model, way, size),
            cap_gib=CAP_GIB,
            settings=_BUDGET if way.startswith("auto") else {},
            may_run_out=size == sizes[1],
            **_steps(1, 1),
        )
        for (model, way), sizes in LARGEST[part].items()
        for size in sizes
    ]


def ratio_rows() -> list[Row]:
    """Part H: fp32 without TF32 has an RTX 4070's ratio of compute to link."""
    # fp32 takes twice what the same step takes in bf16 on the card that is predicted.
    budget = {"device_memory_gib": 2 * CAP_GIB}
    how: dict[str, Any] = {"dtype": "float32", "predicted_on": "rtx4070", **_steps(1, 3)}
    return [
        Row("H", model, way, size, settings=budget if way == "auto" else {}, **how)
        for model, size in (("opt:1.3b", 8), ("llama:1.2b", 4))
        for way in ("nothing", "checkpointing", "all", "auto")
    ]


def _steps(num_warmup: int, num_steps: int) -> dict[str, Any]:
    return {"num_warmup": num_warmup, "num_steps": num_steps}


_ADAPTERS: dict[str, Any] = {"lora_rank": 16, "engine": "adamw"}


def adapter_rows() -> list[Row]:
    """Part K: adapters on Llama-8B, resident and streamed."""
    how = {**_ADAPTERS, "cap_gib": ADAPTERS_CAP_GIB, **_steps(1, 2)}
    streamed = "checkpointing, streamed"
    return [
        Row("K", "llama:8b", "nothing", 3, 2048, **how),
        Row("K", "llama:8b", "checkpointing", 14, 2048, **how),
        Row("K", "llama:8b", "checkpointing", 15, 2048, **how, may_run_out=True),
        Row("K", "llama:8b", streamed, 4, 2048, **how),
        Row("K", "llama:8b", streamed, 16, 2048, **how),
    ]


def headline_rows() -> list[Row]:
    """Part L: 64k tokens with adapters on Llama-8B within 24 GB, behind a short step."""
    how = {**_ADAPTERS, "attention": "flash", "cap_gib": CARD_24_GIB}
    return [
        Row("L", "llama:8b", "long_context", 1, 2048, **how, **_steps(1, 1)),
        Row("L", "llama:8b", "long_context", 1, 65536, **how, **_steps(0, 1)),
    ]


def others_rows() -> list[Row]:
    """Part M: figures that others published and a few seconds can check."""
    ours = "all over checkpointing"
    offload = [
        ("checkpointing", {"after_forward_mb": 194.1}),
        ("checkpointing, offload=True", {"after_forward_mb": 66.1}),
        (ours, {}),
    ]
    hf: dict[str, Any] = {
        "source": "huggingface/transformers pull request 48444",
        "engine": "plain",
        "ours": ours,
        **_steps(1, 1),
    }
    # `auto` gets about the memory that checkpointing takes: 33 GB of weights and gradients beside.
    budget = {"device_memory_gib": 47.0}
    table = [
        ("checkpointing", {"tokens_per_s": 3059.0, "growth_gb": 17.16}, "auto"),
        ("checkpointing, offload=True", {"tokens_per_s": 3073.0, "growth_gb": 17.09}, ours),
        (ours, {}, ""),
        ("auto", {}, ""),
        ("TRL", {"tokens_per_s": 1653.0, "growth_gb": 32.50}, "auto"),
    ]
    axolotl: dict[str, Any] = {
        "source": "axolotl-ai-cloud/axolotl pull request 3776, growth of the peak",
        "engine": "plain",
        **_steps(1, 2),
    }
    return [
        *(Row("M", QWEN3_8_LAYERS, way, 1, 8192, published=of, **hf) for way, of in offload),
        *(
            Row(
                *("M", QWEN3_8B, way, 1, 8192),
                settings=budget if way == "auto" else {},
                published=of,
                ours=beside,
                **axolotl,
            )
            for way, of, beside in table
        ),
    ]


def later_rows() -> list[Row]:
    """Part O: more of others' figures, for a second day."""
    tune: dict[str, Any] = {
        "source": "pytorch/torchtune README, Llama-3.2-3B on an A100, compiled",
        "engine": "adamw",
    }
    ladder = (
        ("nothing", 60.0, 7075.0),
        ("nothing + chunked", 42.9, 9174.0),
        ("checkpointing + chunked", 24.9, 7210.0),
        ("all over checkpointing + chunked", 21.8, 7301.0),
    )
    unsloth: dict[str, Any] = {
        "source": "Unsloth's benchmark page: 78,475 tokens on 24 GB, QLoRA; here bf16 weights "
        "stream",
        **{**_ADAPTERS, "lora_rank": 32, "attention": "flash", "cap_gib": CARD_24_GIB},
        **_steps(0, 1),
    }
    titan: dict[str, Any] = {
        "source": "pytorch/torchtitan pull request 4636: the peak keeps its budget, and 5 % are "
        "gained",
        "engine": "plain",
        **_steps(1, 2),
    }
    return [
        *(
            Row(
                *("O", LLAMA_3B, way, 2, 4096),
                published={"reserved_gib": reserved_gib, "tokens_per_s": tokens_per_s},
                **tune,
            )
            for way, reserved_gib, tokens_per_s in ladder
        ),
        Row("O", "llama:8b", "long_context, streamed", 1, 78475, **unsloth),
        *(
            Row("O", QWEN3_8B, "auto", 1, 8192, settings={"device_memory_gib": budget}, **titan)
            for budget in (52.0, 56.0, 60.0, 64.0)
        ),
    ]


def limit_rows() -> list[Row]:
    """Part P: two layers of Llama-8B at 524,288 tokens, ballast for the other thirty."""
    ballast_gib = 30 * 436_224_000 / 2**30
    how = {**_ADAPTERS, "attention": "flash", "ballast_gib": ballast_gib, **_steps(0, 1)}
    return [Row("P", LLAMA_8B_2_LAYERS, "long_context", 1, 524288, **how)]


def all_rows() -> list[Row]:
    """Return the rows of all parts that measure steps, in their order."""
    return [
        *speed_rows(),
        *ratio_rows(),
        *cap_rows("G"),
        *cap_rows("G2"),
        *adapter_rows(),
        *headline_rows(),
        *others_rows(),
        *later_rows(),
        *limit_rows(),
    ]


def smoke(row: Row) -> Row:
    """Return *row* in a size that a CPU measures in a moment, under the same name."""
    architecture = row.model.partition(":")[0]
    small = {
        "opt": "hidden_size=32,word_embed_proj_dim=32,ffn_dim=64,num_hidden_layers=3,"
        "num_attention_heads=2,max_position_embeddings=64",
        "gpt2": "n_embd=32,n_layer=3,n_head=2,n_positions=64",
        "llama": "hidden_size=32,intermediate_size=64,num_hidden_layers=3,num_attention_heads=2,"
        "num_key_value_heads=2",
        "qwen3": "hidden_size=32,intermediate_size=64,num_hidden_layers=3,num_attention_heads=2,"
        "num_key_value_heads=2,head_dim=16",
    }[architecture]
    ends = "vocab_size=64,pad_token_id=0,bos_token_id=1,eos_token_id=2"
    return dataclasses.replace(
        row,
        model=f"{architecture}:{small},{ends}",
        micro_batch=min(row.micro_batch, 2),
        tokens=16,
        dtype="float32",
        lora_rank=row.lora_rank and 2,
        cap_gib=None,
        ballast_gib=0.0,
        num_warmup=1,
        num_steps=1,
        may_run_out=False,
    )
