"""Checks by value which saved tensors are parameters, and what crosses the link."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import is_fake

from hf_pyao.engine.runtime.packing import Packer
from hf_pyao.engine.runtime.parameters import is_parameter
from hf_pyao.engine.transfer import layout
from hf_pyao.engine.transfer.transport import BlockingTransport

DTYPES = (torch.float32, torch.bfloat16)


class RecogniserAudit:
    """Watches an engine in this process, with the values of all parameters in full as the truth.

    A saved tensor is a parameter if it equals one, or the transpose of one, cast to its dtype. A
    payload holds a parameter if the bytes of one, of its transpose, or of a cast of either to
    float32 or bfloat16 are anywhere in it.

    Args:
        judge: the recogniser that the engine is to use.
    """

    def __init__(self, judge: Callable[..., bool] = is_parameter) -> None:
        self.judge = judge
        self.num_parameters_saved = 0
        self.misses: list[str] = []
        self.false_positives: list[str] = []
        self.parameters_moved: list[str] = []
        self.offloaded_layers: set[str] = set()
        self.offloaded_bytes = 0
        self._parameters: dict[str, torch.Tensor] = {}
        self._by_shape: dict[torch.Size, list[tuple[str, torch.Tensor]]] = {}
        self._payloads: list[bytes] = []

    def learn(self, parameters: dict[str, torch.Tensor]) -> None:
        """Take the full parameters, by name, that the next forward uses."""
        self.close_step()
        self._parameters = parameters
        self._by_shape = {}
        for name, value in parameters.items():
            for form in (value, value.t()) if value.dim() == 2 else (value,):
                self._by_shape.setdefault(form.shape, []).append((name, form))

    @contextlib.contextmanager
    def watching(self) -> Iterator[RecogniserAudit]:
        """Listen to the recogniser's verdicts and to the transport meanwhile."""
        copy = BlockingTransport.offload

        def offload(transport: Any, src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_fake(src):  # a step that is recorded
                return copy(transport, src, *args, **kwargs)
            self._payloads.append(layout.bytes_of(src).numpy().tobytes())
            self.offloaded_bytes += src.nbytes
            self.offloaded_layers.add(str(kwargs["label"]).split()[0])
            return copy(transport, src, *args, **kwargs)

        keep = Packer._keep_parameter

        def keep_parameter(packer: Packer, call: Any, tensor: torch.Tensor) -> Any:
            if type(tensor) is torch.nn.Parameter:  # the recogniser is not asked
                self._note(tensor, True)
            return keep(packer, call, tensor)

        with (
            mock.patch("hf_pyao.engine.runtime.packing.is_parameter", self._judge),
            mock.patch.object(Packer, "_keep_parameter", keep_parameter),
            mock.patch.object(BlockingTransport, "offload", offload),
        ):
            yield self
            self.close_step()

    def close_step(self) -> None:
        """Look for the parameters learnt last in what was moved since."""
        moved = b"".join(self._payloads)
        self._payloads.clear()
        for name, value in self._parameters.items():
            for form in (value, value.t()) if value.dim() == 2 else (value,):
                for dtype in DTYPES:
                    if moved and bytes_of(form.to(dtype)) in moved:
                        self.parameters_moved.append(f"{name} as {dtype} {tuple(form.shape)}")

    def findings(self) -> dict[str, Any]:
        """Return everything that was seen, as plain values."""
        return {
            "num_parameters_saved": self.num_parameters_saved,
            "misses": sorted(set(self.misses)),
            "false_positives": sorted(set(self.false_positives)),
            "parameters_moved": sorted(set(self.parameters_moved)),
            "offloaded_layers": sorted(self.offloaded_layers),
            "offloaded_bytes": self.offloaded_bytes,
        }

    def _judge(self, tensor: torch.Tensor, *args: Any) -> bool:
        verdict = self.judge(tensor, *args)
        self._note(tensor, verdict)
        return verdict

    def _note(self, tensor: torch.Tensor, verdict: bool) -> None:
        if is_fake(tensor):
            return
        truth = [
            name
            for name, form in self._by_shape.get(tensor.shape, ())
            if torch.equal(tensor, form.to(tensor.dtype))
        ]
        self.num_parameters_saved += bool(truth)
        seen = f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
        if truth and not verdict:
            self.misses.append(f"{truth[0]} as {seen}")
        if verdict and not truth:
            self.false_positives.append(seen)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of *tensor* in its logical order, as bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
