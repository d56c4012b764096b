"""What an experiment comes to: rows of one form, and the JSON file that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from result_file import write_result

SCHEMA_VERSION = 1
RESULTS = Path(__file__).parents[1] / "results" / "experiments"

PREDICT, MINIATURE, REAL = "predict", "miniature", "real"
MODES = (PREDICT, MINIATURE, REAL)

OK, OUT_OF_MEMORY, NOT_PREDICTED = "ok", "out of memory", "not predicted"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number, with what it is of."""

    model: str
    system: str
    """How it is trained: a name in ``systems.py``, or what the figure compares instead."""
    quantity: str
    unit: str
    value: float | None
    """Ours; None where there is none, for the reason in ``status`` or ``note``."""
    micro_batch: int | None = None
    published: float | None = None
    """The paper's; None: not in its text."""
    status: str = OK
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """Further numbers."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one mode of an experiment returns."""

    rows: Sequence[Row]
    assumptions: Sequence[str] = ()
    """What the numbers rest on."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the file."""


def result_path(name: str, mode: str) -> Path:
    """Return where the result of an experiment in *mode* is kept."""
    return RESULTS / f"{name}_{mode}.json"


def write_rows(path: Path, name: str, mode: str, result: Result) -> None:
    """Write *result* with its provenance to *path*, each row with *mode*; say so."""
    write_result(
        path,
        kind="experiment",
        schema_version=SCHEMA_VERSION,
        name=name,
        mode=mode,
        is_measured=mode != PREDICT,
        assumptions=list(result.assumptions),
        rows=[{**vars(row), "mode": mode} for row in result.rows],
        **result.content,
    )


def read_document(path: Path | str) -> dict[str, Any]:
    """Read what :func:`write_rows` wrote.

    Raises:
        ConfigError: the file is missing, or holds something else.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read as an experiment's result ({error}); the experiment's "
            "script writes one."
        ) from error
    if document.get("kind") != "experiment" or document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{str(path)!r} holds {document.get('kind')!r}, version "
            f"{document.get('schema_version')!r}; expected 'experiment', version {SCHEMA_VERSION}."
        )
    return dict(document)


def select(rows: Iterable[Any], **equal: Any) -> list[dict[str, Any]]:
    """Return the rows, as dictionaries, whose fields have these values."""
    found = [row if isinstance(row, dict) else vars(row) for row in rows]
    return [row for row in found if all(row[key] == value for key, value in equal.items())]


def values(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the different values of *key*, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def one(rows: Iterable[Any], **equal: Any) -> dict[str, Any]:
    """Return the only row with these values.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = select(rows, **equal)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {equal}; expected one")
    return found[0]
