"""Small models on real text, trained with and without lossy codecs: the runs of the error study."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.codecs.int8 import Int8Codec
from studies.study_codecs import study_codec
from text_data import Blocks, split_blocks, standard_library
from tokenization import tokenize_with_own_bpe

LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
CLIP_NORM = 1.0
NUM_HELD_OUT_BLOCKS = 128
NUDGE = 2.0**-20
"""Relative size of the change of the initial weights whose effect on the curve is the control."""
THINNED_STEPS = 10
"""Curves other than the reference's are kept as means over this many steps."""

NONE, NUDGED = "none", "nudged weights"
ALL_SLOTS = "all"
_LINEARS = ("qkv_linear", "attn_proj", "mlp_up", "mlp_down")
SLOTS: dict[str, tuple[str, ...]] = {
    ALL_SLOTS: (),
    "all but mlp_act": (*_LINEARS, "core_attn", "attn_norm", "mlp_norm", "."),
    "linears": _LINEARS,
    "core_attn": ("core_attn",),
    "mlp_act": ("mlp_act",),
    "norms": ("attn_norm", "mlp_norm"),
}
"""Name in the tables -> roles, as ``modules`` takes them; none stands for everything."""

LOSSY = ("int8", "int8_group", "int8_tensor", "fp8", "int4")
LOSSLESS = ("identity", "bitmask", "narrow")
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = ("opt", "gpt2", "llama")


class SignKeepingInt8(Int8Codec):
    """int8 that rounds nothing to zero: it shows what int8 does to a ReLU, and is in no table of
    codecs, because it makes other things worse."""

    def to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round half to even, but small values away from zero."""
        levels = scaled.round()
        return levels.where((levels != 0) | (scaled == 0), scaled.sign()).to(torch.int8)


SIGN_KEEPING = "int8, signs kept"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large models and batches are."""

    hidden: int = 64
    layers: int = 3
    tokens: int = 64
    samples: int = 4
    vocab: int = 1024
    text_mib: float = 1.0


@dataclass(frozen=True)
class Variant:
    """What is compressed, and how."""

    codec: str
    slots: str = ALL_SLOTS

    def attached(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which *model* offloads by this variant: small tensors too, and the
        last layer too, so that nothing is spared."""
        if self.codec in (NONE, NUDGED):
            return nullcontext()
        modules = SLOTS[self.slots]
        config = PyAOConfig(
            policy="modules" if modules else "all",
            modules=modules,
            codec=SignKeepingInt8() if self.codec == SIGN_KEEPING else study_codec(self.codec),
            min_bytes=0,
            keep_last_layers=0,
        )
        return attach(model, config)


@dataclass(frozen=True)
class Text:
    """Blocks of tokens, and where they are from."""

    train: Blocks
    held_out: Blocks
    name: str

    @classmethod
    def read(cls, sizes: Sizes) -> Text:
        """Tokenise the standard library's sources."""
        corpus = standard_library(sizes.text_mib)
        _, tokens = tokenize_with_own_bpe(corpus.documents, sizes.vocab)
        train, held_out = split_blocks(
            tokens,
            block_size=sizes.tokens,
            eval_fraction=0.05,
            max_eval_blocks=NUM_HELD_OUT_BLOCKS,
        )
        return cls(train, held_out, corpus.name)

    def batches(self, seed: int, num_samples: int) -> Iterator[torch.Tensor]:
        """Yield batches of token ids, (samples, tokens), for ever; they depend on *seed* alone."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            picked = torch.randint(len(self.train), (num_samples,), generator=generator)
            yield torch.stack([self.train[i]["input_ids"] for i in picked.tolist()])


def make_model(model_type: str, sizes: Sizes) -> nn.Module:
    """Return a small model with new weights, in training mode, its dropout as the family has it."""
    hidden, common = sizes.hidden, {"vocab_size": sizes.vocab, "bos_token_id": 0, "eos_token_id": 0}
    shape = {
        "opt": {"word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden, "pad_token_id": 1},
        "gpt2": {},
        "llama": {
            "intermediate_size": 5 * hidden // 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    }[model_type]
    config = AutoConfig.for_model(
        model_type,
        **common,
        **shape,
        hidden_size=hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        max_position_embeddings=sizes.tokens,
    )
    return AutoModelForCausalLM.from_config(config).train()


def loss_of(model: nn.Module, ids: torch.Tensor, precision: str) -> torch.Tensor:
    """Return the model's own loss on a batch of token ids."""
    dtype = AUTOCAST[precision]
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


class Training:
    """One model on its way through one seed's batches."""

    def __init__(
        self, model_type: str, precision: str, seed: int, variant: Variant, text: Text, sizes: Sizes
    ) -> None:
        torch.manual_seed(seed)
        self.model = make_model(model_type, sizes)
        if variant.codec == NUDGED:
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.mul_(1 + NUDGE * noise)
        torch.manual_seed(seed)  # of dropout
        self.precision, self.variant, self.text, self.sizes = precision, variant, text, sizes
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.batches = text.batches(seed, sizes.samples)
        self.losses: list[float] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.num_overflows = 0

    def run(self, num_steps: int) -> None:
        """Train for *num_steps* more."""
        with self.variant.attached(self.model):
            for _ in range(num_steps):
                self._step()

    def _step(self) -> None:
        rate = LEARNING_RATE * min(1.0, (len(self.losses) + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self.model, next(self.batches), self.precision)
        self.losses.append(round(loss.item(), 6))
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
        else:
            self._scaled_step(loss, self.scaler)
        self.optimizer.zero_grad()

    def _scaled_step(self, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        scaler.step(self.optimizer)
        scaler.update()
        self.num_overflows += scaler.get_scale() < scale

    def result(self) -> dict[str, Any]:
        """Return the curve, the held-out loss, and a digest of the weights."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return {
            "losses": self.losses,
            "held_out_loss": self._held_out_loss(),
            "weights_sha256": digest.hexdigest()[:16],
        }

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        self.model.eval()
        ids = torch.stack([block["input_ids"] for block in self.text.held_out])
        losses = [loss_of(self.model, part, self.precision).item() for part in ids.split(16)]
        self.model.train()
        return round(statistics.mean(losses), 6)


def difference_to(reference: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Compare two results of one seed; the curve is thinned."""
    pairs = list(zip(result["losses"], reference["losses"], strict=True))
    losses = result.pop("losses")
    chunks = [losses[i : i + THINNED_STEPS] for i in range(0, len(losses), THINNED_STEPS)]
    return {
        **result,
        "thinned_losses": [round(statistics.mean(chunk), 4) for chunk in chunks],
        "mean_abs_difference": statistics.mean(abs(a - b) for a, b in pairs),
        "largest_abs_difference": max(abs(a - b) for a, b in pairs),
        "held_out_difference": result["held_out_loss"] - reference["held_out_loss"],
        "is_bit_identical": result["weights_sha256"] == reference["weights_sha256"]
        and losses == reference["losses"],
    }
