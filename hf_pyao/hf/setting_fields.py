"""The dataclass fields behind flags and behind the plugin, made from PyAOConfig's settings.

Type checkers and editors read ``setting_fields.pyi`` instead, which lists the same fields;
``python tests/hf/setting_stubs.py`` writes it, and a test compares it with these.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any, get_type_hints

from hf_pyao.config import SETTINGS, PyAOConfig
from hf_pyao.hf.flags import HIDDEN, OffloadSwitches, flag_metadata, flag_of
from hf_pyao.settings.removed import REMOVED_SETTINGS

_TYPES = get_type_hints(PyAOConfig)

ArgumentFields = make_dataclass(
    "ArgumentFields",
    [
        # None, and not the configuration's default, so that "given" can be told from "default".
        (
            flag_of(name),
            setting.kind.flag_type | None,
            field(default=None, metadata=flag_metadata(setting)),
        )
        for name, setting in SETTINGS.items()
    ]
    # Flags of earlier versions are parsed, to be refused by name.
    + [
        (flag_of(name), str | None, field(default=None, repr=False, metadata=HIDDEN))
        for name in sorted(REMOVED_SETTINGS)
    ],
    bases=(OffloadSwitches,),
    namespace={"__module__": __name__, "__doc__": "A field for each flag."},
)

PluginFields = make_dataclass(
    "PluginFields",
    [
        (name, Any if _TYPES[name] is Any else _TYPES[name] | None, field(default=None))
        for name in SETTINGS
    ],
    namespace={"__module__": __name__, "__doc__": "A field for each setting; None: not given."},
    kw_only=True,
)
