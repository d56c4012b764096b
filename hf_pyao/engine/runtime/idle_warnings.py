"""Facts that offloading is on and moves nothing: each says why, and what to do."""

from __future__ import annotations

from hf_pyao.engine.runtime.policy import BELOW_MIN_BYTES, LAST_LAYER, NOT_SELECTED
from hf_pyao.engine.stores import HOST_FULL
from hf_pyao.metrics import MicroBatchStats, format_bytes
from hf_pyao.no_effect import OFFLOADING, EffectLedger, NoEffect

_REMEDIES = {
    BELOW_MIN_BYTES: "lower min_bytes, or give the device more to do: a larger micro-batch",
    HOST_FULL: "raise host_memory_gib",
    LAST_LAYER: "lower keep_last_layers",
    NOT_SELECTED: "name in `modules` what saves tensors",
}
"""By reason for keeping; other reasons lie in the model."""

_EXPECTED = "what the layers save for backward leaves the device"


class IdleWarnings:
    """Notes in *effects* the first way in which an engine turns out to move nothing."""

    def __init__(self, effects: EffectLedger) -> None:
        self._effects = effects
        self._has_waited = False

    def all_layers_kept(self, setting: str, num_layers: int) -> None:
        """Note that ``keep_last_layers``, whose name and value are *setting*, leaves no layer."""
        self._note(
            seen=f"{setting} keeps on the device what all {num_layers} layers save",
            reason="only a layer that runs several times in a forward is offloaded, but for its "
            "last run",
            remedy="lower that number",
        )

    def eval_mode(self) -> None:
        """Note that a forward with gradients on ran in eval mode before any training."""
        self._note(
            seen="the model is in eval mode, while gradients are on",
            reason="`from_pretrained` returns models in eval mode, in which nothing is offloaded",
            remedy="call model.train() before training, or use torch.no_grad() to evaluate",
        )

    def nothing_packed(self, *, have_layers_run: bool, passed_over: str = "") -> None:
        """Note that a step went by in which autograd saved nothing in a layer.

        *passed_over* says why hooks stayed off where layers ran.
        """
        if passed_over and not have_layers_run:
            self._note(
                seen="no saved tensor reached hf_pyao in this step",
                reason=passed_over,
                remedy="change what the reason names, or train without hf_pyao",
            )
            return
        self._note(
            seen="the layers ran, and autograd saved nothing in them"
            if have_layers_run
            else "no layer was seen running in training mode in this step",
            reason="compiled code may bypass hooks, a CUDA graph may be replayed, "
            "the model may be in eval mode, it may run `layer.forward` itself, which goes around "
            "hooks, or all its layers may be frozen",
            remedy="call torch._dynamo.reset() and attach before the first compiled step; call "
            "model.train(); name the modules inside the layers with PyAOConfig(layers=...)",
        )

    def nothing_moved(self, stats: MicroBatchStats) -> None:
        """Note that a micro-batch has ended, and all that its layers saved stayed."""
        reasons = sorted(stats.kept_bytes, key=lambda reason: -stats.kept_bytes[reason])
        if not stats.would_hold_bytes or not reasons:  # parameters and buffers alone
            return
        if reasons[0] == LAST_LAYER and not self._has_waited:
            # Which layers run several times in a forward is known from the second one on.
            self._has_waited = True
            return
        named = reasons if reasons[0] == LAST_LAYER else [r for r in reasons if r != LAST_LAYER]
        remedies = [_REMEDIES[reason] for reason in named if reason in _REMEDIES]
        self._note(
            seen=f"all that the layers saved in this micro-batch "
            f"({format_bytes(stats.would_hold_bytes)}) stays on the device",
            reason="; ".join(f"{format_bytes(stats.kept_bytes[r])} {r!r}" for r in reasons),
            remedy="; ".join(remedies) or "train without hf_pyao",
        )

    def _note(self, *, seen: str, reason: str, remedy: str) -> None:
        self._effects.note(
            NoEffect(
                setting=OFFLOADING, expected=_EXPECTED, seen=seen, reason=reason, remedy=remedy
            )
        )
