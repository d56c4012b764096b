"""What lossy codecs do to gradients and to training: the error study.

    python recipes/studies/compression_error.py --out compression_error.json
    python recipes/studies/compression_error.py --out compression_error.json --resume
    python recipes/studies/compression_error.py --smoke

Small OPT, GPT-2 and Llama models with new weights learn the sources of Python's standard library,
on a CPU, in fp32 and under bf16 autocast, from several seeds, once as they are and once with each
codec. A codec never changes a forward pass, only what backward reads. What is looked at:

gradients  Along the plain run, at a few fixed steps, the gradient of a fixed batch is taken again
           with each codec and each set of slots, at the same weights: relative error and cosine, of
           the whole gradient and of each layer.
curves     The same seed trains with the codec: how far is its loss curve from the plain one, how
           far the loss on held-out text, and how far are seeds from one another? A run whose first
           weights were nudged by 1e-6 of their size shows how far rounding alone drives curves.
width      The gradients again in a model eight times as wide, because a row and a group of 128 are
           different things only where rows are long; and with an int8 that rounds nothing to zero,
           because a ReLU's backward asks which values were zero.
overflow   The same under fp16 autocast with a loss scale that grows until gradients overflow: how
           many steps are skipped, and from which scale on does the first gradient overflow?

Lossless codecs are in the table as controls: their differences must be zero to the bit.

Results are written to --out after every run, and --resume goes on from there (or, if nothing is
left to do, only prints the tables and draws the plot, next to --out). The whole study takes about
half an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.provenance import collect_provenance, git_state, now
from studies.compression_gradients import first_overflow, gradient_rows, over_probes
from studies.compression_summary import SIGNS, WIDE, summarise, write_document
from studies.compression_tables import draw, tables
from studies.compression_training import (
    ALL_SLOTS,
    LOSSLESS,
    LOSSY,
    MODELS,
    NONE,
    NUDGED,
    SIGN_KEEPING,
    SLOTS,
    Sizes,
    Text,
    Training,
    Variant,
    difference_to,
)

SCHEMA_VERSION = 1
PRECISIONS = ("fp32", "bf16")
PROBE_SEED = 1_000_000
FP16_CODECS = (NONE, "int8", "int4")
PART_CODEC, PART_PRECISION = "int4", "bf16"
"""Single slots are trained with the coarsest codec, in the precision that is used in practice."""
TIMES_AS_WIDE, WIDE_LAYERS, WIDE_STEPS = 8, 2, 60
EVERY_VARIANT = (
    *(Variant(codec, slots) for slots in SLOTS for codec in LOSSY),
    *(Variant(codec) for codec in LOSSLESS),
)

Unit = tuple[str, Callable[[], dict[str, Any]]]


class Study:
    """The runs of the study, in the order of their weight, and what is known of them."""

    def __init__(self, arguments: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
        self.arguments, self.runs = arguments, runs
        self.sizes = Sizes(**arguments.sizes)
        self.text = Text.read(self.sizes)

    def units(self) -> Iterator[Unit]:
        """Yield the name of each run, and the function that does it."""
        arguments = self.arguments
        cells = [
            (model, precision, seed)
            for seed in range(arguments.seeds)
            for precision in PRECISIONS
            for model in arguments.models
        ]
        whole = [Variant(NUDGED), *(Variant(codec) for codec in LOSSY)]
        for cell in cells:
            yield self._unit(cell, Variant(NONE))
            for variant in whole:
                yield self._unit(cell, variant)
        for cell in cells:
            if cell[2] == 0:
                yield from (self._unit(cell, Variant(codec)) for codec in LOSSLESS)
        for cell in cells:
            if cell[1] == PART_PRECISION:
                parts = (Variant(PART_CODEC, slots) for slots in SLOTS if slots != ALL_SLOTS)
                yield from (self._unit(cell, variant) for variant in parts)
        for seed in range(arguments.seeds):
            for model in arguments.models:
                for codec in FP16_CODECS:
                    yield self._unit((model, "fp16", seed), Variant(codec))
        for model in arguments.models:
            yield f"{model}/{PART_PRECISION}/0/{NONE}/{WIDE}", partial(self._wide, model)
            yield f"{model}/{PART_PRECISION}/0/{NONE}/{SIGNS}", partial(self._signs, model)

    def _unit(self, cell: tuple[str, str, int], variant: Variant) -> Unit:
        model, precision, seed = cell
        name = f"{model}/{precision}/{seed}/{variant.codec}/{variant.slots}"
        reference = f"{model}/{precision}/{seed}/{NONE}/{ALL_SLOTS}"
        labels = {
            "model": model,
            "precision": precision,
            "seed": seed,
            "codec": variant.codec,
            "slots": variant.slots,
        }

        def run() -> dict[str, Any]:
            training = Training(model, precision, seed, variant, self.text, self.sizes)
            if precision == "fp16":
                return {**labels, **self._scaled(training)}
            if variant.codec == NONE:
                arguments = self.arguments
                found = self._probed(training, arguments.probe_steps, arguments.steps)
                return {**labels, **found}
            training.run(self.arguments.steps)
            return {**labels, **difference_to(self.runs[reference], training.result())}

        return name, run

    def _probed(
        self,
        training: Training,
        probe_steps: list[int],
        num_steps: int,
        variants: Sequence[Variant] = EVERY_VARIANT,
    ) -> dict[str, Any]:
        """Train plainly, and compare gradients on the way."""
        batches = self.text.batches(PROBE_SEED, self.sizes.samples)
        ids = [next(batches), next(batches)]
        rows: list[dict[str, Any]] = []
        for step in probe_steps:
            training.run(step - len(training.losses))
            rows += gradient_rows(training.model, training.precision, ids, variants)
        training.run(num_steps - len(training.losses))
        return {**training.result(), "gradients": over_probes(rows)}

    def _wide(self, model: str) -> dict[str, Any]:
        hidden = TIMES_AS_WIDE * self.sizes.hidden
        sizes = replace(self.sizes, hidden=hidden, layers=WIDE_LAYERS)
        num_steps = min(WIDE_STEPS, self.arguments.steps)
        return self._extra(model, WIDE, sizes, [0, num_steps], num_steps, EVERY_VARIANT)

    def _signs(self, model: str) -> dict[str, Any]:
        """Find out whether it is what int8 rounds to zero that a ReLU suffers from."""
        codecs = ("int8", SIGN_KEEPING)
        variants = [Variant(codec, slots) for slots in ("mlp_act", ALL_SLOTS) for codec in codecs]
        arguments = self.arguments
        return self._extra(
            model, SIGNS, self.sizes, arguments.probe_steps, arguments.steps, variants
        )

    def _extra(
        self,
        model: str,
        kind: str,
        sizes: Sizes,
        probe_steps: list[int],
        num_steps: int,
        variants: Sequence[Variant],
    ) -> dict[str, Any]:
        training = Training(model, PART_PRECISION, 0, Variant(NONE), self.text, sizes)
        found = self._probed(training, probe_steps, num_steps, variants)
        labels = {"model": model, "precision": PART_PRECISION, "seed": 0, "codec": NONE}
        return {**labels, "slots": ALL_SLOTS, "kind": kind, "hidden": sizes.hidden, **found}

    def _scaled(self, training: Training) -> dict[str, Any]:
        """Train under fp16 autocast with a loss scale that soon grows too large."""
        exponent = None
        if training.variant.codec == NONE:
            batch = next(self.text.batches(PROBE_SEED, self.sizes.samples))
            variants = [Variant(codec) for codec in FP16_CODECS]
            exponents = first_overflow(training.model, batch, variants)
            exponent = dict(zip(FP16_CODECS, exponents, strict=True))
        training.scaler = torch.amp.GradScaler("cpu", growth_interval=self.arguments.growth_steps)
        training.run(self.arguments.fp16_steps)
        return {
            **training.result(),
            "num_overflows": training.num_overflows,
            "final_scale": training.scaler.get_scale(),
            "first_overflow_exponent": exponent,
        }


def main(argv: list[str] | None = None) -> None:
    """Run what is missing of the study; print tables, draw the plot."""
    arguments = _parse(argv)
    out = None if arguments.out is None else Path(arguments.out)
    document = _begin(arguments, out)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    study = Study(arguments, document["runs"])
    document["text"] = study.text.name
    missing = [unit for unit in study.units() if unit[0] not in document["runs"]]
    with tqdm(missing, unit="run", mininterval=1.0) as progress:
        for name, run in progress:
            progress.set_postfix_str(name)
            start = time.perf_counter()
            document["runs"][name] = {**run(), "wall_s": round(time.perf_counter() - start, 2)}
            if out is not None:
                write_document(document, out)
    document["summary"] = summarise(document)
    print(tables(document))
    if out is not None:
        write_document(document, out)
        draw(document, out.with_suffix(".png"))


def _begin(arguments: argparse.Namespace, out: Path | None) -> dict[str, Any]:
    """Return the document to fill: a new one, or the one to go on with."""
    left_out = ("out", "resume", "smoke")
    config = {key: value for key, value in vars(arguments).items() if key not in left_out}
    if not arguments.resume:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "compression error",
            "provenance": asdict(collect_provenance()),
            "resumed": [],
            "config": {**config, "num_threads": 1},
            "runs": {},
        }
    if out is None or not out.is_file():
        raise ConfigError(
            f"--resume goes on from the file that --out names, and {arguments.out!r} is no file. "
            "Leave --resume out to begin."
        )
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{arguments.out!r} has schema_version {document.get('schema_version')!r}; this recipe "
            f"goes on from {SCHEMA_VERSION}. Begin again without --resume."
        )
    begun = {key: value for key, value in document["config"].items() if key != "num_threads"}
    if begun != config:
        raise ConfigError(
            f"{arguments.out!r} was begun with {begun}, and --resume was given with {config}. "
            "Give the same options, or begin again in another file."
        )
    commit, is_dirty = git_state()
    document["resumed"].append({"at": now(), "commit": commit, "is_dirty": is_dirty})
    return document


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, default=3, help="initial weights and batch orders")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run")
    parser.add_argument(
        "--probe_steps", type=int, nargs="+", help="when gradients are compared (0, half, all)"
    )
    parser.add_argument("--fp16_steps", type=int, default=60, help="steps with a growing scale")
    parser.add_argument(
        "--growth_steps", type=int, default=4, help="the loss scale doubles every so many steps"
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny model: does it run?")
    parser.add_argument("--out", help="write JSON here, and the plot beside it")
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out holds")
    arguments = parser.parse_args(argv)
    arguments.sizes = asdict(Sizes())
    if arguments.smoke:
        arguments.sizes |= {"hidden": 16, "layers": 2, "tokens": 16, "samples": 2, "vocab": 300}
        arguments.sizes["text_mib"] = 0.05
        arguments.models, arguments.seeds, arguments.steps = arguments.models[:1], 2, 2
        arguments.probe_steps, arguments.fp16_steps = arguments.probe_steps or [2], 2
    if arguments.probe_steps is None:
        arguments.probe_steps = [0, arguments.steps // 2, arguments.steps]
    if sorted(arguments.probe_steps) != arguments.probe_steps or (
        arguments.probe_steps and not 0 <= arguments.probe_steps[-1] <= arguments.steps
    ):
        parser.error(f"--probe_steps must rise, within 0 and --steps ({arguments.steps})")
    return arguments


if __name__ == "__main__":
    main()
