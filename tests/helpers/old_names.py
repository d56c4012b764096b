"""Finds modules of hf_pyao by the names that they had before floors and rooms; for old scripts."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES: dict[str, str | list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Old name -> new name, or the modules that have its names now."""


class OldNames(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        new = NAMES[module.__name__]
        if isinstance(new, str):
            sys.modules[module.__name__] = import_module(new)
            return
        homes = [import_module(name) for name in new]

        def find(name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"{module.__name__} has no {name}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    sys.meta_path.insert(0, OldNames())
