"""Which installed packages cannot be imported, and why: one broken package breaks many others.

transformers imports what is installed (torchvision, for one), so that the error that a user sees
may be far from the package that causes it. Imports nothing heavy itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from hf_pyao.errors import PyAOError
from hf_pyao.text import describe_error

CHECKED = (
    *("triton", "torchvision", "torchaudio", "matplotlib", "rich", "bitsandbytes", "deepspeed"),
    *("liger_kernel", "accelerate", "datasets", "transformers.modeling_utils", "peft", "trl"),
)
"""What is imported to see whether it can be; what others import comes before them."""

REMEDY = "Install it anew to suit the versions of the others, or uninstall it."
"""What to do about a broken package."""

MODELS = "transformers.modeling_utils"
"""What every model of transformers imports."""


@dataclass(frozen=True)
class Broken:
    """A package that is installed, and cannot be imported."""

    package: str
    reason: str
    """The error, in one line."""

    def __str__(self) -> str:
        return f"{self.package} cannot be imported ({self.reason})"


def import_failure(name: str) -> Broken | None:
    """Import the module *name*; return which package is at fault if that fails, else None."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken package may raise anything
        cause = _root_cause(error)
        return Broken(_package_at_fault(cause) or name.split(".")[0], _reason(cause))
    return None


def need_torch() -> None:
    """Say in one line if torch itself cannot be imported.

    Raises:
        PyAOError: it cannot.
    """
    failure = import_failure("torch")
    if failure is not None:
        raise PyAOError(
            f"{failure}. Without torch nothing else can be looked at: install it anew.",
            key="missing-package",
        )


def is_installed(name: str) -> bool:
    """Say whether the package of the module *name* is there, without importing it."""
    try:
        return importlib.util.find_spec(name.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def serve_imports(connection: Connection, names: Sequence[str]) -> None:
    """Import *names* in a measuring process; send ``("import", Broken | None)`` for each."""
    for name in names:
        connection.send(("import", import_failure(name)))


def _reason(error: BaseException) -> str:
    """Return the error in one line, without the path of the package's file."""
    path = getattr(error, "path", None)
    text = describe_error(error)
    return text.replace(f" ({path})", "") if path else text


def _root_cause(error: BaseException) -> BaseException:
    seen = {id(error)}
    while True:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None or id(cause) in seen:
            return error
        seen.add(id(cause))
        error = cause


def _package_at_fault(error: BaseException) -> str | None:
    """Return the package in whose code *error* was raised; None if that is this module's."""
    packages = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in _frames(error)]
    others = [package for package in packages if package != "importlib"]
    return others[-1] if others and others[-1] != "hf_pyao" else None


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
