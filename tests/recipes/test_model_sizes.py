"""The table of shapes: a published name must mean the published model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_pyao.errors import ConfigError
from hf_pyao.tools.estimate.model_sizes import build_config, find_size

PUBLISHED_PARAMETERS = {
    ("opt", "125m"): 125_239_296,
    ("opt", "1.3b"): 1_315_758_080,
    ("opt", "2.7b"): 2_651_596_800,
    ("opt", "6.7b"): 6_658_473_984,
    ("gpt2", "124m"): 124_439_808,
    ("gpt2", "355m"): 354_823_168,
    ("gpt2", "0.8b"): 774_030_080,
    ("gpt2", "1.6b"): 1_557_611_200,
    ("llama", "1.2b"): 1_235_814_400,
    ("llama", "3.2b"): 3_212_749_824,
    ("llama", "8b"): 8_030_261_248,
}
"""Counts of the checkpoints on the hub, tied weights once."""


def count_parameters(architecture: str, size: str, vocab_size: int = 4096) -> int:
    config = build_config(architecture, find_size(architecture, size), vocab_size=vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("architecture", "size"), PUBLISHED_PARAMETERS)
def test_published_sizes_have_the_published_number_of_parameters(
    architecture: str, size: str
) -> None:
    assert count_parameters(architecture, size) == PUBLISHED_PARAMETERS[architecture, size]


def test_unknown_size_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"'1\.3bb'.*did you mean '1\.3b'.*125m.*tiny"):
        find_size("opt", "1.3bb")
