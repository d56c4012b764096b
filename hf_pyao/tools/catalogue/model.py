"""Entries of models: layers, roles, heads, MLPs, attention."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Models: layers, heads, MLPs and attention",
    (
        Entry(
            "no-layers-found",
            "hf_pyao found no list of decoder layers in this model.",
            "Name them: `PyAOConfig(layers=['model.blocks.*'])`, with the path that "
            "`model.named_modules()` shows.",
        ),
        Entry(
            "selects-nothing",
            "A name in `modules` or `recompute_modules` selects no module of a layer: it is "
            "misspelt, or this architecture does not have this role.",
            "Take one of the names in the message. Names are relative to a layer, such as "
            "`mlp.act_fn`, and hold for all layers.",
        ),
        Entry(
            "modules-overlap",
            "A pattern selects a module that the model never calls, such as a list, or two "
            "modules one of which is inside of the other.",
            "Name the elements (`layers.*`) or one of the two.",
        ),
        Entry(
            "module-map",
            "A `ModuleMap` that was given for an architecture has empty, wrong or doubled paths.",
            "Correct the path that the message names; model/map/README.md has examples.",
        ),
        Entry(
            "attached-already",
            "The model has hf_pyao's hooks, or a head loss, with other settings already.",
            "Call `offloader.detach()` (or `uninstall()`) first, or use the same settings.",
        ),
        Entry(
            "head-loss-left",
            "The model keeps its own loss, and its logits take their full memory. The chunked loss "
            "does not understand this head, or something else has changed its forward.",
            "The message has the reason. A fused head (TRL's, Liger's) makes no logits: lower "
            "what layers save instead. With another head, set `head_loss='off'`; compile layers "
            "instead of the whole model.",
        ),
        Entry(
            "mlp-not-tiled",
            "Some MLPs do not run in tiles. Their results are right, and they take their usual "
            "memory.",
            "The message has the reason. If it cannot be changed, set `mlp_tiles='off'`.",
        ),
        Entry(
            "mlp-not-the-same",
            "An MLP was compared on the first batch and mixes tokens on this rank, where another "
            "rank has seen none that meet.",
            "Set `mlp_tiles='off'`.",
        ),
        Entry(
            "attention-not-grouped",
            "Attention of some layers does not run in groups.",
            "Use `attn_implementation='sdpa'` and 16-bit tensors, or drop `attention_groups`.",
        ),
        Entry(
            "logits-after-change",
            "`outputs.logits` was read after the optimizer step, and the logits of the forward "
            "can no longer be computed.",
            "Read logits before the step, or set `head_loss='off'`.",
        ),
        Entry(
            "logits-gradient",
            "The script asks for the gradient of the loss with respect to logits. The chunked loss "
            "never had the logits in its graph.",
            "Set `head_loss='off'` for such training.",
        ),
        Entry(
            "backward-twice",
            "Backward ran twice through one loss, and the first one used its gradients up.",
            "Pass `retain_graph=True` to the first backward.",
        ),
        Entry(
            "second-derivatives",
            "The script differentiates gradients (`create_graph=True`). Chunked loss, MLP tiles "
            "and attention in groups keep no graph of them.",
            "Set `head_loss='off'`, `mlp_tiles='off'`, `attention_groups='off'`.",
        ),
        Entry(
            "experts-all-at-once",
            "The weights of a mixture's experts are streamed in groups, and the model reads all of "
            "them at once.",
            "Load the model with `experts_implementation='grouped_mm'`, or set "
            "`stream_weights='off'`.",
        ),
        Entry(
            "noise-after-save",
            "An `nn.RReLU` writes its noise after autograd has saved it. A copy made in between "
            "would be wrong.",
            "Use another activation, or freeze the module with `eval()`.",
        ),
    ),
)
