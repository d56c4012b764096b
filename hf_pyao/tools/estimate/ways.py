"""The ways to train that are estimated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_pyao.config import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.predictor.way import Way
from hf_pyao.tools.estimate.verdict_text import CHUNKED

WAYS = (
    Way("none"),
    Way("checkpointing", checkpointing=True),
    Way("policy all", "all"),
    Way("policy pyao", "pyao"),
    Way("policy budget", "budget"),
)
"""What is recorded and predicted as it is named."""

AUTO = Way("policy auto", "auto")
"""The fastest plan that fits."""

STREAMED = Way("policy auto, streamed weights", "auto", streams=True)
"""The same where frozen weights may be streamed."""

ALL_WAYS = (*WAYS, AUTO)
"""What is compared, without and with the chunked loss."""

LONG_CONTEXT = Way(
    "long context", "all", levers=Levers.of(PyAOConfig(policy="all", long_context=True))
)
"""``PyAOConfig.long_context``: chunked loss, tiled MLPs, layer inputs and attention offloaded."""


def chunked(way: Way) -> Way:
    """Return *way* with the chunked loss."""
    return dataclasses.replace(way, name=way.name + CHUNKED, levers=Levers(head_loss="chunked"))


METHODS = {
    way.name: way
    for way in (*ALL_WAYS, STREAMED, *map(chunked, (*ALL_WAYS, STREAMED)), LONG_CONTEXT)
}
"""By what rows of estimates are called, in their order."""


@dataclass(frozen=True)
class Family:
    """Steps that run the same operations, whatever is offloaded of them."""

    checkpointing: bool
    levers: Levers
    follows_rule: bool = False
    """PyAO's rule recomputes something."""
    is_other: bool = False
    """Its levers are looked at beside those that were asked for."""
