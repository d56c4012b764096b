"""Commands that have another name now; the old names are to go with version 0.3."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_pyao.text import say

_FINDS = {"fastest": "micro-batch", "largest": "largest-micro-batch"}


def renamed(argv: Sequence[str]) -> list[str]:
    """Return *argv* with today's name of its command, and say on stderr what that is."""
    if not argv or argv[0] not in ("microbatch", "predict"):
        return list(argv)
    old = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if argv[0] == "microbatch":
        old.add_argument("--find", default="fastest")
        known, rest = old.parse_known_args(argv[1:])
        now = "estimate --find micro-batch"
        new = ["estimate", *rest, "--find", _FINDS.get(known.find, known.find)]
    else:
        old.add_argument("--plan", action="append", default=[])
        old.add_argument("--output", action="append", default=[])
        known, rest = old.parse_known_args(argv[1:])
        now = "plan PROFILE.json --try"
        saved = [part for path in known.output for part in ("--save", path)]
        new = ["plan", *rest, *saved, "--try", *known.plan]
    say(f"pyao: `pyao {argv[0]}` is `pyao {now}` now; the old name will be removed.", sys.stderr)
    return new
