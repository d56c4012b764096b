"""Runs many random programs, and writes down what came of them.

    python -m tests.engine.runtime.run_programs --count 3000 --output found.json

Each program has a time limit, so that one that hangs is named, and the run goes on.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.second_run_programs import of_seed

LIMIT_S = 60
PROGRESS_EVERY = 25


def outcome_of(run: Callable[[int], list[str] | str], seed: int) -> tuple[str, str]:
    """Run the program of *seed*; return what came of it, and what is to be said of it."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    faulthandler.dump_traceback_later(2 * LIMIT_S, exit=True)
    try:
        found = run(seed)
    except TimeoutError:
        faulthandler.dump_traceback(all_threads=True)
        return "hangs", traceback.format_exc(limit=-3)
    except Exception as error:
        return "error", "".join(traceback.format_exception(error, limit=-4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if isinstance(found, str):
        return found, ""
    return ("differs", f"{found[:4]}") if found else ("same", "")


def _alarm(*_: Any) -> None:
    raise TimeoutError(f"a program took more than {LIMIT_S} s")


def main() -> None:
    """Run the programs that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=3000, help="number of programs")
    parser.add_argument("--every", type=int, default=1, help="distance of the seeds")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _alarm)
    gc.collect()
    gc.freeze()  # micro-batches that run again collect garbage; what was imported stays
    counts: collections.Counter[str] = collections.Counter()
    notable: dict[str, str] = {}
    start_s = time.monotonic()
    for number in range(options.count):
        seed = options.start + number * options.every
        outcome, said = outcome_of(of_seed, seed)
        counts[outcome] += 1
        if said:
            notable[str(seed)] = f"{outcome}: {said}"
            print(f"seed {seed}: {outcome}: {said}", flush=True)  # noqa: T201
        if (number + 1) % PROGRESS_EVERY == 0:
            took_s = time.monotonic() - start_s
            print(f"{number + 1} in {took_s:.0f} s: {dict(counts)}", flush=True)  # noqa: T201
    if options.output is not None:
        result = {
            "command": f"python -m tests.engine.runtime.run_programs {' '.join(sys.argv[1:])}",
            "torch": torch.__version__,
            "counts": dict(counts),
            "notable": notable,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
