"""Entries of plans and predictions."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Plans and predictions",
    (
        Entry(
            "plan-invalid",
            "A plan contradicts itself, or names something in a wrong form. Usually it was "
            "edited by hand.",
            "Correct what the message names, or make the plan anew with `pyao plan`.",
        ),
        Entry(
            "plan-other-model",
            "The plan was made for another model: other layers, or other modules inside of them.",
            "Make a plan for this model.",
        ),
        Entry(
            "plan-other-settings",
            "The plan was made with settings that this run does not have.",
            "Use the settings that the message names, or make a plan for this configuration.",
        ),
        Entry(
            "plan-other-sizes",
            "A tensor is larger than when the plan was made: longer sequences or more samples.",
            "Make the plan with the largest batch of the run.",
        ),
        Entry(
            "no-plan-fits",
            "By prediction the step does not fit into the given memory, whatever is moved or "
            "computed again.",
            "Take what the message lists: a smaller micro-batch, adapters, an optimizer with "
            "smaller states, streamed weights, a larger device.",
        ),
        Entry(
            "speeds-unknown",
            "A prediction needs the speed of a device or link that is neither known nor measured.",
            "Give `--device CARD`, `--link 25GiB/s` or `--tflop-per-s`.",
        ),
        Entry(
            "length-too-long",
            "The sequence length exceeds the positions of the model.",
            "Give a shorter one, or a model with more positions.",
        ),
        Entry(
            "other-operations",
            "The step runs other operations at another size, so that a recorded step cannot be "
            "scaled to it.",
            "Nothing: it is recorded at the size that is wanted.",
        ),
        Entry(
            "replayed-device-full",
            "A replay of the caching allocator ran out of the predicted device's memory.",
            "Nothing: the prediction then says that the step does not fit.",
        ),
    ),
)
