"""Compare ways to save activation memory: ``python recipes/bench/bench_offload.py --help``.

``pyao bench`` with the models of the recipes known by name (``opt:1.3b``, ``llama:tiny``, ...).
It needs torch, transformers and accelerate alone, and runs from a checkout without installation.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("hf_pyao") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROGRAM = "python recipes/bench/bench_offload.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness; return the exit status (2: a setting cannot be)."""
    from hf_pyao.errors import PyAOError
    from hf_pyao.tools.bench.arguments import DESCRIPTION, epilog, run_from_arguments
    from hf_pyao.tools.option_table import add_options

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=epilog(PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "bench")
    try:
        return run_from_arguments(parser.parse_args(argv))
    except PyAOError as error:
        print(f"bench_offload.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
