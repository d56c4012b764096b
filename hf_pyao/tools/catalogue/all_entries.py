"""The whole catalogue."""

from __future__ import annotations

from hf_pyao.tools.catalogue import auto, commands, engine, hf, model, plan, settings
from hf_pyao.tools.catalogue.entry import Entry

CHAPTERS = (
    settings.CHAPTER,
    auto.CHAPTER,
    engine.CHAPTER,
    model.CHAPTER,
    plan.CHAPTER,
    hf.CHAPTER,
    commands.CHAPTER,
)

CATALOGUE: dict[str, Entry] = {e.key: e for chapter in CHAPTERS for e in chapter.entries}
