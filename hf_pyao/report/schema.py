"""Reading and writing the JSON documents of hf_pyao: strictly, or not at all.

Every document is an object with ``schema_version`` and ``kind``. The version that wrote a document
reads it back; anything else is refused by name, never half understood.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_pyao.errors import PyAOError, nearest


class ReportError(PyAOError, ValueError):
    """A report cannot be read, written or drawn."""


def to_plain(value: Any) -> Any:
    """Return *value* as JSON holds it: dataclasses as objects, tuples as lists.

    JSON has no infinities and no NaN; a figure that is none becomes None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_keys(cls: type, values: object, where: str) -> dict[str, Any]:
    """Return *values* as arguments of the dataclass *cls*.

    Raises:
        ReportError: *values* is no object, has a key that *cls* does not know, or lacks one without
            a default. The message names the key and the nearest known one.
    """
    if not isinstance(values, Mapping):
        raise ReportError(f"{where} holds a JSON {type(values).__name__}; expected an object.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            hint = nearest(str(key), fields) or ";"
            raise ReportError(
                f"{where} has the key {key!r}, which {cls.__name__} has not{hint} it was written "
                "by another version of hf_pyao. Render it with the version that wrote it."
            )
    for name, field in fields.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if name not in values and not has_default:
            raise ReportError(
                f"{where} lacks the key {name!r}, which {cls.__name__} needs: the file was cut "
                "off, or written by another version of hf_pyao."
            )
    return dict(values)


def check_version(values: Mapping[str, Any], cls: type, version: int, where: str) -> None:
    """Refuse a document of another version.

    Raises:
        ReportError: says which version came, which is read here, and what to do.
    """
    found = values.get("schema_version")
    if found != version:
        raise ReportError(
            f"{where} has schema_version {found!r}; this hf_pyao reads version {version} of a "
            f"{cls.__name__}. Render it with the version of hf_pyao that wrote it, or measure "
            "again."
        )


def read_json(path: str | Path) -> Mapping[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ReportError: the file cannot be read, or holds no JSON object.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ReportError(f"{str(path)!r} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ReportError(
            f"{str(path)!r} holds a JSON {type(values).__name__}; expected an object that hf_pyao "
            "wrote (`pyao bench`, or a training run with --activation_offload_report)."
        )
    return values


def write_json(path: str | Path, document: Any) -> None:
    """Write *document* so that a reader sees the old file or the whole new one, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    text = json.dumps(to_plain(document), indent=2, allow_nan=False, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
