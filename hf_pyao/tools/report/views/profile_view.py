"""What a profile shows: times of the parts of a layer, and slots."""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.plan.documents.profile import Profile, ProfiledModule, ProfiledSlot, Spread
from hf_pyao.quantities import ABSENT, MIB
from hf_pyao.tools.report.views.view import Table, View, cell, table_of


def profile_view(profile: Profile) -> View:
    """Return what was measured, parts and slots."""
    return View(
        title=profile.title,
        summary=profile_summary(profile),
        tables=profile_tables(profile),
        provenance=profile.provenance,
    )


def profile_tables(profile: Profile) -> list[Table]:
    """Return the tables of modules and of slots."""
    modules: list[tuple[str, Callable[[ProfiledModule], str]]] = [
        ("part of a layer", lambda each: each.path or "(the layer itself)"),
        ("forward, ms", lambda each: _time(each.forward)),
        ("backward, ms", lambda each: _time(each.backward)),
        ("saved, MiB", lambda each: f"{each.saved_bytes / MIB:.2f}"),
        ("packed, MiB", lambda each: f"{each.packed_bytes / MIB:.2f}"),
        ("GiB/s", lambda each: cell(each.throughput_gib_per_s, ".2f")),
    ]
    slots: list[tuple[str, Callable[[ProfiledSlot], str]]] = [
        ("slot", lambda slot: slot.name),
        ("MiB", lambda slot: f"{slot.nbytes / MIB:.2f}"),
        ("dtype", lambda slot: slot.dtype),
        ("layers", lambda slot: str(slot.num_layers)),
        ("stays", lambda slot: slot.stays or ""),
    ]
    return [
        table_of(profile.modules, modules, keeps_all=True),
        table_of(profile.slots, slots, keeps_all=True),
    ]


def profile_summary(profile: Profile) -> str:
    """Say in a few sentences what was measured, or predicted."""
    speed = profile.link_gib_per_s
    link = (
        "the link's speed is not known" if speed is None else f"the link carried {speed:.1f} GiB/s"
    )
    if not profile.is_measured:
        link = "no copy was looked at" if speed is None else f"a link of {speed:.1f} GiB/s"
    how = f"{profile.num_micro_batches} micro-batches" if profile.is_measured else "Predicted,"
    ranks = f", mean of {profile.num_ranks} ranks" if profile.num_ranks > 1 else ""
    words = [
        f"{how} on {profile.device}{ranks}; {len(profile.layer_names)} layers, forward "
        f"{_time(profile.layer_forward)} ms and backward {_time(profile.layer_backward)} ms each "
        f"(mean, least to most), head and loss {_time(profile.head)} ms; {link}."
    ]
    if profile.shapes:
        words.append(f"Called with {', '.join(profile.shapes)}.")
    if profile.compiled_layers:
        words.append("Compiled layers are measured whole: nothing is seen inside of them.")
    if profile.why_no_program:
        words.append(f"The step is not in it operation by operation: {profile.why_no_program}")
    return " ".join(words)


def _time(spread: Spread | None) -> str:
    if spread is None:
        return ABSENT
    return f"{spread.mean_ms:.3f} ({spread.least_ms:.3f}–{spread.most_ms:.3f})"
