"""Warnings that offloading is on and does nothing: each says why, and what to do."""

from __future__ import annotations

import logging

from hf_pyao.engine.runtime.policy import BELOW_MIN_BYTES, LAST_LAYER, NOT_SELECTED
from hf_pyao.engine.stores import HOST_FULL
from hf_pyao.metrics import MicroBatchStats, format_bytes

logger = logging.getLogger(__name__)

_REMEDIES = {
    BELOW_MIN_BYTES: "lower min_bytes, or give the device more to do: a larger micro-batch",
    HOST_FULL: "raise host_memory_gib",
    LAST_LAYER: "lower keep_last_layers",
    NOT_SELECTED: "name in `modules` what saves tensors",
}
"""By reason for keeping; other reasons lie in the model."""


class IdleWarnings:
    """Warns, once in all, about the first way in which an engine turns out to do nothing."""

    def __init__(self) -> None:
        self._has_warned = False
        self._has_waited = False

    def all_layers_kept(self, setting: str, num_layers: int) -> None:
        """Warn that ``keep_last_layers``, whose name and value are *setting*, leaves no layer."""
        self._warn(
            f"{setting} keeps on the device what all {num_layers} layers save: nothing is "
            "offloaded, unless a layer runs several times in a forward. Lower that number."
        )

    def eval_mode(self) -> None:
        """Warn that a forward with gradients on ran in eval mode before any training."""
        self._warn(
            "hf_pyao has nothing to offload: the model is in eval mode, as `from_pretrained` "
            "returns it, while gradients are on. Call model.train() before training, or use "
            "torch.no_grad() to evaluate."
        )

    def nothing_packed(self, *, have_layers_run: bool, passed_over: str = "") -> None:
        """Warn that a step went by in which autograd saved nothing in a layer.

        *passed_over* says why hooks stayed off where layers ran.
        """
        if passed_over and not have_layers_run:
            self._warn(f"hf_pyao had nothing to offload in this step: {passed_over}.")
            return
        seen = (
            "the layers ran, and autograd saved nothing in them"
            if have_layers_run
            else "no layer was seen running in training mode"
        )
        self._warn(
            f"hf_pyao had nothing to offload in this step: {seen}. Compiled code may bypass hooks "
            "(call torch._dynamo.reset() and attach before the first compiled step), the model may "
            "be in eval mode (call model.train()), it may run `layer.forward` itself, which goes "
            "around hooks (name the modules inside the layers with PyAOConfig(layers=...)), or all "
            "its layers may be frozen."
        )

    def nothing_moved(self, stats: MicroBatchStats) -> None:
        """Warn that a micro-batch has ended, and all that its layers saved stayed."""
        reasons = sorted(stats.kept_bytes, key=lambda reason: -stats.kept_bytes[reason])
        if not stats.would_hold_bytes or not reasons:  # parameters and buffers alone
            return
        if reasons[0] == LAST_LAYER and not self._has_waited:
            # Which layers run several times in a forward is known from the second one on.
            self._has_waited = True
            return
        remedies = {r: f" ({_REMEDIES[r]})" for r in reasons if r in _REMEDIES}
        if reasons[0] != LAST_LAYER:
            remedies.pop(LAST_LAYER, None)  # it is as it should be
        listed = "; ".join(
            f"{format_bytes(stats.kept_bytes[r])} {r!r}{remedies.get(r, '')}" for r in reasons
        )
        self._warn(
            "hf_pyao offloads nothing: all that the layers saved in this micro-batch "
            f"({format_bytes(stats.would_hold_bytes)}) stays on the device. Reasons: {listed}."
        )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", message)
