"""Writes the table of engines in hf_pyao/LIMITS.md from the rows in ``hf_pyao/training_engines.py``.

Run it after a row has changed: ``python tests/engine_table.py``.
"""

from __future__ import annotations

from pathlib import Path

from hf_pyao.training_engines import ENGINES, Answer, Feature, TrainingEngine

PAGE = Path(__file__).parents[1] / "hf_pyao" / "LIMITS.md"
BEGIN = "<!-- engines: python tests/engine_table.py -->\n"
END = "<!-- end of engines -->\n"


def table() -> str:
    """Return the table: what works with each engine, falls back, is refused, or was not tried."""
    columns = ("engine", *(answer.value for answer in Answer), "not tried")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for engine in ENGINES:
        cells = [_cell(engine, answer) for answer in Answer]
        cells.append(_named(engine.untried))
        lines.append(f"| {engine.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return *page* with the table as it is now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, f"LIMITS.md has no {BEGIN.strip()} .. {END.strip()}"
    return f"{head}{BEGIN}{table()}{END}{tail}"


def _cell(engine: TrainingEngine, answer: Answer) -> str:
    if answer is Answer.WORKS:
        return _works(engine)
    found = (
        f"{feature.value}: {outcome.instead}"
        for feature, outcome in engine.outcomes.items()
        if outcome.answer is answer
    )
    return "; ".join(found)


def _works(engine: TrainingEngine) -> str:
    if engine.refusal(Feature.OFFLOADING):
        return "nothing"
    works = frozenset(Feature) - engine.outcomes.keys() - engine.untried
    if len(works) == len(Feature):
        return "everything"
    if len(works) == len(Feature) - 1:
        return "everything else"
    return _named(works)


def _named(features: frozenset[Feature]) -> str:
    return ", ".join(feature.value for feature in Feature if feature in features)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
