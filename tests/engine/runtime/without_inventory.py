"""Random programs with nothing noted, refused or put back: fingerprints alone find what differs.

``hf_pyao.engine.rerun`` is switched off by exchanging its functions. ``verify_recompute="always"`` compares
each second run with the first. What is counted is whether it tells of the programs whose loss or
gradients then differ from plain torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from hf_pyao import attach
from hf_pyao.auto.recording import lever_recording
from hf_pyao.engine.recompute import replay, segment_admission, tracing
from hf_pyao.engine.recompute.segment_calls import RecordedCall
from hf_pyao.engine.rerun import inventory, surroundings
from hf_pyao.engine.rerun.generators import RandomState, RandomStates
from hf_pyao.errors import PyAOError
from hf_pyao.model.tiles import tiled_mlp
from tests.helpers.second_run_programs import CONFIGS, Program, here, proofs_made_once

SECOND_RUN_CONFIGS = tuple(each for each in CONFIGS if each)


def _nothing(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _does_nothing(*_: Any, **__: Any) -> None:
    pass


def _no_reason(*_: Any, **__: Any) -> str:
    return ""


def _never(*_: Any, **__: Any) -> bool:
    return False


def _patches() -> Iterator[Any]:
    noted = inventory.Noted
    for name in ("reason_unknown", "reason_not_again", "reason_not_undone", "changed_parameter"):
        yield mock.patch.object(noted, name, _no_reason)
    yield mock.patch.object(noted, "put_back", _nothing)
    yield mock.patch.object(noted, "undo", _does_nothing)
    yield mock.patch.object(surroundings.Surroundings, "put_back", _nothing)
    yield mock.patch.object(surroundings.Surroundings, "reason_not_again", _no_reason)
    yield mock.patch.object(surroundings, "may_be_disturbed", _never)
    yield mock.patch.object(RandomState, "restore", _does_nothing)
    yield mock.patch.object(RandomState, "kept", _nothing)
    yield mock.patch.object(RandomStates, "set", _does_nothing)
    yield mock.patch.object(RandomStates, "kept", _nothing)
    yield mock.patch.object(RecordedCall, "changed_argument", _never)
    yield mock.patch.object(replay, "modes_of_forward", _nothing)
    yield mock.patch.object(replay, "apply_settings", _does_nothing)
    yield mock.patch.object(tracing, "may_be_disturbed", _never)
    yield mock.patch.object(tiled_mlp, "may_be_disturbed", _never)
    for module in (segment_admission, tiled_mlp, lever_recording):
        yield mock.patch.object(module, "reason_of_modes_and_hooks", _no_reason)


@contextlib.contextmanager
def without_inventory() -> Iterator[Callable[[int], list[str] | str]]:
    """Switch the inventory off; give what runs the program of a seed: see :func:`_found`."""
    with contextlib.ExitStack() as stack:
        for patch in _patches():
            stack.enter_context(patch)
        stack.enter_context(proofs_made_once())
        yield _found


def _found(seed: int) -> list[str] | str:
    """Return what differs although no fingerprint has told of it.

    Else ``"caught"``: it differs, and fingerprints told of it before the optimizer's step;
    ``"told"``: they told, and what differs is in no loss or gradient; ``"raised"``: a second run
    failed in another way, such as with tensors of other shapes; ``"same"``; or ``"invalid"``: plain
    torch refuses it.
    """
    chosen = dict(SECOND_RUN_CONFIGS[seed % len(SECOND_RUN_CONFIGS)])
    programs = {
        mode: Program(seed, settings={**chosen, "verify_recompute": mode}, has_faults=False)
        for mode in ("off", "always")
    }
    expected = programs["off"].expected()
    if expected is None:
        return "invalid"
    unchecked, checked = (_trained(program) for program in programs.values())
    if not isinstance(unchecked, dict):
        return "raised"
    found = programs["off"].compared(expected, unchecked)
    differences = [name for name in found if name.startswith(("loss", "gradient"))]
    if isinstance(checked, dict):
        return differences or "same"
    if "gradients of this micro-batch are wrong" not in str(checked):
        return differences or "raised"
    return "caught" if differences else "told"


def _trained(program: Program) -> dict[str, Any] | Exception:
    """Return what *program* computes, or the error by which a second run was told of."""
    model = program.model()
    here.begin()
    with attach(model, program.config) as offloader:

        def run(micro_batch: Callable[[], None]) -> None:
            micro_batch()
            offloader._guard.raise_if_wrong()  # as a step of an optimizer does

        try:
            return program.train(model, run)
        except (PyAOError, RuntimeError, ValueError) as error:
            return error
