"""TRL's SFTTrainer with the mixin and ``head_loss="chunked"``: its batches, and its own fused head."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer

from hf_pyao import PyAOConfig, PyAOTrainerMixin
from tests.helpers.head_loss_models import make_model
from tests.model.head.test_head_loss_training import TRAINING, logged, tiny_tokenizer

datasets = pytest.importorskip("datasets", reason="SFTTrainer is given data sets")
trl = pytest.importorskip("trl", reason="its SFTTrainer is tested")

# TRL sets the older of two names of checkpointing, which transformers 5.23 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning")

CHUNKED = PyAOConfig(policy="all", head_loss="chunked", min_bytes=0, host_memory_gib=0.25)
HAS_FUSED_HEAD = "fused_lm_head" in inspect.getsource(trl.SFTTrainer)
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in inspect.signature(trl.SFTConfig).parameters
)


class OwnLoss:
    """Lets the model compute its loss, as SFTTrainer did before TRL fused its head."""

    seen: list[tuple[Tensor, Any]]
    shifts = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.__dict__.setdefault("seen", []).append((inputs["labels"], num_items_in_batch))
        if self.shifts:
            shifted = F.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].contiguous()
            inputs = {**inputs, "shift_labels": shifted}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)  # type: ignore[arg-type]


class OwnLossShifted(OwnLoss):
    """Passes labels that are shifted already, as sequence parallelism does."""

    shifts = True


def rows_of(kind: str) -> list[dict[str, str]]:
    """Return texts of several lengths: batches are padded, and differ in their labels."""
    texts = [[f"w{3 + (7 * i + j) % 100}" for j in range(6 + i % 5)] for i in range(24)]
    if kind == "text":
        return [{"text": " ".join(words)} for words in texts]
    return [
        {"prompt": " ".join(words[:3]) + " ", "completion": " ".join(words[3:])} for words in texts
    ]


def sft(
    folder: Path,
    *parts: type,
    kind: str = "prompt and completion",
    pyao: PyAOConfig | None = CHUNKED,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Train for three steps of three micro-batches, with the mixin if *pyao* is given."""
    bases = (*((PyAOTrainerMixin,) if pyao is not None else ()), *parts, trl.SFTTrainer)
    cls = type("TestedTrainer", bases, {})
    config = trl.SFTConfig(
        str(folder), **{**TRAINING, "bf16": False, CHECKPOINTING: False, **options}
    )
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = whitespace()
    trainer = cls(
        model=make_model("llama", dtype) if model is None else model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows_of(kind)),
        processing_class=tokenizer,
        **({"pyao_config": pyao} if pyao is not None else {}),
    )
    trainer.head_loss_metrics, trainer.head_loss_line = {}, ""
    on_train_end = trainer.callback_handler.on_train_end

    def note_head_loss(*args: Any, **kwargs: Any) -> Any:
        if pyao is not None:
            head_loss = trainer.offloader.head_loss
            trainer.head_loss_metrics = head_loss.metrics()
            trainer.head_loss_line = head_loss.describe()
        return on_train_end(*args, **kwargs)

    trainer.callback_handler.on_train_end = note_head_loss
    trainer.train()
    return trainer


def whitespace() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Whitespace()


def assert_same_training(got: Any, expected: Any, tolerance: float) -> None:
    """Compare losses, gradient norms and weights."""
    for key in ("loss", "grad_norm"):
        assert len(logged(got, key)) == 3
        assert logged(got, key) == pytest.approx(logged(expected, key), rel=tolerance)
    weights = dict(expected.model.named_parameters())
    for name, parameter in got.model.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=tolerance, atol=tolerance)


# ---- the model's own loss, on TRL's batches ------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("parts", [OwnLoss, OwnLossShifted], ids=["labels", "shift_labels"])
@pytest.mark.parametrize("kind", ["prompt and completion", "text"])
def test_training_is_that_of_the_models_own_loss(kind: str, parts: type, tmp_path: Path) -> None:
    # In float64 the only rounding that can differ is that of the logged numbers; logs have 4 digits
    # or more of them, the weights have all.
    options: dict[str, Any] = {"kind": kind, "dtype": torch.float64}
    got = sft(tmp_path, parts, **options)
    expected = sft(tmp_path, parts, pyao=None, **options)
    assert_same_training(got, expected, 1e-7)
    assert got.head_loss_metrics["head_loss_num_chunked"] == 9
    assert got.head_loss_metrics["head_loss_num_own"] == 0
    assert got.head_loss_metrics["head_loss_num_logits_read"] == 0
    # What it was that came out the same: ignored prompts and padding, and one count for all three
    # micro-batches of a step.
    first_labels, first_items = got.seen[0]
    ignored = (first_labels[:, :3] == -100).all()
    assert bool(ignored) == (kind == "prompt and completion")
    labels_of_step = [labels for labels, _ in got.seen[:3]]
    assert int(first_items) in (
        sum(int((labels[:, 1:] != -100).sum()) for labels in labels_of_step),
        sum(int((labels != -100).sum()) for labels in labels_of_step),  # transformers 4.57
    )
    assert any((labels[:, -1] == -100).any() for labels, _ in got.seen)


def test_float32_training_with_everything_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {CHECKPOINTING: True}
    got = sft(tmp_path, OwnLoss, **options)
    expected = sft(tmp_path, OwnLoss, pyao=None, **options)
    assert_same_training(got, expected, 1e-4)
    assert got.head_loss_metrics["head_loss_num_chunked"] == 9


# ---- other fused heads: we stand back ------------------------------------------------------------


def said_to_stand_back(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "keeps its own loss" in record.getMessage()]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_FUSED_HEAD, reason="this TRL has no fused head")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_trls_fused_head_is_left_alone_and_said_once(
    loss_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sft(tmp_path, pyao=None, loss_type=loss_type)
    with caplog.at_level(logging.INFO, logger="hf_pyao"):
        got = sft(tmp_path, loss_type=loss_type)
    # Policy "all" offloads beside it, so that not a bit may differ.
    assert_same_training(got, expected, 0.0)
    assert got.head_loss_metrics["head_loss_num_chunked"] == 0
    assert got.head_loss_metrics["head_loss_num_own"] == 9
    (record,) = said_to_stand_back(caplog)
    assert "TRL's fused LM head" in record.getMessage()
    assert record.levelno == logging.WARNING
    assert "TRL's fused LM head" in got.head_loss_line
