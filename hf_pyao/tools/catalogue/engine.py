"""Entries of the engine: saved tensors, host memory, second runs, streamed weights."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Saved tensors, host memory and streamed weights",
    (
        Entry(
            "changed-in-place",
            "A tensor that backward needs was changed in place after autograd had saved it. "
            "Without hf_pyao, torch raises the same error.",
            "Use the out-of-place operation (`x = x + y` in place of `x += y`), or clone the "
            "tensor before the change.",
        ),
        Entry(
            "changed-before-second-run",
            "A layer or a part of it runs again in backward, and an input, a parameter or a state "
            "that it reads has changed since its forward. With the new value the gradients would "
            "be wrong.",
            "Run backward before the optimizer step, and clone what is changed in place. If the "
            "model changes its own state in forward, set `checkpoint_every=0`, `mlp_tiles='off'` "
            "or drop `recompute_modules`.",
        ),
        Entry(
            "recompute-differs",
            "A layer ran again in backward, and computed other tensors than in forward: it reads "
            "something that changes from run to run, such as a counter or a global variable.",
            "Make the layer compute the same from the same inputs, or set `checkpoint_every=0` "
            "(for a part of a layer: take it out of `recompute_modules`).",
        ),
        Entry(
            "buffers-given-back",
            "Backward ran after the offloader had been detached, which gave the buffers of its "
            "saved tensors back.",
            "Call backward first, then `offloader.detach()`.",
        ),
        Entry(
            "nothing-offloaded",
            "The model trains, and no saved tensor leaves the device. The message has what was "
            "seen and why.",
            "See [Nothing is offloaded](#nothing-is-offloaded).",
        ),
        Entry(
            "no-effect",
            "A setting is on, training goes on, and the setting did nothing.",
            "The message ends with its remedy. If nothing can be done, drop the setting.",
        ),
        Entry(
            "second-thread",
            "A thread ran a training forward of the model while another thread's forward or "
            "backward was under way, or its graph still waited for a backward. One thread is "
            "served at a time. Results are right.",
            "Run micro-batches one after the other. If a loss or an output of another thread is "
            "still held and not needed, let go of it.",
        ),
        Entry(
            "layer-inside-layer",
            "A layer was entered while another one had not ended. Either layers call each other, "
            "or a forward was left by an exception that was caught.",
            "Name only the outer modules in `PyAOConfig(layers=...)`.",
        ),
        Entry(
            "hooks-taken-down",
            "Code inside of a layer removed the saved-tensor hooks that hf_pyao had set. What the "
            "layer saves from there on stays on the device; results are right.",
            "Look for `torch.autograd.graph` hooks in the model, or in a library that changes it.",
        ),
        Entry(
            "hooks-forbidden",
            "A layer runs a part of its forward where torch allows no saved-tensor hooks: "
            "`torch.func.grad`, `vjp`, `jacrev` do that.",
            "Attach with `PyAOConfig(layers=...)` to modules that do not contain this part.",
        ),
        Entry(
            "layer-not-checkpointed",
            "With `checkpoint_every`, this layer does not run again in backward. It saves its "
            "tensors as usual, which takes more memory.",
            "The message has the reason. A compiled layer can be compiled after it was attached; "
            "otherwise nothing needs to be done.",
        ),
        Entry(
            "host-memory-full",
            "The pool of host memory reached its limit. What finds no room stays on the device.",
            "Raise `host_memory_gib` if the machine has more, or offload less: a budget, or "
            "`codec='int8'`. See [Host memory fills](#host-memory-fills).",
        ),
        Entry(
            "host-memory-refused",
            "The machine refused a large piece of host memory. Offloading goes on with smaller "
            "ones.",
            "Its memory is nearly used up: lower `host_memory_gib`, or end other processes. "
            "See [Host memory fills](#host-memory-fills).",
        ),
        Entry(
            "host-memory-not-pinned",
            "Host memory cannot be locked (pinned). Copies from pageable memory do not overlap "
            "with compute, so that each step takes longer.",
            "Raise the limit of locked memory (`ulimit -l unlimited`; in Docker "
            "`--ulimit memlock=-1`), or lower `host_memory_gib`. `pyao doctor` tests it.",
        ),
        Entry(
            "disk",
            "A file on the disk cannot be written or read: the disk is full, read-only or fails, "
            "or the file does not hold what was written to it (checksum).",
            "The message has the file and the system's reason. Make room, or give another folder. "
            "A damaged file may be removed: the next run writes it again.",
        ),
        Entry(
            "disk-folder",
            "The folder for files on the disk cannot be used: it cannot be written to, is in "
            "memory (tmpfs), or is a link or another user's; or the system does not tell which "
            "pages of a mapped file were written, which frozen weights on a disk need.",
            "Give a folder on a disk that you may write to. `df -T FOLDER` has the file system.",
        ),
        Entry(
            "disk-not-direct",
            "The file system has no direct reads (O_DIRECT). Files are read through the page "
            "cache, which is slower.",
            "Nothing needs to be done. A folder on ext4, XFS or another local file system is "
            "faster.",
        ),
        Entry(
            "disk-read-again",
            "A read failed, or its checksum differed, and it was repeated. Training goes on if "
            "the second read is right.",
            "If this comes again, look at the drive (`dmesg`, `smartctl`).",
        ),
        Entry(
            "disk-full",
            "The disk has no more room for saved tensors, or none is left beside its reserve. What "
            "finds no room stays on the device.",
            "Make room, give `disk_path` another disk, or offload less: `checkpoint_every`.",
        ),
        Entry(
            "disk-stopped",
            "Saved tensors could not be written to the disk, also when it was tried again. They "
            "are still in memory. Nothing more goes to the disk in this run.",
            "Look at the drive (`dmesg`, `smartctl`). Training goes on; it may need more memory.",
        ),
        Entry(
            "disk-write-limit",
            "As many bytes were written to the disk as `disk_write_limit` allows. Training goes on "
            "with what host and device hold.",
            "Give `checkpoint_every`, which divides the bytes, or raise `disk_write_limit` if the "
            "drive endures it (TBW in its data sheet).",
        ),
        Entry(
            "disk-weights-changed",
            "Frozen weights that lie on a disk were changed in place, as by a merge of adapters. "
            "The file stays as it is, since other runs read it.",
            "Merge after `detach()`, on a machine that has the memory, or merge a copy of the "
            "model that was loaded elsewhere. To train with the changed weights, attach again.",
        ),
        Entry(
            "codec-without-triton",
            "Triton could not build the codec's kernels, so that it runs as plain torch: the same "
            "results in more time.",
            "Install the Triton that fits your torch, and a C compiler.",
        ),
        Entry(
            "shared-link",
            "Several models share one link to the host, and would have different limits for what "
            "may be in flight.",
            "Give all of them the same `window`, or detach the others first.",
        ),
        Entry(
            "streamed-weight-changed",
            "A frozen weight that is streamed from the host was changed in place. A change on the "
            "device would be lost with the next upload.",
            "Change weights before forward or after backward, outside of layers, or set "
            "`stream_weights='off'`.",
        ),
        Entry(
            "streamed-weight-trained",
            "A weight that is streamed now requires gradients. Only frozen weights are streamed.",
            "Freeze and thaw before the model is attached; or detach, change it, and attach again.",
        ),
        Entry(
            "streamed-weight-replaced",
            "A streamed weight was given other data, another dtype or another shape.",
            "Change the model before it is attached, or detach first.",
        ),
        Entry(
            "streamed-weight-held",
            "Code keeps a frozen weight longer than its layer runs, for instance an autograd "
            "function on its `ctx`. These bytes stay on the device until backward. A view that a "
            "layer keeps as an attribute is refused: it would not follow changes of the weight.",
            "As a warning: training is right. To save the memory, have the function use "
            "`save_for_backward`, or keep this layer resident with a larger `stream_weights`. As "
            "an error: have the layer make the view anew in each forward.",
        ),
        Entry(
            "streamed-weight-cast",
            "Autocast would cast a streamed weight each time that it is read.",
            "Load the base model in autocast's dtype (`dtype=torch.bfloat16`), or set "
            "`stream_weights='off'`.",
        ),
        Entry(
            "streaming-compiled",
            "Compiled code, or a library such as Accelerate with a device map, reads the weights "
            "by itself, and would not find those that are streamed.",
            "Attach the plain model and train without `torch.compile`, or set "
            "`stream_weights='off'`.",
        ),
        Entry(
            "weights-streamed-late",
            "The device has no room for the weights of a layer that was to stay. They are "
            "streamed.",
            "Nothing, if the speed is fine. Otherwise free device memory.",
        ),
    ),
)
