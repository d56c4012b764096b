"""Plans as documents: read by their kind, added up, and refused where they contradict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pyao.cli import main
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.schema import write_json
from hf_pyao.plan.policies import plan_policy as policy
from hf_pyao.tools.report.kinds import read_document
from tests.helpers.documents import make_plan


def test_it_is_read_by_its_kind_and_is_the_one_that_trainings_take(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    assert read_document(tmp_path / "plan.json") == make_plan()
    assert policy.Plan is Plan


@pytest.mark.parametrize(
    "levers",
    [
        {"checkpoint_every": 1, "checkpoint_nested": True},
        {"checkpoint_every": 0, "save_attention": True},
    ],
)
def test_levers_that_contradict_each_other_are_refused(levers: dict[str, Any]) -> None:
    with pytest.raises(policy.PlanError, match="contradict each other"):
        replace(make_plan(), levers=levers)


def test_a_plan_that_contradicts_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    slot = '{"name": "a:0", "action": "%s"}'
    for actions, message in ((["offlod"], "did you mean 'offload'"), (["keep"] * 2, "twice")):
        slots = ", ".join(slot % action for action in actions)
        path.write_text(f'{{"schema_version": 1, "kind": "plan", "slots": [{slots}]}}')
        assert main(["report", str(path)]) == 2
        assert message in capsys.readouterr().err
