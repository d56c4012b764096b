"""The compatibility page: it is that of its result file, and the cases come out as it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_pyao.training_engines import COMPILED, DDP, FSDP1, FSDP2, PLAIN, Answer, Feature
from tests.compatibility.cases import (
    GOES_ON,
    ON_ONE_PROCESS,
    ON_TWO_RANKS,
    REFUSED,
    SETTINGS,
    WORKS,
    run,
)
from tests.compatibility.page import (
    PAGE,
    RESULTS,
    render,
    train_on_one_process,
    train_on_two_ranks,
)

ENGINES = {**ON_ONE_PROCESS, **ON_TWO_RANKS}
ROWS = dict(zip(ENGINES, (PLAIN, *2 * [COMPILED], DDP, FSDP2, FSDP1), strict=True))
FEATURES = {
    "`all`": Feature.OFFLOADING,
    "`auto`": Feature.PLANNING,
    "`recompute_modules`": Feature.RECOMPUTATION,
    "`checkpoint_every=2`": Feature.SEGMENTS,
    "`head_loss`": Feature.HEAD_LOSS,
    "`mlp_tiles=2`": Feature.MLP_TILES,
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def answers(document: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["engine"], each["setting"]): each["answer"] for each in document["outcomes"]}


def test_the_page_is_that_of_the_result_file(document: dict[str, Any]) -> None:
    assert PAGE.read_text(encoding="utf-8") == render(document), (
        "run `python -m tests.compatibility.page --only`"
    )


def test_every_pair_ran(document: dict[str, Any]) -> None:
    assert set(answers(document)) == {(e, s) for e in ENGINES for s in SETTINGS}
    for each in document["outcomes"]:
        assert each["answer"] in (WORKS, GOES_ON, REFUSED)
        assert each["answer"] == WORKS or each["message"], each  # nothing is left out in silence


def test_the_rows_of_engines_say_what_ran(document: dict[str, Any]) -> None:
    """A row names what does not simply work; nothing that ran otherwise may be missing there."""
    found = answers(document)
    for engine, row in ROWS.items():
        for setting, feature in FEATURES.items():
            answer = found[engine, setting]
            outcome = row.outcomes.get(feature)
            if answer == REFUSED:
                assert outcome and outcome.answer is Answer.REFUSED, (engine, setting)
            elif answer == GOES_ON:
                assert outcome and outcome.answer is Answer.FALLS_BACK, (engine, setting)


@pytest.mark.parametrize("setting", ["`all`", "`head_loss`"])
def test_a_case_comes_out_as_on_the_page(setting: str, document: dict[str, Any]) -> None:
    engine = next(iter(ON_ONE_PROCESS))
    outcome = run(engine, ON_ONE_PROCESS[engine], setting)
    assert outcome.answer == answers(document)[engine, setting]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ON_ONE_PROCESS)
def test_cases_on_one_process(engine: str, document: dict[str, Any]) -> None:
    found = {(each.engine, each.setting): each.answer for each in train_on_one_process(engine)}
    assert found.items() <= answers(document).items()


@pytest.mark.thorough
@pytest.mark.distributed
def test_cases_on_two_ranks(document: dict[str, Any]) -> None:
    found = {(each.engine, each.setting): each.answer for each in train_on_two_ranks()}
    assert found.items() <= answers(document).items()
