"""Entries of a run: what cannot be combined, memory, plans, processes."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "A run: conflicts, memory, plans, processes",
    (
        Entry(
            "data-parallel",
            "`nn.DataParallel` runs replicas of the model in threads of one process, which share "
            "one set of hooks. Trainer uses it when one process sees several GPUs.",
            "Make one GPU visible (`CUDA_VISIBLE_DEVICES=0`), or start one process per GPU with "
            "`torchrun` or `accelerate launch`.",
        ),
        Entry(
            "unified-memory",
            "Host and device share one memory on this machine, as on Apple's chips. Moving "
            "tensors to the host would free nothing.",
            "Train without hf_pyao, with gradient checkpointing if memory is short.",
        ),
        Entry(
            "other-offloader",
            "Another offloader is on: TRL's `activation_offloading`, `save_on_cpu`, transformers' "
            "`offload` for checkpointing. Only the inner one of two gets the tensors.",
            "Switch the other one off, as the message says.",
        ),
        Entry(
            "other-checkpointing",
            "`checkpoint_every` and the model's own gradient checkpointing are both on. Layers "
            "would run twice in backward.",
            "Drop one: `activation_checkpointing=False` (before transformers 5.23: "
            "`gradient_checkpointing=False`), or `checkpoint_every=0`.",
        ),
        Entry(
            "compiled-autograd",
            "Compiled autograd is on. It would trace the hooks that bring saved tensors back.",
            "Set `torch._dynamo.config.compiled_autograd = False`.",
        ),
        Entry(
            "streaming-sharded",
            "Weights are to be streamed, and another engine has them (FSDP, DeepSpeed, tensor "
            "parallelism), or they are not loaded.",
            "Use DDP or one process, or set `stream_weights='off'`.",
        ),
        Entry(
            "nothing-to-stream",
            "Only frozen weights are streamed, and this model has none that can be: all are "
            "trained.",
            "Freeze the base model and train adapters (LoRA), or set `stream_weights='off'`.",
        ),
        Entry(
            "streaming-host-memory",
            "The weights that are to be streamed do not fit into host memory.",
            "Raise `host_memory_gib` if the machine has more, let more layers stay on the device "
            "(a larger `stream_weights`), or quantise the base.",
        ),
        Entry(
            "weights-stay",
            "The host has no room for the weights of a layer, or of embeddings and head. They "
            "stay on the device.",
            "Raise `host_memory_gib`, or end other processes. Nothing, if the device has room.",
        ),
        Entry(
            "weights-keep-places",
            "Some layers' weights lie on a disk and others stay on the device, under "
            "`stream_weights='auto'`. Reads of graphs that are still there may be under way, so "
            "that no layer changes its place.",
            "Nothing while the step fits. Else give `stream_weights=0`, or more `host_memory_gib`.",
        ),
        Entry(
            "weights-copied-per-process",
            "Each process of a node holds its own copy of the streamed weights.",
            "Load the model in `with one_copy_per_node():`, so that the processes share one.",
        ),
        Entry(
            "device-memory-unknown",
            "How much memory the device has is not known here, as on a CPU or in a profile.",
            "Give it: `device_memory_gib`, or `--device-memory 24GiB`.",
        ),
        Entry(
            "out-of-memory",
            "A micro-batch did not fit into device memory, and no tighter way to run it was left. "
            "Model, optimizer and gradients are as they were before the micro-batch.",
            "The message lists what is left: a smaller micro-batch, `checkpoint_every`, "
            "`head_loss='chunked'`, `mlp_tiles`, a quantised base, streamed weights.",
        ),
        Entry(
            "out-of-memory-advice",
            "Training ended for lack of device memory. The message has what was held then, and "
            "the settings that were not in use.",
            "Try them in the order of the message. `pyao estimate` predicts what each saves.",
        ),
        Entry(
            "out-of-memory-not-repeatable",
            "A micro-batch did not fit, and cannot run again: it changed its inputs or weights.",
            "Have the model change a copy of its inputs, or start with a smaller micro-batch.",
        ),
        Entry(
            "micro-batch-ran-again",
            "A micro-batch did not fit into device memory, and ran again in a tighter way. Its "
            "gradients are right. Training goes on with more offloading, which may be slower.",
            "Nothing. If it is too slow, see [It got slower](#it-got-slower).",
        ),
        Entry(
            "second-run-differs",
            "A layer or a micro-batch ran a second time, and did not give the same bits. The "
            "feature that needs the second run is switched off. The gradients were wrong, and an "
            "error comes before the optimizer steps; those of a layer's second run are discarded.",
            "Repeat the step, or leave it out: nothing was repeated by itself, since what made the "
            "layer differ has moved on. Set `torch.use_deterministic_algorithms(True)`, or "
            "`checkpoint_every=0`.",
        ),
        Entry(
            "kernels-not-deterministic",
            "Kernels of a layer give different bits in two runs with the same inputs. Second runs "
            "are compared with a bound there.",
            "Nothing, if you accept what torch itself does. For equal bits: "
            "`torch.use_deterministic_algorithms(True)`.",
        ),
        Entry(
            "offloads-everything",
            "Policy 'auto' or 'pyao' found no plan, or gave its plan up, and offloads all that it "
            "may. Results are right; a step may take longer than it needs.",
            "The message has the reason. Plans need steps of equal kind: pad to a fixed set of "
            "lengths, do not freeze and thaw often, attach the plain model.",
        ),
        Entry(
            "plan-not-adopted",
            "Another plan could not be made or taken up. The run goes on as before.",
            "Nothing. The message has the reason.",
        ),
        Entry(
            "plan-not-followed",
            "A layer did not run as the plan expects. The plan is dropped or made anew.",
            "Nothing. If it comes again and again, choose policy 'all' or 'budget'.",
        ),
        Entry(
            "plan-made-anew",
            "The plan in the file does not hold for this run, and a new one is measured.",
            "Nothing; or delete the file.",
        ),
        Entry(
            "plan-not-written",
            "The plan cannot be written to its file. This run follows it; the next one will "
            "measure again.",
            "Check the path, its permissions and the free space.",
        ),
        Entry(
            "plan-does-not-fit",
            "By prediction no plan fits into device memory. The smallest one is followed.",
            "Predictions are cautious, so that the run may fit. If it does not, take what the "
            "message lists.",
        ),
        Entry(
            "no-tighter-plan",
            "After an out-of-memory error no plan with less memory was found. The next remedy is "
            "tried.",
            "Nothing, if training goes on. Otherwise see the error that follows.",
        ),
        Entry(
            "checkpoint-plan-ignored",
            "The plan in a Trainer's checkpoint is for another model, device or configuration.",
            "Nothing: a new one is made.",
        ),
        Entry(
            "plan-lossy-codec",
            "The plan stores tensors in a lossy format, and this run did not ask for one.",
            "Set the codec that the message names, or delete the plan.",
        ),
        Entry(
            "profile-running",
            "A profile was asked for while another one is being made, or after detaching.",
            "Wait for the first one, or drop `profile` from the configuration.",
        ),
        Entry(
            "profile-other-model",
            "The file holds the profile of another model.",
            "Give another path, or delete the file.",
        ),
        Entry(
            "profile-incomplete",
            "A profile is of fewer steps or ranks than were asked for, or has no recorded step.",
            "Ask for fewer steps (`profile_steps`), train longer, and profile the plain model "
            "in one process.",
        ),
        Entry(
            "ranks-not-told",
            "The processes could not exchange their figures in time. Each goes on with its own.",
            "Nothing, if it comes once. Otherwise a rank is much slower than others, or has "
            "ended: look at its log.",
        ),
        Entry(
            "step-not-recorded",
            "The step cannot be recorded with tensors without values, so that there is no "
            "prediction for it. Policy 'auto' goes on without a plan.",
            "The message has the reason. Forwards that read values of tensors (`.item()`) or hold "
            "tensors in global variables cannot be recorded.",
        ),
        Entry(
            "sequence-parallel-untried",
            "Accelerate's `cp_size` (ring attention) is above 1. It needs a GPU, and hf_pyao was "
            "not run beside it.",
            "Compare the loss of the first steps with that of a run without hf_pyao, or divide "
            "sequences by `sp_size` (Ulysses).",
        ),
        Entry(
            "levers-refused",
            "A plan with other segments, tiles or groups was looked at, and the model cannot run "
            "with them.",
            "Nothing: another plan is chosen. If you gave this setting, drop it.",
        ),
        Entry(
            "zeroth-order-untrained",
            "Zeroth order trains the parameters that require gradients, and there are none.",
            "Call `model.requires_grad_(True)`, or add adapters.",
        ),
        Entry(
            "zeroth-order-ranks",
            "Zeroth order runs one or two passes, and the process group has more processes.",
            "Start it with one process, or with two, which run one pass each.",
        ),
        Entry(
            "zeroth-order-loss",
            "A pass of zeroth order gave a loss that is not finite. The weights stay as they are "
            "in this step.",
            "If it comes again and again, take a smaller learning rate or `epsilon`.",
        ),
        Entry(
            "zeroth-order-resume",
            "The state that is resumed is of another run: another seed, another model, or an "
            "optimizer that uses gradients.",
            "Resume with the same model and the same settings.",
        ),
        Entry(
            "zeroth-order-attached",
            "Zeroth order saves no activations, so an offloader of activations has nothing to do "
            "beside it.",
            "Call `detach()` of the offloader, or `close()` of the `ZerothOrder`, before the other "
            "one begins.",
        ),
        Entry(
            "zeroth-order-model",
            "Something else moves, shards, compiles or streams weights that zeroth order is to "
            "bring to the device.",
            "Load the plain model and give that.",
        ),
        Entry(
            "zeroth-order-threads",
            "Two threads run a step of zeroth order, or another forward, of one model at the same "
            "time. Blocks of weights are on the device for one of them.",
            "Make steps and forwards one after the other.",
        ),
        Entry(
            "zeroth-order-reference",
            "A module keeps references to its weights, which would be read without the "
            "perturbation of zeroth order.",
            "Freeze this module, or replace it by one that reads its weights in forward.",
        ),
    ),
)
