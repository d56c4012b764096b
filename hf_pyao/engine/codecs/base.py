"""The codec protocol and the value it produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Encoded:
    """What a codec made of one tensor."""

    payload: tuple[torch.Tensor, ...]
    """Contiguous tensors on the source's device; their bytes are what crosses the link."""
    spec: Any
    """What :meth:`Codec.decode` needs besides the payload: plain Python values, no tensors."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that cross the link."""
        return sum(part.numel() * part.element_size() for part in self.payload)


@runtime_checkable
class Codec(Protocol):
    """Encodes a saved tensor before it leaves the device and decodes it when it is back."""

    name: str
    """The name under which configurations and reports know it."""
    is_lossless: bool
    """True if ``decode(encode(x))`` equals ``x`` bit for bit, NaN payloads included."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* (dense, strided) can be encoded; otherwise identity is used.

        Looks at dtype and shape only, never at values: no wait for the device.
        """
        ...

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """Encode *tensor* on its own device, on the current stream. Does not modify it."""
        ...

    def decode(self, payload: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        """Return a tensor with the values, dtype and shape of the one encoded.

        *payload*: tensors with the shapes and dtypes that :meth:`encode` gave, on the device.
        Runs on the payload's device and the current stream. The result may alias the payload.
        """
        ...


class BoundedCodec(Codec, Protocol):
    """A codec that publishes how far off its values may be; the contract tests hold it to that.

    All of :data:`~hf_pyao.engine.codecs.CODECS` do. A codec of one's own need not.
    """

    @property
    def max_relative_error(self) -> float:
        """Largest ``|decoded - x|`` over the largest finite ``|x|`` that shares x's scale.

        0.0 if lossless. The codec says for which magnitudes it holds; :meth:`error_bound` holds
        for all.
        """
        ...

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest ``|decoded - x|`` that each value of *tensor* may suffer.

        The result has *tensor*'s shape and dtype float64. It is 0 where the value is NaN or
        infinite, and everywhere for a lossless codec: such values come back as they were.
        """
        ...


class Lossless:
    """What every lossless codec publishes about its error."""

    is_lossless = True
    max_relative_error = 0.0

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros of *tensor*'s shape."""
        return torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor*'s values in index order, as one contiguous row outside autograd.

    A view where *tensor* is contiguous already, a copy otherwise.
    """
    return tensor.detach().resolve_neg().contiguous().view(-1)
