"""Plans as documents: what is told and drawn of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pyao.cli import main
from hf_pyao.plan.documents.plan import LeverSetting, Plan, PlannedSlot
from hf_pyao.plan.documents.schema import write_json
from hf_pyao.plan.policies import plan_policy as policy
from hf_pyao.tools.report.kinds import figure_of, read_document
from hf_pyao.tools.report.tables import markdown_of
from hf_pyao.tools.report.views.plan_view import bytes_by_action, plan_view
from tests.helpers.documents import MIB, make_plan


def test_it_is_read_by_its_kind_and_is_the_one_that_trainings_take(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    assert read_document(tmp_path / "plan.json") == make_plan()
    assert policy.Plan is Plan


def test_its_slots_are_told_with_what_becomes_of_them() -> None:
    text = markdown_of(make_plan())
    assert text.startswith("## Plan, written by hand\n")
    assert "| attn:0 | offload | all | fp8 | big | 8.00 |" in text
    assert "| act:0 | recompute | 0–2, 5 | – | – | 4.00 |" in text
    assert "| link_gib_per_s | 24.0 |" in text
    assert "Recomputed modules: mlp." in text
    assert "what is not named: offload" in text
    assert "for any model" in markdown_of(make_plan(model={}))


def test_bytes_are_of_all_layers_that_a_slot_is_planned_for() -> None:
    assert bytes_by_action(make_plan()) == {
        "keep": 24 * MIB,
        "offload": 24 * 8 * MIB,
        "recompute": 4 * 4 * MIB,
    }
    twice = [
        PlannedSlot(name="a:0", action="keep", nbytes=1, layers=[0, 3]),
        PlannedSlot(name="a:0", action="offload", nbytes=1),
    ]
    assert bytes_by_action(make_plan(slots=twice)) == {"keep": 2, "offload": 22}
    for said in (None, True, "24", -1, 10**30):
        assert bytes_by_action(make_plan(slots=twice[1:], model={"num_layers": said})) == {
            "offload": 1
        }


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


def test_settings_that_were_left_out_for_one_reason_share_a_row() -> None:
    settings = [
        LeverSetting(
            levers={}, words="as it is", step_ms=3.0, peak_bytes=10, host_bytes=0, fits=True
        ),
        *(
            LeverSetting(levers={}, words=f"{k} layers", note="takes 9 ms or more")
            for k in (1, 2, 4)
        ),
        LeverSetting(levers={}, words="one more", note="refused"),
    ]
    tables = plan_view(replace(make_plan(), lever_settings=settings)).tables
    rows = next(each.rows for each in tables if each.header[0] == "levers that were looked at")
    assert [row[:2] for row in rows] == [
        ["as it is", "–"],
        ["1 layers, and 2 more", "takes 9 ms or more"],
        ["one more", "refused"],
    ]


def test_bytes_are_drawn_where_they_are_known() -> None:
    figure = figure_of(make_plan())
    assert figure is not None
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [16, 192, 24]  # from the bottom, in MiB
    assert figure_of(make_plan(slots=[])) is None


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
