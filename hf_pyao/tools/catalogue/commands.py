"""Entries of the commands of ``pyao``."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Commands",
    (
        Entry(
            "model-spec",
            "A command does not understand the model that was named.",
            "Write `llama:hidden_size=64,num_hidden_layers=2`, a size that is known by name "
            "(`opt:1.3b`), or a folder with a `config.json`.",
        ),
        Entry(
            "model-not-run",
            "A model cannot run on tensors without values, which predictions need.",
            "Measure it instead: `pyao profile train.py`.",
        ),
        Entry(
            "nothing-measured",
            "`pyao profile` ran a script in which no model was trained, or none that hf_pyao can "
            "attach to.",
            "The message has the reason. The script must run forward and backward of a model "
            "with layers in this process.",
        ),
        Entry(
            "nothing-advised",
            "`pyao advise` ran a script in which no model with layers was trained in this process.",
            "Check that the script trains with these arguments: forward of a model in training "
            "mode, with gradients. Run it without `torchrun` or `accelerate launch`.",
        ),
        Entry(
            "writes-not-forbidden",
            "`pyao advise` has the kernel forbid a script to write, and this system cannot.",
            "Use Linux with Landlock (5.13 or later; a container or its seccomp profile may hide "
            "it), or give `--unprotected` for a script that may write.",
        ),
        Entry(
            "bench-model-too-large",
            "The weights of the model that is to be measured do not fit beside their gradients.",
            "Take fewer layers or a smaller dtype.",
        ),
        Entry(
            "bench-process",
            "The process that looks at the device failed.",
            "The message has its last lines. `pyao doctor` looks at the machine step by step.",
        ),
    ),
)
