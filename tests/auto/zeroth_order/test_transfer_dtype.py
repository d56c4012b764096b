"""Weights and noise in fewer bytes on their way: bits, bytes and errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.engine.codecs.int8 import Int8Codec
from hf_pyao.engine.transfer.transport import BlockingTransport, LinkTimes
from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.errors import ConfigError
from tests.auto.zeroth_order.test_oddities import LossesOf, Net, Residual, one_random_layer
from tests.auto.zeroth_order.test_step import EPSILON, RATE, check
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.plain_mezo import PlainPackedMeZO


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("opt", "gpt2", "gemma3_text", "bart", "falcon", "t5")
        ),
    ],
)
def test_bits_are_those_of_a_plain_run(architecture: str) -> None:
    model = tiny_model(architecture, dropout=0.1)
    check(model, 4, transfer_dtype="int8", resume_at=2, micro_batches=2, momentum=0.9)


def test_int8_takes_masters_of_16_bits() -> None:
    check(tiny_model("opt", dtype=torch.bfloat16), 3, transfer_dtype="int8", momentum=0.9)


def test_frozen_matrices_travel_in_the_format_too() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name or "norm" in name)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad and ".layers." in n}
    plain = PlainPackedMeZO(model, EPSILON)
    for name, p in frozen.items():  # what passes read of them, and read again, for the plain run
        for _ in range(8):
            p.data = plain.read(name, p.detach())
    check(model, 3, transfer_dtype="int8")


def test_the_noise_of_a_layer_that_was_left_out_is_drawn_on_the_host() -> None:
    torch.manual_seed(2)
    model = Net(Residual)
    plain_model = copy.deepcopy(model)
    plain, losses = PlainPackedMeZO(plain_model, EPSILON, seed=5), LossesOf(one_random_layer)
    torch.manual_seed(3)
    expected = [plain.step(losses, RATE) for _ in range(5)]
    torch.manual_seed(3)
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=5, transfer_dtype="int8")
    with ZerothOrder(model, settings, layers=("layers.*",)) as made:
        for gradient in expected:
            made.accumulate(model, one_random_layer)
            assert made.end_step(RATE) == gradient
    for (key, p), q in zip(plain_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), key


@dataclass(eq=False)
class LateCopy:
    """A copy that is queued."""

    src: torch.Tensor
    dst: torch.Tensor
    after: Sequence[Any]
    nbytes: int = 0
    queue: object = None
    order: int = 0
    compute: None = None
    is_done: bool = field(default=False)

    def run(self) -> None:
        if not self.is_done:
            self.is_done = True
            for each in self.after:
                each.run()
            self.dst.copy_(self.src)


class LateTransport(BlockingTransport):
    """Copies as someone waits for the copy, or for one behind it, and never before."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0

    def offload(self, src: Any, dst: Any, *, after: Any = (), **_: Any) -> Any:
        return LateCopy(src, dst, tuple(after))

    def reload(
        self,
        src: Any,
        dst: Any,
        *,
        after: Any = (),
        label: object = "",
        times: LinkTimes | None = None,
    ) -> Any:
        return LateCopy(src, dst, tuple(after))

    def wait(self, ticket: Any) -> None:
        self.num_waiting += not ticket.is_done
        ticket.run()

    def retire(self, ticket: Any) -> None:
        ticket.run()

    def await_on_host(self, ticket: Any) -> None:
        ticket.run()

    def is_done(self, ticket: Any) -> bool:
        return bool(ticket.is_done)


@pytest.mark.parametrize("transfer_dtype", [None, "int8"])
def test_copies_that_run_as_late_as_they_may(transfer_dtype: str | None) -> None:
    model = tiny_model("llama", dropout=0.1, num_hidden_layers=5)
    transport = LateTransport()
    check(model, 4, transfer_dtype=transfer_dtype, transport=transport)
    assert transport.num_waiting > 0


def test_both_copies_have_a_quarter_of_the_bytes() -> None:
    def bytes_of(chosen: str | None) -> tuple[int, int]:
        model = tiny_model("llama", num_hidden_layers=6, hidden_size=256, intermediate_size=512)
        settings = ZerothOrderSettings(transfer_dtype=chosen)
        batch = tiny_batch(0)
        with ZerothOrder(model, settings) as made:
            for _ in range(4):
                made.accumulate(model, lambda model: model(**batch).loss)
                made.end_step(RATE)
            before = made.figures()
            made.accumulate(model, lambda model: model(**batch).loss)
            after = made.figures()
            made.end_step(RATE)
            assert after["num_uploads"] - before["num_uploads"] == 2 * 6
            names = ("uploaded_bytes", "offloaded_bytes")
            return tuple(after[name] - before[name] for name in names)  # type: ignore[return-value]

    for whole, packed in zip(bytes_of(None), bytes_of("int8"), strict=True):
        assert whole / 4 <= packed <= 1.03 * whole / 4


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    nbytes = int8_transfer.packed_nbytes(matrix.size(), matrix.dtype)
    memory = torch.empty(nbytes, dtype=torch.uint8)
    int8_transfer.pack(matrix, memory)
    return int8_transfer.unpack(memory, matrix.size(), matrix.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_within_their_bounds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(64, 300) * torch.logspace(-6, 2, 64)[:, None]).to(dtype)
    error = (rounded(matrix).double() - matrix.double()).abs()
    assert bool((error <= Int8Codec().error_bound(matrix)).all())
    largest = matrix.double().abs().amax(1, keepdim=True)
    if dtype == torch.float32:
        assert bool((error <= largest / 254 * (1 + 1e-5)).all())
    z = torch.randn(10000)
    memory = torch.empty(z.numel(), dtype=torch.uint8)
    int8_transfer.pack_noise(z, memory)
    assert torch.equal(int8_transfer.unpack_noise(memory), int8_transfer.rounded_noise(z.clone()))
    assert abs(float(int8_transfer.rounded_noise(z.clone()).std() / z.std()) - 1) < 2e-3


def test_masters_keep_what_the_format_cannot_hold() -> None:
    """Updates far below a step of int8 add up in the masters."""
    model = tiny_model("llama")
    before = copy.deepcopy(model.state_dict())
    batch = tiny_batch(0)
    settings = ZerothOrderSettings(epsilon=EPSILON, transfer_dtype="int8")
    with ZerothOrder(model, settings) as made:
        for _ in range(3):
            made.accumulate(model, lambda model: model(**batch).loss)
            made.end_step(1e-9)
    name = "model.layers.0.self_attn.q_proj.weight"
    after = model.state_dict()[name]
    assert not torch.equal(after, before[name])
    assert bool((after - before[name]).abs().max() < before[name].abs().max() / 254 / 100)


def test_what_is_refused() -> None:
    model = tiny_model("llama")
    with ZerothOrder(model) as made:
        state = made.state_dict()
    with ZerothOrder(model, ZerothOrderSettings(transfer_dtype="int8")) as made:
        with pytest.raises(ConfigError, match="transfer_dtype"):
            made.load_state_dict(state)
        for gone in ({"zo2_order": True}, {"transfer_dtype": "bfloat16"}):  # by earlier versions
            with pytest.raises(ConfigError, match="was removed in version"):
                made.load_state_dict({**state, **gone})
