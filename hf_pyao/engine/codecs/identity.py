"""The codec that changes nothing: bytes cross the link as they are."""

from __future__ import annotations

import torch

from hf_pyao.engine.codecs.base import Encoded, Lossless


class IdentityCodec(Lossless):
    """Moves the bytes unchanged; accepts every dtype."""

    name = "identity"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Accept every dense tensor."""
        return True

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """Return *tensor* itself as the only payload; no copy is made."""
        return Encoded((tensor,), None)

    def decode(self, payload: tuple[torch.Tensor, ...], spec: None) -> torch.Tensor:
        """Return the payload itself."""
        return payload[0]
