"""The page of all options."""

from __future__ import annotations

from hf_pyao import cli
from tests.tools.options_page import PAGE, commands_of, options_page


def test_the_page_is_what_the_commands_take() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == options_page(cli.make_parser()), "generate it anew, as the page says"


def test_choices_are_what_the_parts_behind_them_know() -> None:
    from hf_pyao.plan.hardware.beside_step import IMPLEMENTATIONS
    from hf_pyao.plan.weights.base_names import ADAPTER_DTYPES, BASES
    from hf_pyao.tools.bench.setup import DTYPES, GRADIENT_MODES
    from hf_pyao.tools.estimate.common_arguments import OPTIMIZER_BYTES

    known = {
        ("estimate", "adapter_dtype"): ADAPTER_DTYPES,
        ("estimate", "base"): BASES,
        ("estimate", "optimizer"): OPTIMIZER_BYTES,
        ("sweep", "optimizer"): OPTIMIZER_BYTES,
        ("estimate", "optimizer_step"): IMPLEMENTATIONS,
        ("bench", "gradients"): GRADIENT_MODES,
        ("bench", "dtype"): DTYPES,
        ("sweep", "dtype"): DTYPES,
    }
    commands = commands_of(cli.make_parser())
    for (command, dest), names in known.items():
        action = next(each for each in commands[command]._actions if each.dest == dest)
        assert action.choices is not None
        assert list(action.choices) == list(names), (command, dest)
