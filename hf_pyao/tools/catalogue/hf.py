"""Entries of Trainer, Accelerate and TRL."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Trainer, Accelerate and TRL",
    (
        Entry(
            "mixin-order",
            "Our class stands after the other one among the bases, whose methods hide ours.",
            "Write ours first: `class MyTrainer(PyAOTrainerMixin, SFTTrainer)`, "
            "`class MyArguments(PyAOArguments, SFTConfig)`.",
        ),
        Entry(
            "plugin-bound",
            "One `PyAOPlugin` was given to two Accelerators.",
            "Make one for each, or call `unbind()` first.",
        ),
        Entry(
            "micro-batch-conflict",
            "`auto_micro_batch` cannot be combined with a setting, a policy or a way to shard "
            "that the message names.",
            "Drop one of the two; `pyao estimate --find micro-batch` predicts a micro-batch for "
            "one device.",
        ),
        Entry(
            "micro-batch-trainer",
            "`auto_micro_batch` needs a Trainer that can change its batch size.",
            "Train with `PyAOTrainer`, or use `pyao estimate --find micro-batch` and set the "
            "size yourself.",
        ),
        Entry(
            "micro-batch-data",
            "`auto_micro_batch` reads some training samples first, and the dataset is empty or "
            "can only be iterated.",
            "Use a dataset with length and index, or set the batch size yourself.",
        ),
        Entry(
            "micro-batch-trial",
            "A step cannot be tried without side effects: something steps in backward, or has a "
            "state that cannot be put back.",
            "Drop `auto_micro_batch`, or what the message names.",
        ),
        Entry(
            "micro-batch-not-chosen",
            "No micro-batch was found that fits.",
            "Take shorter sequences, `head_loss='chunked'`, adapters, or a larger device.",
        ),
        Entry(
            "disk-writes-too-much",
            "The steps that are to come would write more saved tensors to the disk than "
            "`disk_write_limit` allows. Nothing was trained.",
            "Give `checkpoint_every`, which divides the bytes, train fewer steps, or raise "
            "`disk_write_limit` if the drive endures it (TBW in its data sheet).",
        ),
        Entry(
            "one-copy-setup",
            "`one_copy_per_node` was entered before the process group exists, or this version of "
            "transformers loads models in another way.",
            "Make the Accelerator or TrainingArguments first; otherwise load the model without it.",
        ),
        Entry(
            "one-copy-model",
            "The processes of a node do not load the same model, or its tensors cannot be shared.",
            "Load the same model in each rank, dense and on the CPU, without a device map.",
        ),
        Entry(
            "one-copy-rank-lost",
            "A process of the node has failed, or did not enter `one_copy_per_node` in time.",
            "Enter it on each rank at the same place, and look at the log of the rank that the "
            "message names.",
        ),
    ),
)
