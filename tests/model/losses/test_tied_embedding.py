"""A tied embedding's gradient joins the head's, bit for bit, without a second copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.model.losses import tied_embedding as tied_module
from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.tied_embedding import WaitingGradient, tie, tied_embedding
from tests.helpers.ledger import AllocationLedger

VOCAB, HIDDEN = 50, 8


class Tied(nn.Module):
    """Embedding, one matrix, head of the embedding's weight."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_vocab: int = VOCAB) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.embedding, self.matrix = normal(num_vocab, HIDDEN), normal(HIDDEN, HIDDEN)

    def own(self, ids: Tensor, padding_idx: int | None = None) -> Tensor:
        """Loss as models compute it."""
        hidden = torch.tanh(F.embedding(ids, self.embedding, padding_idx) @ self.matrix)
        logits = F.linear(hidden, self.embedding).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.roll(1).view(-1))

    def hidden(self, ids: Tensor, padding_idx: int | None = None) -> Tensor:
        self.alias, self.waiting = tie(self.embedding)
        embedded = tied_embedding(ids, self.alias, padding_idx, self.waiting)
        return torch.tanh(embedded @ self.matrix)

    def loss(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(
            hidden, self.alias, ids.roll(1), chunk_tokens=5, waiting=self.waiting
        )

    def chunked(self, ids: Tensor, padding_idx: int | None = None) -> Tensor:
        """The same in chunks, the embedding tied."""
        return self.loss(ids, self.hidden(ids, padding_idx))


@pytest.fixture(params=[32 * 2**20, 7 * HIDDEN * 4], ids=["one block", "blocks of 7 rows"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tied_module, "_BLOCK_BYTES", request.param)
    return int(request.param)


@pytest.fixture
def ids() -> Tensor:
    # Few distinct words: most rows are summed from several tokens.
    return torch.randint(0, 12, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("padding_idx", [None, 3, -47])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_the_sum_of_both(
    ids: Tensor, dtype: torch.dtype, padding_idx: int | None
) -> None:
    model = Tied(dtype)
    expected = torch.autograd.grad(model.own(ids, padding_idx), list(model.parameters()))
    model.chunked(ids, padding_idx).backward()
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("block_bytes")
def test_bits_are_those_of_two_gradients_added(
    ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied(torch.bfloat16)
    joined = torch.autograd.grad(model.chunked(ids), model.embedding)[0]
    monkeypatch.setattr(WaitingGradient, "put", lambda self, gradient: False)
    separate = torch.autograd.grad(model.chunked(ids), model.embedding)[0]
    assert torch.equal(joined, separate)


def test_accumulation_over_micro_batches(ids: Tensor) -> None:
    model = Tied(torch.float64)
    for _ in range(3):
        model.own(ids).backward()
    assert model.embedding.grad is not None
    expected, model.embedding.grad = model.embedding.grad, None
    for _ in range(3):
        model.chunked(ids).backward()
    torch.testing.assert_close(model.embedding.grad, expected, rtol=1e-6, atol=1e-6)


def test_backward_of_one_of_two_forwards(ids: Tensor) -> None:
    model, other = Tied(torch.float64), ids.flip(1)
    expected = torch.autograd.grad(model.own(ids), model.embedding)[0]
    first, second = model.chunked(ids), model.chunked(other)
    got = torch.autograd.grad(first, model.embedding)[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(model.own(other), model.embedding)[0]
    got = torch.autograd.grad(second, model.embedding)[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_embedding_alone_has_its_own_gradient(ids: Tensor) -> None:
    # The head ran forward but has no part in this backward; before, it has had one in another.
    model = Tied(torch.float64)
    model.chunked(ids).backward()
    hidden = model.hidden(ids)
    model.loss(ids, hidden)
    got = torch.autograd.grad(hidden.sum(), model.embedding)[0]
    wanted = torch.autograd.grad(
        torch.tanh(F.embedding(ids, model.embedding) @ model.matrix).sum(), model.embedding
    )[0]
    assert torch.equal(got, wanted)


def test_retained_graph(ids: Tensor) -> None:
    model = Tied(torch.float64)
    loss = model.chunked(ids)
    first = torch.autograd.grad(loss, model.embedding, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss, model.embedding)[0]
    assert torch.equal(first, second)


def test_parameter_hooks_see_the_whole_gradient_once(ids: Tensor) -> None:
    model, seen = Tied(torch.float64), []
    model.embedding.register_hook(lambda grad: seen.append(grad.clone()))
    model.embedding.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model.chunked(ids).backward()
    wanted = torch.autograd.grad(model.own(ids), model.embedding)[0]
    assert len(seen) == 2 + 1  # the reference's own backward runs the first hook too
    for grad in seen:
        torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-6)


def test_no_second_gradient_of_the_vocabulary_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    num_vocab = 20_000
    monkeypatch.setattr(tied_module, "_BLOCK_BYTES", num_vocab * HIDDEN * 4 // 16)
    ids = torch.randint(0, num_vocab, (1, 16))
    gradient_bytes = num_vocab * HIDDEN * 4

    def peak_in_backward(loss: Tensor) -> int:
        with AllocationLedger() as ledger:
            loss.backward()
        return ledger.peak_bytes

    model = Tied(num_vocab=num_vocab)
    assert peak_in_backward(model.own(ids)) > 2 * gradient_bytes
    model.embedding.grad = None
    # The head's gradient is there since forward; a block, and the same again for bookkeeping.
    assert peak_in_backward(model.chunked(ids)) < 2 * gradient_bytes / 16 + 8192


# ---- others who hold gradients -------------------------------------------------------------------


def watch_nodes(loss: Tensor, seen: list[Tensor]) -> None:
    """Keep what every node of the graph hands on, as a monitor of gradients does."""
    pending, known = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if "AccumulateGrad" not in node.name():
            node.register_hook(lambda handed_on, _: seen.extend(handed_on))
        pending += [following for following, _ in node.next_functions]


@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("is_watched", [False, True])
def test_somebody_keeps_the_gradients(
    ids: Tensor, is_watched: bool, penalty: bool, num_losses: int
) -> None:
    model = Tied(torch.float64)

    def total(loss: Tensor) -> Tensor:
        return loss + model.embedding.square().sum() if penalty else loss

    hidden = model.hidden(ids)
    loss = total(sum((model.loss(ids, hidden) for _ in range(num_losses)), torch.zeros(())))
    expected = torch.autograd.grad(total(model.own(ids) * num_losses), model.embedding)[0]
    kept: list[Tensor] = []
    if is_watched:
        watch_nodes(loss, kept)
    loss.backward()
    torch.testing.assert_close(model.embedding.grad, expected, rtol=1e-6, atol=1e-6)
    if is_watched:
        whole = [grad for grad in kept if grad is not None and grad.shape == expected.shape]
        assert whole, "the monitor sees the gradient of the weight"
        copies = [grad.clone() for grad in whole]
        model.own(ids).backward()
        assert all(torch.equal(a, b) for a, b in zip(copies, whole, strict=True) if a is not b)


def test_a_backward_that_fails_on_the_way_leaves_nothing_to_the_next(ids: Tensor) -> None:
    model = Tied(torch.float64)
    expected = torch.autograd.grad(model.own(ids), model.embedding)[0]
    hidden = model.hidden(ids)

    def fail(grad: Tensor) -> None:
        raise KeyboardInterrupt

    handle = hidden.register_hook(fail)
    loss = model.loss(ids, hidden)
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    handle.remove()
    model.embedding.grad = None
    loss.backward()
    torch.testing.assert_close(model.embedding.grad, expected, rtol=1e-6, atol=1e-6)
