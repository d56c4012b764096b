"""The ways to train that are estimated."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.config import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.tools.estimate.verdict_text import CHUNKED


@dataclass(frozen=True)
class Way:
    """A way to train, without or with the chunked loss."""

    name: str
    policy: str = "off"
    """As ``PyAOConfig.policy``. ``"budget"`` offloads as much as forward compute hides."""
    checkpointing: bool = False
    streams: bool = False
    """Streams frozen weights too, as many as is fastest."""
    levers: Levers | None = None
    """What changes the step itself; None: only the loss that is asked for does."""

    def levers_with(self, head_loss: str) -> Levers:
        """Return what changes the step, with *head_loss* where nothing is said of it."""
        return Levers(head_loss=head_loss) if self.levers is None else self.levers

    def name_with(self, head_loss: str) -> str:
        """Return what rows call it."""
        is_plain = head_loss == "off" or self.levers is not None
        return self.name if is_plain else self.name + CHUNKED


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


@dataclass(frozen=True)
class Family:
    """Steps that run the same operations, whatever is offloaded of them."""

    checkpointing: bool
    levers: Levers
    follows_rule: bool = False
    """PyAO's rule recomputes something."""
    is_other: bool = False
    """Its levers are looked at beside those that were asked for."""
