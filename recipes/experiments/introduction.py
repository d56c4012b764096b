"""What stands on the page above all figures."""

from __future__ import annotations

from experiments import published
from experiments.communication import find_engine
from experiments.page import bullets, paragraph

MICRO_STEPS = 4


def introduction() -> str:
    """Return the page's first part."""
    zero2, zero1, ddp = (
        find_engine(name).passes(MICRO_STEPS) for name in ("zero2", "zero1", "ddp")
    )
    small, large = published.MICRO_BATCHES["gpt2"]
    return "\n\n".join(
        [
            "# The papers' figures and tables",
            paragraph(
                "`python recipes/experiments/run.py NAME` runs each: `--predict` takes hf_pyao's "
                "predictor and the "
                "communication model, for the paper's hardware; `--miniature` runs small models "
                "on this CPU or reads what the local cluster measured; `--real` takes the "
                "accelerator that is there, and refuses in one line where there is none; `--smoke` "
                "says in seconds whether it runs. Each row names its mode. **Nothing on "
                "this page was measured on a GPU.** A paper's value stands here only if it is in "
                "its text: what a plot or a table's picture has alone is 'not in the text'."
            ),
            paragraph(
                '\'PyAO\' rows are `policy="pyao", window="layer", keep_last_layers=1`, with '
                "`identity` and with `int8`. The page is written by `python "
                "recipes/experiments/write_page.py` from the result files; so are all numbers in "
                "its sentences, and a test compares the two."
            ),
            "## What the results say, before the numbers",
            bullets(
                [
                    "**ZeRO-2 reduces gradients at every micro-step.** So accumulation does not "
                    "amortise its communication, and a larger micro-batch does: with "
                    f"{MICRO_STEPS} micro-steps it sends the gradient's bytes {zero2:g} times, "
                    f"DDP {ddp:g} and ZeRO-1 {zero1:g} times. PyAO's speedup over Ethernet rests "
                    "on that.",
                    "**Under DDP or ZeRO-1 plain gradient accumulation gives the same saving "
                    "without offloading**, where their gradients fit beside the activations.",
                    "One way to count '256 micro-batches' (over all nodes, accumulated into one "
                    "step) comes near the paper for OPT and Llama under assumed compute. It was "
                    "chosen afterwards among several, and proves nothing.",
                    f"GPT-2's {published.SPEEDUPS['gpt2']:g} exceeds {large}/{small}, the ratio of "
                    "its micro-batches, and is not explainable by the stated limits. The "
                    'abstract\'s "up to 2.5x" larger micro-batches contradicts '
                    f"{small} -> {large}.",
                    "Checkpointing reaches PyAO's micro-batches; what offloading saves over it is "
                    "time, and over a slow network that is a small part of a step. The chunked "
                    "loss allows far larger micro-batches than either.",
                ]
            ),
            paragraph(
                "Peaks and times beside more published figures, one by one: "
                "[PUBLISHED.md](../../hf_pyao/tools/estimate/PUBLISHED.md)."
            ),
        ]
    )
