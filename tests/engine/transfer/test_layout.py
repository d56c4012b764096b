"""Saved tensors come back with their values, shape, strides, dtype and alignment, views included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.transfer.layout import (
    RANGE_ALIGNMENT_BYTES,
    range_to_move,
)
from hf_pyao.errors import ReleasedTensorError
from tests.helpers import EVERY_LAYER, FunctionLayer, RecordingTransport, Stack

Make = Callable[[torch.Tensor], torch.Tensor]


class Probe(torch.autograd.Function):
    """Passes x through; saves tensors in forward and hands them to *sink* in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sink: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.sink = sink
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.sink.append(ctx.saved_tensors)
        return (gradient, None, *(None for _ in ctx.saved_tensors))


class Tagged(torch.Tensor):
    """A subclass that means more than its bytes."""


def base(x: torch.Tensor) -> torch.Tensor:
    return (x.detach().repeat(8, 8) + torch.arange(32.0)).contiguous()


MOVED: dict[str, Make] = {
    "contiguous": lambda x: base(x),
    "transposed": lambda x: base(x).t(),
    "every second column": lambda x: base(x)[:, ::2],
    "one column": lambda x: base(x)[:, 3],
    "odd offset": lambda x: base(x).view(-1)[5:1000],
    "expanded": lambda x: base(x)[:, :1].expand(32, 77),
    "overlapping windows": lambda x: base(x).view(-1).unfold(0, 8, 3),
    "channels last": lambda x: base(x).view(2, 4, 8, 16).to(memory_format=torch.channels_last),
    "one number": lambda x: base(x).sum(),
    "bool": lambda x: base(x) > 3,
    "int64": lambda x: base(x).long(),
    "float16": lambda x: base(x).half(),
    "bfloat16 view at an odd offset": lambda x: base(x).bfloat16().view(-1)[3:500].view(7, 71),
    "complex": lambda x: torch.complex(base(x), base(x) + 1),
    "permuted": lambda x: base(x).view(2, 4, 8, 16).permute(3, 1, 0, 2),
    "float8": lambda x: base(x).to(torch.float8_e4m3fn),
}
KEPT: dict[str, tuple[Make, str]] = {
    "conjugate": (lambda x: torch.complex(base(x), base(x) + 1).conj(), "unsupported layout"),
    "negative": (lambda x: torch.complex(base(x), base(x)).conj().imag, "unsupported layout"),
    "sparse": (lambda x: (base(x) * torch.eye(32)).to_sparse(), "unsupported layout"),
    "subclass": (lambda x: base(x).as_subclass(Tagged), "tensor subclass"),
    "no elements": (lambda x: base(x)[:0], "empty"),
    "no storage": (lambda x: torch.empty(0, 3), "empty"),
}


def probe(
    make: Make, transport: RecordingTransport | None = None
) -> tuple[torch.Tensor, torch.Tensor, Any, list[tuple[str, torch.Tensor]]]:
    """Send what *make* makes through an attached layer; return it, what came back, and figures."""
    sink: list[Any] = []
    original: list[torch.Tensor] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        tensor = make(x)
        original.append(tensor)
        return Probe.apply(x * layer.weight, sink, tensor)  # type: ignore[no-any-return]

    model = Stack(function)
    transport = transport or RecordingTransport()
    with attach(model, EVERY_LAYER, transport=transport) as offloader:
        model(torch.randn(4, 4)).sum().backward()
        stats = offloader.engine.figures.last
        assert offloader.host_pool.settle() == 0
    (tensor,) = sink[0]
    return original[0], tensor, stats, transport.sources


def assert_same_layout(found: torch.Tensor, original: torch.Tensor) -> None:
    assert type(found) is type(original)
    assert found.dtype is original.dtype
    assert found.device == original.device
    assert found.layout is original.layout
    assert found.size() == original.size()
    if found.layout is torch.strided:
        assert found.stride() == original.stride()
        assert found.is_conj() == original.is_conj()
        assert found.is_neg() == original.is_neg()
        assert found.data_ptr() % 64 == original.data_ptr() % 64
        as_bytes = [t.resolve_conj().resolve_neg().contiguous() for t in (found, original)]
        assert torch.equal(*(t.view(-1).view(torch.uint8) for t in as_bytes))
    else:
        assert torch.equal(found.to_dense(), original.to_dense())


@pytest.mark.parametrize("kind", MOVED)
def test_moved_tensors_come_back_as_they_were(kind: str) -> None:
    original, found, stats, sources = probe(MOVED[kind])
    assert_same_layout(found, original)
    assert found.untyped_storage()._cdata != original.untyped_storage()._cdata, "it never moved"
    start, end = range_to_move(original, original.untyped_storage().nbytes())
    assert end - start in [source.numel() for _, source in sources]
    assert stats.reloaded_bytes == stats.offloaded_bytes


@pytest.mark.parametrize(
    "bits",
    [[0x7FC00001, 0x7F800001, 0xFFFFFFFF - 2**32, 0x80000000 - 2**32, 1], [0, 0x00FF, 0x7F81]],
    ids=["float32", "bfloat16"],
)
def test_every_bit_comes_back(bits: list[int]) -> None:
    kinds = {5: (torch.int32, torch.float32), 3: (torch.int16, torch.bfloat16)}
    integer, floating = kinds[len(bits)]

    def make(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(bits * 7, dtype=integer).view(floating).clone()

    original, found, _, _ = probe(make)  # NaNs with a payload, signalling ones, -0, denormals
    assert torch.equal(found.view(integer), torch.tensor(bits * 7, dtype=integer))
    assert torch.equal(original.view(integer), found.view(integer))


@pytest.mark.parametrize("kind", KEPT)
def test_kept_tensors_come_back_as_they_were_and_are_counted(kind: str) -> None:
    make, reason = KEPT[kind]
    original, found, stats, _ = probe(make)
    assert_same_layout(found, original)
    assert reason in stats.kept_bytes
    if reason == "unsupported layout" and original.layout is torch.strided:
        assert stats.kept_bytes[reason] == original.numel() * original.element_size()


def test_a_small_view_of_a_huge_storage_moves_the_view_alone() -> None:
    huge: list[torch.Tensor] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        huge.append(torch.arange(1_000_000, dtype=torch.float32) + x.detach().sum())
        return huge[0][777_777:777_809].view(4, 8)

    original, found, stats, sources = probe(make)
    assert_same_layout(found, original)
    assert found.untyped_storage().nbytes() < 32 * 4 + RANGE_ALIGNMENT_BYTES
    assert max(source.numel() for _, source in sources) < 1024
    # Autograd would keep all of it alive for the view's sake.
    assert stats.would_hold_bytes >= huge[0].untyped_storage().nbytes()


def test_a_storage_whose_memory_was_freed_for_the_time_being_is_left_alone() -> None:
    # As sharding frees gathered memory, to fill it again before backward.
    freed: list[torch.Tensor] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        freed.append(base(x))
        freed[0].untyped_storage().resize_(0)
        return freed[0]

    _, found, stats, _ = probe(make)
    assert found.untyped_storage()._cdata == freed[0].untyped_storage()._cdata
    assert stats.kept_bytes["empty"] == 0


def test_views_of_one_storage_share_one_copy_and_one_reloaded_storage() -> None:
    sink: list[Any] = []

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        whole = base(x)
        parts = (whole[:, :16], whole.t(), whole[3:], whole.view(-1)[7:900])
        return Probe.apply(x * layer.weight, sink, *parts)  # type: ignore[no-any-return]

    model = Stack(function)
    transport = RecordingTransport()
    with attach(model, EVERY_LAYER, transport=transport):
        model(torch.randn(4, 4)).sum().backward()
    storages = {tensor.untyped_storage()._cdata for tensor in sink[0]}
    assert len(storages) == 1
    assert [source.numel() for _, source in transport.sources].count(32 * 32 * 4) == 1


def test_asking_for_a_released_tensor_is_an_error() -> None:
    model = Stack(lambda layer, x: torch.relu(x @ layer.weight))
    with attach(model, EVERY_LAYER) as offloader:
        loss = model(torch.randn(4, 4)).sum()
        tape = offloader.engine._tape
        assert tape is not None
        for record in tape.live_records():
            host = record.host
            assert host is not None
            offloader.host_pool.release(host)
            record.host = None
        with pytest.raises(
            ReleasedTensorError, match=r"layers\.0 :[01]: its buffers were given back"
        ):
            loss.backward()
