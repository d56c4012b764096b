"""Small models and one training step, for tests that run thousands of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

ARCHITECTURES = ("opt", "gpt2", "llama")

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make_model(architecture: str, num_layers: int = 3) -> nn.Module:
    """Build a tiny causal LM with fixed weights, without dropout, in training mode."""
    torch.manual_seed(0)
    if architecture == "opt":
        config = OPTConfig(
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            vocab_size=32,
            max_position_embeddings=32,
            dropout=0.0,
            **_TOKENS,
        )
    elif architecture == "gpt2":
        config = GPT2Config(
            n_embd=16,
            n_layer=num_layers,
            n_head=2,
            vocab_size=32,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **_TOKENS,
        )
    else:
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
            max_position_embeddings=32,
            **_TOKENS,
        )
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).train()


@dataclass
class Result:
    """Losses and gradients of one scenario."""

    values: list[torch.Tensor]

    def difference_from(self, other: Result) -> str | None:
        """Name the first value that is not bit for bit the same, or None."""
        for index, (mine, theirs) in enumerate(zip(self.values, other.values, strict=True)):
            if not torch.equal(mine, theirs):
                return f"value {index} of {len(self.values)} differs"
        return None


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _inputs(seed: int, length: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 32, (2, length), generator=generator)


def three_steps(model: nn.Module) -> Result:
    """Micro-batches of two lengths: host buffers are reused for the same and for other tensors."""
    model.zero_grad()
    values = []
    for seed, length in ((1, 8), (2, 6), (3, 8)):
        ids = _inputs(seed, length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        values.append(loss.detach())
    return Result(values + _gradients(model))


def retained_graph(model: nn.Module) -> Result:
    """Two backward passes over one graph, then a partial one that stops half-way."""
    model.zero_grad()
    ids = _inputs(3)
    output = model(input_ids=ids, labels=ids, output_hidden_states=True)
    output.loss.backward(retain_graph=True)
    output.loss.backward(retain_graph=True)
    (middle,) = torch.autograd.grad(output.loss, output.hidden_states[-2])
    return Result([output.loss.detach(), middle, *_gradients(model)])


def two_forwards(model: nn.Module) -> Result:
    """Two forwards, then their backward passes in forward order (the unusual one)."""
    model.zero_grad()
    losses = [model(input_ids=_inputs(s), labels=_inputs(s)).loss for s in (4, 5)]
    for loss in losses:
        loss.backward()
    return Result([loss.detach() for loss in losses] + _gradients(model))


SCENARIOS: dict[str, Callable[[nn.Module], Result]] = {
    "three steps": three_steps,
    "retained graph": retained_graph,
    "two forwards": two_forwards,
}


def make_pair(architecture: str) -> tuple[nn.Module, nn.Module]:
    """Return a model to attach to, and a copy that never sees hf_pyao."""
    model = make_model(architecture)
    return model, copy.deepcopy(model)
