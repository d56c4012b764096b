"""Further methods of others, which the board has beside those of ``pyao bench``.

Selective checkpointing and memory budgets of torch, tiles and losses of DeepSpeed and Liger,
Unsloth's checkpointing, Transformer Engine, libraries that stream weights, and zeroth order. Each
is installed by its documented entry, with its defaults where it has some.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from bench.board_trial import OtherAlgorithm
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS
from hf_pyao.tools.bench.peers import (
    Installed,
    MethodUnavailable,
    checkpointing,
    need_accelerator,
    need_package,
)

MEMORY_BUDGET = 0.5
"""Of method ``memory-budget``: the share of what a compiled layer would save (1: all)."""

NUM_TILES = 4
"""Tiles of an MLP, and of a loss: as many for each method."""

PEERS: Mapping[str, str] = MappingProxyType(
    {
        "transformer-engine": "Transformer Engine, default",
        "sac": "torch selective checkpointing, products and attention saved",
        "memory-budget": f"torch activation_memory_budget {MEMORY_BUDGET:g}, layers compiled",
        "deepspeed-tiled-mlp": "DeepSpeed TiledMLP",
        "deepspeed-tiled-loss": "DeepSpeed TiledFusedLogitsLoss",
        "liger-loss": "Liger fused linear cross-entropy",
        "liger-tiled-mlp": "Liger tiled MLP",
        "unsloth": "Unsloth's offloaded checkpointing",
        "ramtorch": "RamTorch OffloadModel, window 2",
        "block-streamer": "BlockStreamer StreamedModel",
        "trainstream": "TrainStream, no quantisation",
        "mezo": "MeZO as published, weights on the device",
        "zeroth-order": "hf_pyao, zeroth order, layers visit",
        "roundpipe": "RoundPipe, synchronous",
    }
)
"""Name on the board -> label. The function that installs it has the name with underscores."""


@contextmanager
def transformer_engine(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Offload all layers but the last by Transformer Engine's default schedule."""
    need_package("transformer_engine", "Transformer Engine")
    if device.type != "cuda":
        raise MethodUnavailable(f"Transformer Engine needs a CUDA device; this one is {device}")
    te = importlib.import_module("transformer_engine.pytorch")
    layers = layers_of(model)
    context, synchronise = te.get_cpu_offload_context(
        enabled=True, num_layers=len(layers) - 1, model_layers=len(layers)
    )

    def offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with context:
                outputs = forward(*args, **kwargs)
            if isinstance(outputs, tuple):
                return (synchronise(outputs[0]), *outputs[1:])
            return synchronise(outputs)

        return run

    with _replaced_forwards({layer: offloaded(layer.forward) for layer in layers}):
        yield Installed(step=nullcontext)


@contextmanager
def sac(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Checkpoint each layer, but save the results of matrix products and attention."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = [
        *(aten.mm.default, aten.addmm.default, aten.bmm.default),
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    with checkpointing(model, context_fn=partial(create_selective_checkpoint_contexts, saved)):
        yield Installed(step=nullcontext)


@contextmanager
def memory_budget(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Compile each layer with an activation memory budget; the compiler chooses what it saves."""
    import torch._functorch.config as config

    # inductor is what a GPU runs; on a CPU the partitioner alone, which needs no C++ compiler.
    backend = "aot_eager_decomp_partition" if device.type == "cpu" else "inductor"
    layers = layers_of(model)
    with config.patch(activation_memory_budget=MEMORY_BUDGET):
        for layer in layers:
            layer.compile(backend=backend)
        try:
            yield Installed(step=nullcontext)
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()


@contextmanager
def deepspeed_tiled_mlp(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Run each MLP over tiles of tokens by DeepSpeed's ``TiledMLP`` (ALST)."""
    ulysses = _deepspeed_ulysses()

    def tiled(mlp: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> Any:
            weights = list(mlp.parameters())
            return ulysses.TiledMLP.apply(lambda _, tile: forward(tile), mlp, x, NUM_TILES, weights)

        return run

    with _replaced_forwards({mlp: tiled(mlp, mlp.forward) for mlp in _mlps_of(model)}):
        yield Installed(step=nullcontext)


@contextmanager
def deepspeed_tiled_loss(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Compute head and loss over tiles of tokens by DeepSpeed's ``TiledFusedLogitsLoss`` (ALST)."""
    ulysses = _deepspeed_ulysses()
    causal_lm: Any = model
    head = causal_lm.get_output_embeddings()
    body = causal_lm.base_model

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = body(input_ids=input_ids).last_hidden_state
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        num_tokens = (shifted != -100).sum()

        # The gradient of the weight is computed in forward: what divides the sum of the tiles
        # afterwards would not reach it.
        def loss_of_tile(_: Any, tile: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = head(tile).float().flatten(0, -2)
            total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            return total / num_tokens

        loss = ulysses.TiledFusedLogitsLoss.apply(
            *(loss_of_tile, head, hidden, shifted, None, NUM_TILES, [head.weight], "sum")
        )
        return types.SimpleNamespace(loss=loss)

    with _replaced_forwards({model: forward}):
        yield Installed(step=nullcontext)


def liger_loss(model: nn.Module, device: torch.device) -> Any:
    """Compute head and loss by Liger's fused linear cross-entropy."""
    return _liger(model, device, fused_linear_cross_entropy=True)


@contextmanager
def _liger(model: nn.Module, device: torch.device, **kernels: bool) -> Iterator[Installed]:
    need_package("liger_kernel", "Liger")
    need_accelerator(device, "Liger's kernels are Triton's")
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = model.config.model_type  # type: ignore[union-attr]
    patch = patches.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if patch is None:
        raise MethodUnavailable(f"Liger has no kernels for {kind} models")
    off = dict.fromkeys(("rope", "cross_entropy", "rms_norm", "layer_norm", "swiglu", "geglu"))
    taken = inspect.signature(patch).parameters
    with _same_attributes(model):
        patch(model=model, **{name: False for name in off if name in taken}, **kernels)
        yield Installed(step=nullcontext)


@contextmanager
def liger_tiled_mlp(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Run each MLP over tiles of tokens by Liger's ``LigerTiledSwiGLUMLP``."""
    need_package("liger_kernel", "Liger")
    need_accelerator(device, "Liger's kernels are Triton's")
    tiled_mlp = importlib.import_module("liger_kernel.transformers").LigerTiledSwiGLUMLP
    forwards = {}
    for mlp in _mlps_of(model):
        if not hasattr(mlp, "gate_proj"):
            raise MethodUnavailable("Liger's tiled MLP is for those with gate_proj, as Llama's")
        twin = tiled_mlp(model.config, num_shards=NUM_TILES)
        twin.gate_proj, twin.up_proj, twin.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        forwards[mlp] = twin.forward
    with _replaced_forwards(forwards):
        yield Installed(step=nullcontext)


@contextmanager
def unsloth(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Checkpoint each layer with its input offloaded, as Unsloth patches torch to do."""
    need_package("unsloth_zoo", "unsloth-zoo")
    need_accelerator(device, "Unsloth's checkpointing copies between a GPU and pinned memory")
    patches = importlib.import_module("unsloth_zoo.gradient_checkpointing")
    patches.patch_unsloth_gradient_checkpointing()
    try:
        with checkpointing(model, use_reentrant=True):
            yield Installed(step=nullcontext)
    finally:
        patches.unpatch_unsloth_gradient_checkpointing()


@contextmanager
def ramtorch(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Stream all weights through a window of two blocks by RamTorch's ``OffloadModel``."""
    need_package("ramtorch", "RamTorch")
    causal_lm: Any = model
    body = causal_lm.base_model
    parts = [getattr(body, name, None) for name in ("embed_tokens", "layers", "norm")]
    embedding, layers, norm = parts
    if embedding is None or layers is None or norm is None:
        raise MethodUnavailable("the board cuts Llama-like models alone into RamTorch's chunks")
    if causal_lm.get_output_embeddings().weight is embedding.weight:
        raise MethodUnavailable("RamTorch holds each chunk's weights; these chunks share one")
    arguments: dict[str, Any] = {}
    chunks = [
        embedding,
        *(_Chunk(layer, arguments) for layer in layers),
        nn.Sequential(norm, causal_lm.get_output_embeddings()),
    ]
    streamed = importlib.import_module("ramtorch").OffloadModel(
        chunks, device=device, window=2, keep_activations=True
    )
    vocabulary = causal_lm.config.vocab_size

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = causal_lm.loss_function(logits, labels, vocabulary)
        return loss

    def run(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        hidden = torch.empty(*ids.shape, causal_lm.config.hidden_size, device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        hidden = hidden.to(embedding.weight.dtype)
        arguments["position_embeddings"] = body.rotary_emb(hidden, positions)
        result = streamed.step(ids, targets=batch["labels"], loss_fn=loss_of)
        streamed.flush_grads()
        loss: torch.Tensor = result.loss
        return loss

    try:
        yield Installed(step=nullcontext, run=run)
    finally:
        streamed.close()


class _Chunk(nn.Module):
    """A decoder layer that takes its further arguments from a dictionary, as one chunk."""

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self._arguments = arguments

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer: (batch, tokens, width) to the same; attention is causal."""
        found = self.layer(hidden, attention_mask=None, **self._arguments)
        return found if isinstance(found, torch.Tensor) else found[0]


@contextmanager
def block_streamer(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Stream the layers' weights by BlockStreamer's ``StreamedModel``."""
    need_package("block_streamer", "BlockStreamer")
    need_accelerator(device, "BlockStreamer streams to a CUDA device")
    body: Any = model.base_model
    layers = body.layers
    streamer = importlib.import_module("block_streamer").StreamedModel
    streamed = streamer(list(layers), device=str(device), prefetch_ahead=1).train()
    body.layers = nn.ModuleList([streamed])
    count = body.config.num_hidden_layers
    body.config.num_hidden_layers = 1
    try:
        yield Installed(step=nullcontext)
    finally:
        body.layers, body.config.num_hidden_layers = layers, count


@contextmanager
def trainstream(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Stream all weights by ``trainstream.wrap``, without quantisation."""
    need_package("trainstream", "TrainStream")
    need_accelerator(device, "TrainStream streams to a CUDA device")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped, _ = importlib.import_module("trainstream").wrap(
        model, optimizer, device=str(device), offload=True, quantize="none"
    )

    def run(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = wrapped(**batch).loss
        torch.autograd.backward(loss)
        return loss

    yield Installed(step=nullcontext, run=run)


@contextmanager
def roundpipe(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Stream layers and their inputs by RoundPipe, each step synchronous."""
    need_package("roundpipe", "RoundPipe")
    need_accelerator(device, "RoundPipe streams to CUDA devices")
    wrapped = importlib.import_module("roundpipe").wrap_model_to_roundpipe(model)

    def run(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = wrapped.forward_backward(
            input_kwargs=dict(batch), label=batch["labels"], loss_fn=lambda output, _: output.loss
        )
        return loss

    yield Installed(step=nullcontext, run=run)


ZEROTH_ORDER = "zeroth order"
"""Of rows whose step is two forwards and an update."""
_RATE, _EPSILON = 1e-6, 1e-3


@contextmanager
def mezo(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Make steps of MeZO (Malladi et al., 2023, algorithm 1), all weights on the device.

    As published: weights are perturbed and updated in place, by noise that is drawn again from a
    seed. Weights have their bits back at the end.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    seeds = iter(range(1 << 30))

    def move(seed: int, scale: float) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        for p in weights:
            z = torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype)
            p.data.add_(z, alpha=scale)

    @torch.no_grad()
    def run(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        seed, losses = next(seeds), []
        for scale in (_EPSILON, -2 * _EPSILON):
            move(seed, scale)
            losses.append(model(**batch).loss)
        move(seed, _EPSILON)
        gradient = float(losses[0] - losses[1]) / (2 * _EPSILON)
        move(seed, -_RATE * gradient)
        loss: torch.Tensor = (losses[0] + losses[1]) / 2
        return loss

    with _same_weights(model):
        yield OtherAlgorithm(
            step=nullcontext,
            run=run,
            algorithm=ZEROTH_ORDER,
            device_weight_bytes=sum(p.nbytes for p in model.parameters()),
        )


@contextmanager
def zeroth_order(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Make steps of zeroth order with hf_pyao's defaults: all layers visit the device."""
    from hf_pyao import ZerothOrder, ZerothOrderSettings, zeroth_order_step

    def run(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return zeroth_order_step(
            model, lambda model: model(**batch).loss, made, learning_rate=_RATE
        )

    settings = ZerothOrderSettings(epsilon=_EPSILON)
    with _same_weights(model), ZerothOrder(model, settings, device=device) as made:
        streamed = {id(weight.ref()) for block in made.blocks for weight in block.weights}
        staying = sum(p.nbytes for p in model.parameters() if id(p) not in streamed)
        slots = NUM_SLOTS * max(block.nbytes for block in made.blocks)
        yield OtherAlgorithm(
            step=nullcontext, run=run, algorithm=ZEROTH_ORDER, device_weight_bytes=staying + slots
        )


@contextmanager
def _same_weights(model: nn.Module) -> Iterator[None]:
    """Give weights their bits back at the end; the copies are on the host."""
    kept = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in kept:
                p.copy_(before)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers, in order."""
    from hf_pyao.model.map.module_map import find_layers

    return [layer for _, layer in find_layers(model).layers]


def _mlps_of(model: nn.Module) -> list[nn.Module]:
    found = [layer.mlp for layer in layers_of(model) if isinstance(layer.mlp, nn.Module)]
    if not found:
        raise MethodUnavailable("no layer has a module called mlp, which is what tiles are made of")
    return found


def _deepspeed_ulysses() -> Any:
    need_package("deepspeed", "DeepSpeed")
    try:
        return importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    except ImportError as error:
        raise MethodUnavailable(f"this DeepSpeed has no ALST, or does not load: {error}") from error


@contextmanager
def _replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give each module another forward meanwhile."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward  # the class's own shows again


@contextmanager
def _same_attributes(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, what was set on the instances of *model*'s modules."""
    before = {module: dict(vars(module)) for module in model.modules()}
    with ExitStack() as stack:
        for module, attributes in before.items():
            stack.callback(_put_back, module, attributes)
        yield


def _put_back(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(attributes)
