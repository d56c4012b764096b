"""Writes ``hf_pyao/hf/setting_fields.pyi``, which type checkers and editors read.

Run it after a setting was added: ``python tests/hf/setting_stubs.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from hf_pyao.hf import setting_fields
from hf_pyao.hf.flags import OffloadSwitches

STUBS = Path(setting_fields.__file__).with_suffix(".pyi")

HEAD = '''"""The fields that setting_fields.py makes. Written by tests/hf/setting_stubs.py."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.hf.flags import OffloadSwitches
'''


def stubs() -> str:
    """Return the text of the stub file."""
    inherited = {field.name for field in dataclasses.fields(OffloadSwitches)}
    return HEAD + "".join(
        (
            "\n@dataclass\nclass ArgumentFields(OffloadSwitches):\n",
            *_lines(setting_fields.ArgumentFields, inherited),
            "\n@dataclass(kw_only=True)\nclass PluginFields:\n",
            *_lines(setting_fields.PluginFields, set()),
        )
    )


def _lines(cls: type[Any], inherited: set[str]) -> list[str]:
    types = get_type_hints(cls)  # a field's own `type` is what HfArgumentParser made of it
    own = [
        field.name
        for field in dataclasses.fields(cls)
        if field.repr and field.name not in inherited
    ]
    return [f"    {name}: {_text(types[name])} = ...\n" for name in own]


def _text(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("collections.abc.", "").replace("typing.", "")


if __name__ == "__main__":
    STUBS.write_text(stubs(), encoding="utf-8")
