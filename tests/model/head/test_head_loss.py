"""The head loss on transformers' models: same numbers, no logits, and out of the way otherwise."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_pyao.errors import ConfigError
from hf_pyao.model.head.deferred import DeferredLogits
from hf_pyao.model.head.head_loss import HeadLoss, install_head_loss
from tests.helpers.head_loss_models import (
    CONFIGS,
    HIDDEN,
    VOCAB,
    assert_same_step,
    gradients,
    make_batch,
    make_model,
    pair,
)
from tests.helpers.ledger import AllocationLedger

CHUNK = 16


def install(model: nn.Module, mode: str = "auto") -> HeadLoss:
    """Install with chunks that cut every test's batch."""
    return install_head_loss(model, mode, chunk_tokens=CHUNK)


def deferred(outputs: Any) -> DeferredLogits:
    """Return the stand-in among *outputs*, without reading it."""
    found = [value for value in outputs.values() if isinstance(value, DeferredLogits)]
    assert len(found) == 1
    return found[0]


# ---- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_matches_the_models_own_loss(name: str) -> None:
    mine, own = pair(name, torch.float64)
    handle = install(mine)
    outputs, expected = assert_same_step(mine, own, 1e-12, **make_batch())
    assert handle.metrics()["head_loss_num_chunked"] == 1
    assert handle.metrics()["head_loss_num_chunks"] == 4
    assert deferred(outputs).is_put_off
    assert torch.equal(outputs.logits, expected.logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"ignore_index": 7},
        {"shift_labels": True},
        {"logits_to_keep": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_arguments_of_the_loss(name: str, options: dict[str, Any]) -> None:
    mine, own = pair(name, torch.float64)
    handle = install(mine)
    batch: dict[str, Any] = make_batch()
    if "ignore_index" in options:
        batch["labels"] = batch["labels"].clamp(min=0)
        batch["labels"][:, ::3] = 7
    if "shift_labels" in options:
        options = {"shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()}
    assert_same_step(mine, own, 1e-12, **batch, **options)
    assert handle.metrics()["head_loss_num_chunked"] == 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "phi"])
def test_autocast(name: str) -> None:
    mine, own = pair(name)
    install(mine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [model(**make_batch()) for model in (mine, own)]
    assert outputs[0].loss.dtype == outputs[1].loss.dtype == torch.float32
    assert torch.equal(outputs[0].logits, outputs[1].logits), "also read outside of autocast"
    for output in outputs:
        output.loss.backward()
    for parameter, grad in gradients(own).items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(gradients(mine)[parameter], grad, rtol=0.05, atol=0.05 * scale)


def test_grad_scaler_and_accumulation() -> None:
    mine, own = pair("gpt2", torch.float64)
    install(mine)
    for model in (mine, own):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            scaler.scale(model(**make_batch(seed=seed)).loss / 4).backward()
        scaler.step(optimizer)
    for mine_p, own_p in zip(mine.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine_p, own_p, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    mine, own = pair("llama", torch.float64)
    handle = install(mine)
    for model in (mine, own):
        # transformers 5.23 renamed it and warns about the old name
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        model.config.use_cache = False
    assert_same_step(mine, own, 1e-12, **make_batch())
    assert handle.metrics()["head_loss_num_chunked"] == 1


@pytest.mark.parametrize("part", ["head", "embedding", "everything but the head"])
def test_frozen_parts(part: str) -> None:
    mine, own = pair("llama", torch.float64)
    install(mine)
    for model in (mine, own):
        for name, parameter in model.named_parameters():
            frozen = {"head": "lm_head" in name, "embedding": "embed_tokens" in name}
            parameter.requires_grad_(not frozen.get(part, "lm_head" not in name))
    assert_same_step(mine, own, 1e-12, **make_batch())


@pytest.mark.thorough
def test_losses_that_models_compute_inline_and_other_heads() -> None:
    t5 = AutoConfig.for_model(
        "t5", d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCAB,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    bert = AutoConfig.for_model(
        "bert", hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
        intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    for cls, config in ((AutoModelForSeq2SeqLM, t5), (AutoModelForMaskedLM, bert)):
        own = cls.from_config(config).double().train()
        mine = copy.deepcopy(own)
        handle = install(mine)
        assert_same_step(mine, own, 1e-12, **make_batch())
        assert handle.metrics()["head_loss_num_chunked"] == 1


# ---- who reads the logits gets them --------------------------------------------------------------


def test_outputs_compute_logits_when_read_and_not_before() -> None:
    mine, own = pair("llama")
    handle = install(mine)
    batch = make_batch()
    outputs, expected = mine(**batch), own(**batch)
    assert isinstance(outputs, CausalLMOutputWithPast)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs["loss"], expected["loss"])
    assert list(outputs.keys()) == list(expected.keys())
    assert deferred(outputs).is_put_off, "keys, items and the loss compute nothing"
    assert handle.metrics()["head_loss_num_logits_read"] == 0
    for logits in (outputs.logits, outputs["logits"], outputs[1], outputs.to_tuple()[1]):
        assert torch.equal(logits, expected.logits)
    assert handle.metrics()["head_loss_num_logits_read"] == 1, "computed once"
    assert "something reads outputs.logits" in handle.describe()
    unpickled = pickle.loads(pickle.dumps(mine(**batch, use_cache=False)))
    assert type(unpickled.logits) is Tensor
    assert torch.equal(unpickled.logits, expected.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_evaluation_generation_and_forwards_without_labels_are_untouched(name: str) -> None:
    mine, own = pair(name)
    handle = install(mine)
    batch = make_batch()
    prompt = {"input_ids": batch["input_ids"][:1, :4]}

    def runs(model: PreTrainedModel) -> list[Any]:
        model.train()
        found = [model(input_ids=batch["input_ids"])]
        with torch.no_grad():
            found.append(model(**batch))
        model.eval()
        found.append(model(**batch))
        return found

    for got, expected in zip(runs(mine), runs(own), strict=True):
        assert type(got) is type(expected)
        assert type(dict(got.items())["logits"]) is Tensor
        assert torch.equal(got.logits, expected.logits)
        assert got.logits.requires_grad == expected.logits.requires_grad
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(1, 4).long()}
    assert torch.equal(mine.generate(**prompt, **options), own.generate(**prompt, **options))
    assert handle.metrics()["head_loss_num_chunked"] == 0


# ---- heads and models that are not understood ----------------------------------------------------


class NormedHead(nn.Module):
    """A head that is no linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.weight = linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden - hidden.mean(-1, keepdim=True))


def with_normed_head(model: Any) -> str:
    model.lm_head = NormedHead(model.lm_head)
    return "its head is a NormedHead, not a linear layer"


def with_head_hook(model: Any) -> str:
    model.lm_head.register_forward_hook(lambda module, args, output: None)
    return "its head (Linear) has module hooks"


def with_penalty_before_the_loss(model: Any) -> str:
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        penalty = 1e-3 * torch.logsumexp(logits, -1).square().mean()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + penalty

    model.loss_function = loss_function
    return "before its loss it needs the logits for logsumexp"


def with_loss_elsewhere(model: Any) -> str:
    def forward(input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = model.model(input_ids).last_hidden_state
        logits = F.linear(hidden[:, :-1], model.lm_head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward
    return "its forward does not call its head"


@pytest.mark.parametrize("mode", ["auto", "chunked"])
@pytest.mark.parametrize(
    "change",
    [
        with_normed_head,
        with_head_hook,
        with_penalty_before_the_loss,
        with_loss_elsewhere,
    ],
)
def test_what_is_not_understood_keeps_its_own_loss_and_says_so_once(
    change: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, own = (make_model("llama", torch.float64) for _ in range(2))
    reason = change(mine)
    change(own)
    with caplog.at_level(logging.INFO, logger="hf_pyao"):
        handle = install(mine, mode)
        for _ in range(2):
            assert_same_step(mine, own, 1e-12, **make_batch())
    said = [record for record in caplog.records if "keeps its own loss" in record.message]
    assert len(said) == (1 if reason else 0)
    if reason:
        assert reason in said[0].message
        assert reason in handle.describe()
        assert said[0].levelno == (logging.INFO if mode == "auto" else logging.WARNING)
        assert handle.metrics()["head_loss_num_chunked"] == 0
        assert handle.metrics()["head_loss_num_own"] == 2


def test_logits_plus_a_bias_buffer_keep_their_own_loss() -> None:
    config = AutoConfig.for_model(
        "bart", d_model=HIDDEN, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB,
        max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    own = AutoModelForSeq2SeqLM.from_config(config).double().train()
    mine = copy.deepcopy(own)
    handle = install(mine)
    outputs, _ = assert_same_step(mine, own, 1e-12, **make_batch())
    assert "needs the logits for add" in handle.describe()
    assert type(dict(outputs.items())["logits"]) is Tensor


def test_a_model_without_a_head(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama").model
    with caplog.at_level(logging.INFO, logger="hf_pyao"):
        handle = install(model, "chunked")
    assert not handle.is_installed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "forward" not in model.__dict__


def test_a_fused_head_of_trl_is_left_alone() -> None:
    model: Any = make_model("llama")
    own_forward = model.forward

    def forward(input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        assert kwargs.pop("fused_lm_head") is True
        return own_forward(input_ids=input_ids, labels=labels, **kwargs)

    model.forward = forward
    handle = install(model)
    outputs = model(**make_batch(), fused_lm_head=True)
    assert type(dict(outputs.items())["logits"]) is Tensor
    assert "TRL's fused LM head" in handle.describe()


@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("order", ["install first", "compile first"])
def test_compiled_models_keep_their_own_loss(order: str) -> None:
    mine, own = pair("llama")
    if order == "install first":
        handle = install(mine)
        compiled = torch.compile(mine, backend="eager", fullgraph=True)
    else:
        compiled = torch.compile(mine, backend="eager", fullgraph=True)
        handle = install(compiled)
        assert "compiled as a whole" in handle.describe()
    batch = {**make_batch(), "use_cache": False}
    outputs, expected = compiled(**batch), own(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits)
    assert handle.metrics()["head_loss_num_chunked"] == 0


# ---- installing and removing ---------------------------------------------------------------------


def test_uninstall_leaves_no_trace() -> None:
    model = make_model("llama")
    before = set(model.__dict__)
    handle = install(model)
    assert handle.is_installed
    handle.uninstall()
    handle.uninstall()
    assert not handle.is_installed
    assert set(model.__dict__) == before
    assert type(model(**make_batch()).__getattribute__("logits")) is Tensor


def test_uninstall_below_somebody_elses_wrapper_and_install_again() -> None:
    model, own = pair("llama", torch.float64)
    first = install(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    first.uninstall()
    assert type(dict(model(**make_batch()).items())["logits"]) is Tensor
    second = install_head_loss(model, chunk_tokens=5)
    assert_same_step(model, own, 1e-12, **make_batch())
    assert second.metrics()["head_loss_num_chunked"] == 1
    assert first.metrics()["head_loss_num_chunked"] == 0


def test_installing_twice() -> None:
    model = make_model("llama")
    handle = install(model)
    assert install(model) is handle
    with pytest.raises(ConfigError, match=r"Call uninstall\(\)"):
        install_head_loss(model, "chunked", chunk_tokens=CHUNK)


def test_off_does_nothing() -> None:
    model = make_model("llama")
    before = dict(model.__dict__)
    handle = install_head_loss(model, "off")
    assert not handle.is_installed
    assert model.__dict__ == before
    assert "not installed" in handle.describe()


def test_a_mode_that_was_removed() -> None:
    with pytest.raises(ConfigError, match="removed in version .*Choose 'chunked'"):
        install_head_loss(make_model("llama"), "liger")


def test_signature_and_name_of_forward_stay() -> None:
    model = make_model("llama")
    before = inspect.signature(model.forward)
    install(model)
    assert inspect.signature(model.forward) == before


def test_deep_copy_and_pickle_are_plain_models() -> None:
    model, own = pair("llama", torch.float64)
    handle = install(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        outputs = copied(**make_batch())
        assert type(dict(outputs.items())["logits"]) is Tensor
        assert not outputs.logits.any(), "the copy runs its own weights"
    assert handle.metrics()["head_loss_num_chunked"] == 0
    assert_same_step(model, own, 1e-12, **make_batch())


def test_a_head_that_is_replaced_after_installing() -> None:
    model, own = pair("gpt2", torch.float64)
    handle = install(model)
    for each in (model, own):
        torch.manual_seed(1)
        each.resize_token_embeddings(VOCAB + 9, pad_to_multiple_of=16, mean_resizing=False)
        each.train()
    assert_same_step(model, own, 1e-12, **make_batch())
    assert handle.metrics()["head_loss_num_chunked"] == 1


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_step_peak_has_no_term_of_tokens_times_vocabulary() -> None:
    # Mixed second difference over tokens and vocabulary, in bytes per logit.
    def peak(num_samples: int, num_vocab: int, installed: bool) -> int:
        model = make_model("llama", vocab_size=num_vocab)
        if installed:
            install(model)
        batch = make_batch(num_samples, 64)
        with AllocationLedger() as ledger:
            model(**batch).loss.backward()
        return ledger.peak_bytes

    def mixed(installed: bool) -> float:
        sizes = [(4, 4000), (4, 2000), (2, 4000), (2, 2000)]
        a, b, c, d = (peak(n, v, installed) for n, v in sizes)
        return (a - b - c + d) / (2 * 64 * 2000)

    assert abs(mixed(installed=True)) < 0.1
    assert mixed(installed=False) > 8
