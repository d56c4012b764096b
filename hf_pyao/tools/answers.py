"""Answers of commands that compute, kept in the user's cache directory and given again.

``pyao estimate`` and ``pyao plan`` compute for half a minute what follows from their options, the
model's configuration and the versions of a few packages. The answer to the same question is read
from a file, without importing torch.

The files are in ``$XDG_CACHE_HOME/hf_pyao`` where that variable is set. Otherwise they are in
``~/.cache/hf_pyao``, on macOS in ``~/Library/Caches/hf_pyao`` and on Windows in
``%LOCALAPPDATA%/hf_pyao``. ``HF_HOME`` is not used: its folders hold downloads and may
be shared.
A file that cannot be read or written is no error: the answer is computed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hf_pyao import version
from hf_pyao.files import read_json_object, replace_file
from hf_pyao.plan.documents.provenance import source_digest
from hf_pyao.plan.documents.schema import JsonDocument, ReportError, to_plain
from hf_pyao.text import describe_error, say
from hf_pyao.tools.few_collections import few_collections, importing
from hf_pyao.tools.packages import need_torch

D = TypeVar("D", bound=JsonDocument)

logger = logging.getLogger(__name__)

MOST_ANSWERS = 200
"""Files that are kept: those that were used last."""

MOST_ANSWER_BYTES = 4 * 2**20
"""A larger answer is not kept."""

DECIDING_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
"""Packages whose versions may change an answer."""

BESIDE_THE_QUESTION = frozenset(
    {"run", "json", "output", "save", "step", "step_method", "processes", "no_cache"}
)
"""Options that do not change the answer: where it goes, and how it is computed."""


def answered(
    args: argparse.Namespace, model: str, kind: type[D], compute: Callable[[], D], *, tells: bool
) -> D:
    """Return the answer to a command: the one that is kept, or else a computed one.

    Args:
        args: the command's options, ``no_cache`` among them.
        model: the model that is asked about, as
            :func:`~hf_pyao.tools.estimate.model_specs.parse_model` takes it.
        kind: the class of the answer.
        compute: computes it; imports torch.
        tells: say on stderr that the answer is not new.
    """
    if args.no_cache:
        return computed(compute)
    question = question_of(args, model)
    kept = None if question is None else kept_answer(question, kind)
    if kept is not None:
        if tells:
            say("The answer to this question was kept; --no-cache computes it anew.", sys.stderr)
        return kept
    answer = computed(compute)
    if question is None:  # the model's configuration may be there now
        question = question_of(args, model)
    if question is not None:
        keep_answer(question, answer)
    return answer


def computed(compute: Callable[[], D], *, needs_models: bool = True) -> D:
    """Return what *compute* returns, which needs torch.

    Args:
        compute: computes an answer.
        needs_models: it builds a model of transformers.
    """
    with few_collections():
        with importing():
            need_torch()
            if needs_models:
                import transformers.models.auto.modeling_auto  # noqa: F401
        return compute()


def question_of(args: argparse.Namespace, model: str) -> dict[str, Any] | None:
    """Return what an answer follows from; None if the model's configuration is not on this machine.

    Args:
        args: the command's options.
        model: the model that is asked about.
    """
    config = ""
    if ":" not in model:
        path = _config_file(model)
        try:
            config = "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            config = ""
        if not config:
            return None
    options = {
        name: _plain(value) for name, value in vars(args).items() if name not in BESIDE_THE_QUESTION
    }
    return {
        "hf_pyao": version.__version__,
        "source": source_digest(),
        "python": platform.python_version(),
        "versions": {name: _version_of(name) for name in DECIDING_PACKAGES},
        "config": config,
        "options": options,
    }


def kept_answer(question: Mapping[str, Any], kind: type[D]) -> D | None:
    """Return the answer that is kept to *question*; None if there is none that can be read."""
    path = _path_of(question)
    if path is None or not path.is_file():
        return None
    try:
        values = read_json_object(path, ReportError, expected="An answer that was kept.")
        if values.get("question") != question:
            raise ReportError("it is the answer to another question", key="file-kind")
        found = kind.from_dict(values.get("answer", {}), str(path))
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used now
    except Exception as error:  # whatever is in the file, the answer can be computed
        logger.debug("The answer in %s is not used: %s", path, describe_error(error))
        return None
    return found


def keep_answer(question: Mapping[str, Any], answer: JsonDocument) -> None:
    """Keep *answer*, and drop the answers that were used least recently."""
    path = _path_of(question)
    if path is None:
        return
    try:
        text = json.dumps({"question": question, "answer": to_plain(answer)}, allow_nan=False)
        content = text.encode()
        if len(content) > MOST_ANSWER_BYTES:
            return
        replace_file(path, content)
        _drop_oldest(path.parent.glob("*.json"))
    except (OSError, TypeError, ValueError) as error:
        logger.debug("The answer is not kept in %s: %s", path, describe_error(error))


def answers_folder() -> Path | None:
    """Return where answers are kept; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if base:
            return Path(base) / "hf_pyao"
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA", "")
            return Path(base) / "hf_pyao" if base else None
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "hf_pyao"
    return home / ".cache" / "hf_pyao"


def _path_of(question: Mapping[str, Any]) -> Path | None:
    folder = answers_folder()
    if folder is None:
        return None
    text = json.dumps(question, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _drop_oldest(paths: Iterable[Path]) -> None:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # another process may have dropped it
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[MOST_ANSWERS:]:
        path.unlink(missing_ok=True)


def _config_file(model: str) -> Path | None:
    """Return the ``config.json`` of a folder, or of a model in the hub's cache; None: not there."""
    path = Path(model) / "config.json"
    if path.is_file():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except Exception as error:  # no hub, or no such name
        logger.debug("No configuration of %s is known: %s", model, describe_error(error))
        return None
    return Path(found) if isinstance(found, str) else None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
