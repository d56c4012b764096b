"""Measure the codecs alone: bytes, error and time on one tensor.

    python recipes/bench/bench_codecs.py --result codecs.json
    python recipes/bench/bench_codecs.py --rows 16384 --columns 8192 --dtype bfloat16 --device cuda

Times are of encode and of decode on a drained device, caches warm; a codec pays off where they are
short against the time that the bytes it saves would take on the link.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_pyao.engine.codecs import CODECS
from hf_pyao.engine.codecs.backend import kernels_for
from hf_pyao.engine.codecs.base import BoundedCodec
from hf_pyao.engine.codecs.int8 import Int8Codec
from hf_pyao.engine.codecs.narrow import NarrowCodec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import parser_of, show, times_in_turns, write

SCHEMA_VERSION = 1
NUM_WARMUP = 3
COLUMNS = {
    "tensor": "{tensor}",
    "dtype": "{dtype}",
    "codec": "{codec}",
    "of the bytes": "{payload_ratio:.3f}",
    "rms error": "{relative_rms_error:.2e}",
    "encode, GiB/s": "{encode_gib_per_s:.1f}",
    "decode, GiB/s": "{decode_gib_per_s:.1f}",
}

STUDY_CODECS: Mapping[str, Callable[[], BoundedCodec]] = {
    **CODECS,
    "int8_group": partial(Int8Codec, "group"),
    "int8_tensor": partial(Int8Codec, "tensor"),
    "narrow": NarrowCodec,
}
"""Name in tables -> what makes the codec; configurations know those of ``CODECS`` by name."""


def study_codec(name: str) -> BoundedCodec:
    """Return the codec called *name*, to be given to a configuration as it is."""
    return STUDY_CODECS[name]()


def main(argv: list[str] | None = None) -> None:
    """Measure every codec on tensors that it accepts; print a table, write JSON if asked."""
    parser = parser_of(__doc__, rounds=10)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--rows", type=int, default=4096, help="tokens")
    parser.add_argument("--columns", type=int, default=2048, help="hidden size")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.rows, arguments.columns, arguments.rounds = 64, 32, 1
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    shape, dtype = (arguments.rows, arguments.columns), getattr(torch, arguments.dtype)
    rows = [
        {"tensor": kind, **_measure(study_codec(name), tensor, arguments.rounds)}
        for kind, tensor in _tensors(shape, dtype, device).items()
        for name in STUDY_CODECS
        if name != "identity" and study_codec(name).accepts(tensor)
    ]
    show(rows, COLUMNS)
    threads = torch.get_num_threads()
    write(arguments, "codecs", SCHEMA_VERSION, num_threads=threads, rows=rows)


def _tensors(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return normal values with a few columns of outliers, as activations have; the same cast up;
    a dropout mask; and indices."""
    values = torch.randn(shape, device=device)
    values[:, :: max(1, shape[1] // 4)] *= 30
    return {
        "activation": values.to(dtype),
        "cast to float32": values.bfloat16().float(),
        "mask": torch.rand(shape, device=device) < 0.9,
        "indices": torch.randint(32000, shape, device=device),
    }


def _measure(codec: BoundedCodec, tensor: torch.Tensor, rounds: int) -> dict[str, Any]:
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded.payload, encoded.spec)

    def drained(run: Callable[[], object]) -> None:
        run()
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)

    ways = {
        "encode": partial(drained, partial(codec.encode, tensor)),
        "decode": partial(drained, partial(codec.decode, encoded.payload, encoded.spec)),
    }
    drained(lambda: None)
    times = {way: each["wall"] for way, each in times_in_turns(ways, rounds, NUM_WARMUP).items()}
    error = (decoded.double() - tensor.double()).norm()
    return {
        "codec": codec.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "is_fused": kernels_for(tensor) is not None,
        "raw_bytes": tensor.nbytes,
        "payload_bytes": encoded.payload_bytes,
        "payload_ratio": encoded.payload_bytes / tensor.nbytes,
        "relative_rms_error": float(error / tensor.double().norm()),
        "max_relative_error": codec.max_relative_error,
        **times,
        **{
            f"{way}_gib_per_s": tensor.nbytes / 2**30 / (each.median_ms / 1e3)
            for way, each in times.items()
        },
    }


if __name__ == "__main__":
    main()
