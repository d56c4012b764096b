"""The parts of the page of troubleshooting that are written by hand."""

from __future__ import annotations

HEAD = """\
# Troubleshooting

For those whose training stopped with an error of hf_pyao, logs a warning of it, or does something that
they did not expect. Each message ends with a key, such as `[pyao:host-memory-full]`: search this page
for it. There are {num_keys} keys. Without a message, begin with what you see:
[it got slower](#it-got-slower), [nothing is offloaded](#nothing-is-offloaded),
[host memory fills](#host-memory-fills), [the loss differs](#the-loss-differs).

`{command}` writes this page from the
[catalogue](tools/catalogue/README.md), the source, and the examples in `tests/catalogue/`; do not
edit it.
"""

SYMPTOMS = """\
## It got slower

1. Compare like with like: the same micro-batch and length with and without hf_pyao, after the first
   20 steps. Policy `auto` measures in the first steps, and makes a plan from that.
2. Run `pyao doctor`. It measures the link to the host. A link of less than about 10 GiB/s (a card in
   a slot with few lanes, a virtual machine) hides few copies behind compute.
3. Look for [host-memory-not-pinned](#host-memory-not-pinned) in the log: copies of pageable memory do
   not overlap with compute.
4. Look for [micro-batch-ran-again](#micro-batch-ran-again): after an out-of-memory error, everything
   is offloaded. A smaller micro-batch, or `checkpoint_every`, may be faster.
5. Look for [offloads-everything](#offloads-everything): `auto` follows no plan. The line has the reason.
6. Offload less: `policy='budget'` with a budget, or policy `auto` with `device_memory_gib`. If the step
   fits without offloading, hf_pyao cannot make it faster: use the memory for a larger micro-batch.
7. With streamed weights, a step takes at least the time of the uploads. Let more layers stay
   (`stream_weights`), or train more tokens per step.

## Nothing is offloaded

The warning [nothing-offloaded](#nothing-offloaded) has the bytes and the reasons. The usual ones:

- The model is in eval mode: `from_pretrained` returns it so. Call `model.train()`.
- Policy `auto` found that everything fits into device memory. That is its job.
- `min_bytes` is larger than the tensors, or `keep_last_layers` is as large as the model.
- `modules` names parts that save nothing of their own; see [selects-nothing](#selects-nothing).
- The device is a CPU: nothing is offloaded there under `auto` without `device_memory_gib`.
- The model was compiled before it was attached, or it runs `layer.forward` itself, past the hooks.
- A plain Trainer got the arguments: use `PyAOTrainer`, the mixin, or the callback.
- Other hooks are set inside of the layers: [hooks-forbidden](#hooks-forbidden),
  [hooks-taken-down](#hooks-taken-down), [other-offloader](#other-offloader).
- The tensors find no room on the host: [host-memory-full](#host-memory-full).

## Host memory fills

- What is offloaded lies in host memory, at most `host_memory_gib`. If the field is open, it is this
  process's share of what is available when training begins.
- Each process of a node has a pool of its own: with eight processes, give an eighth to each.
- Streamed weights are on the host as a whole. Several processes have one copy with
  `one_copy_per_node`; see [weights-copied-per-process](#weights-copied-per-process).
- Pinned memory cannot be swapped. Leave room for data loaders, and for the page cache.
- In a container, the limit of the container counts (`docker run --memory`), and the system ends a
  process that exceeds it without a message.
- To need less: a smaller budget, `codec='int8'`, `recompute_modules`, `checkpoint_every`.
- Memory that grows from step to step: something holds graphs, such as a list of losses. Keep
  `loss.item()` or `loss.detach()`. See also [host-memory-refused](#host-memory-refused).

## The loss differs

Offloading alone does not change a bit of loss or gradients. What may:

- A lossy codec (`codec='int8'` and others) changes gradients, within its bound.
- `head_loss='chunked'`, `mlp_tiles` and `attention_groups` may sum in another order, and round
  differently: LIMITS.md says where. The differences are of the size of a rounding, and do not grow
  faster than with another batch order.
- Kernels that are not deterministic differ from run to run without hf_pyao, too. Compare two runs
  without it first. See [kernels-not-deterministic](#kernels-not-deterministic).
- Layers that run again (`checkpoint_every`, `recompute_modules`) must compute the same twice: see
  [recompute-differs](#recompute-differs) and [second-run-differs](#second-run-differs).
- `auto_micro_batch` changes micro-batch and accumulation; the global batch stays. Losses that are
  averages over micro-batches with different numbers of tokens change with that.
- Zeroth order estimates gradients, and is another optimizer.

If none of these is on and the loss differs, that is a defect: please report it with
`pyao doctor --json` and the configuration.
"""
