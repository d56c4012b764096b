"""Reading and writing the JSON documents of hf_pyao: strictly, or not at all.

Every document is an object with ``schema_version`` and ``kind``. The version that wrote a document
reads it back; anything else is refused by name, never half understood.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hf_pyao.errors import PyAOError, nearest
from hf_pyao.files import read_json_object, replace_file
from hf_pyao.text import echo

T = TypeVar("T")
D = TypeVar("D", bound="JsonDocument")

LARGEST = 1e100
"""Largest number that a document may hold."""

DEEPEST = 32
"""Most levels of nesting in what a document leaves to its writer."""


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


def read_fields(cls: type[T], values: object, where: str) -> T:
    """Build the dataclass *cls* from the plain values of its fields; nested ones too.

    Numbers must be finite and no larger than 1e100, so that arithmetic with them is safe. A null
    in a table of numbers stands for one that is none (see :func:`to_plain`), and is left out.

    Raises:
        ReportError: *values* is no object; a key is unknown or missing; a value has another type
            than its field. The message names the key, and for an unknown one the nearest.
    """
    plain = _check_keys(cls, values, where)
    types = get_type_hints(cls)
    read = {key: _read(types[key], value, f"{where}, {key}") for key, value in plain.items()}
    return cls(**read)


def _check_keys(cls: type, values: object, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ReportError(
            f"{where} holds a JSON {type(values).__name__}; expected an object.", key="file-damaged"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            hint = nearest(str(key), fields) or ";"
            raise ReportError(
                f"{where} has the key {echo(key)}, which {cls.__name__} has not{hint} it was "
                "written by another version of hf_pyao. Render it with the version that wrote it.",
                key="file-other-version",
            )
    for name, field in fields.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if name not in values and not has_default:
            raise ReportError(
                f"{where} lacks the key {name!r}, which {cls.__name__} needs: the file was cut "
                "off, or written by another version of hf_pyao.",
                key="file-damaged",
            )
    return values


def _read(expected: Any, value: Any, where: str, depth: int = 0) -> Any:
    """Return *value* if it is what the annotation *expected* says.

    Annotations that documents use: Any, plain types, dataclasses, ``list[X]``, ``dict[str, X]``,
    ``X | None``.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        (expected,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _read(expected, value, where, depth)
    if dataclasses.is_dataclass(expected):
        return read_fields(cast("type[Any]", expected), value, where)
    if expected is Any:
        return _read_any(value, where, depth)
    if origin is list and isinstance(value, list):
        return [
            _read(arguments[0], item, f"{where}[{index}]", depth)
            for index, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, dict):
        skips_null = arguments[1] is float
        return {
            key: _read(arguments[1], item, f"{where}, {echo(key)}", depth)
            for key, item in value.items()
            if not (skips_null and item is None)
        }
    if _is_plain(origin or expected, value):
        return value
    raise ReportError(
        f"{where} is {echo(value)}; expected {_EXPECTED[origin or expected]}.", key="file-damaged"
    )


_EXPECTED = {
    bool: "true or false",
    int: "a whole number, at most 1e100",
    float: "a number, at most 1e100",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _is_plain(expected: type, value: object) -> bool:
    if expected is bool or isinstance(value, bool):
        return expected is bool and isinstance(value, bool)
    if expected in (int, float):
        is_number = isinstance(value, int if expected is int else int | float)
        return is_number and abs(cast(float, value)) <= LARGEST
    return expected is str and isinstance(value, str)


def _read_any(value: Any, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise ReportError(f"{where} is nested deeper than {DEEPEST} levels.", key="file-damaged")
    if isinstance(value, dict):
        return _read(dict[str, Any], value, where, depth + 1)
    if isinstance(value, list):
        return _read(list[Any], value, where, depth + 1)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _read(float, value, where)
    return value


def check_version(values: Mapping[str, Any], cls: type, version: int, where: str) -> None:
    """Refuse a document of another version.

    Raises:
        ReportError: says which version came, which is read here, and what to do.
    """
    found = values.get("schema_version")
    if found != version:
        raise ReportError(
            f"{where} has schema_version {echo(found)}; this hf_pyao reads version {version} of a "
            f"{cls.__name__}. Render it with the version of hf_pyao that wrote it, or measure "
            "again.",
            key="file-other-version",
        )


def read_json(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ReportError: the file cannot be read, or holds no JSON object.
    """
    return read_json_object(
        path,
        ReportError,
        expected="Give a file that hf_pyao wrote (`pyao bench`, or a training run with "
        "--activation_offload_report).",
    )


def write_json(path: str | os.PathLike[str], document: Any) -> None:
    """Write *document* so that a reader sees the old file or the whole new one, never a part.

    Raises:
        ReportError: the file cannot be written, or *document* holds what JSON has no form for.
    """
    try:
        text = json.dumps(to_plain(document), indent=2, allow_nan=False, ensure_ascii=False)
        # A surrogate, of a file's name that is no UTF-8, becomes JSON's escape for it.
        replace_file(path, (text + "\n").encode("utf-8", "backslashreplace"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ReportError(
            f"cannot write {echo(str(path))}: {reason}.", key="file-unwritable"
        ) from error


class JsonDocument:
    """What every document has in common: a dataclass that is written and read whole.

    Its fields are the document's keys; ``schema_version`` has the version it is of as its default.
    """

    schema_version: int
    called: ClassVar[str] = "the report"
    """What messages call it where no one says where it is from."""

    @classmethod
    def from_dict(cls: type[D], values: Mapping[str, Any], where: str = "") -> D:
        """Read plain values, as :meth:`to_dict` makes them.

        Raises:
            ReportError: another schema version, an unknown or missing key, or a value of another
                type, each by name.
        """
        where = where or cls.called
        check_version(values, cls, cls.schema_version, where)
        return read_fields(cls, values, where)

    @classmethod
    def from_json_file(cls: type[D], path: str | os.PathLike[str]) -> D:
        """Read it from a file.

        Raises:
            ReportError: the file cannot be read, or holds no such document of this version.
        """
        return cls.from_dict(read_json(path), echo(os.fspath(path)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that :meth:`from_json_file` reads.

        Raises:
            ReportError: the file cannot be written.
        """
        write_json(path, self)
