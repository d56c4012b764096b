"""Measure the codecs alone: bytes, error and time on one tensor, as JSON.

    python recipes/bench/bench_codecs.py --out codecs.json
    python recipes/bench/bench_codecs.py --rows 16384 --columns 8192 --dtype bfloat16 --device cuda

Times are of encode and of decode on a drained device, caches warm; a codec pays off where they are
short against the time that the bytes it saves would take on the link.
"""

from __future__ import annotations

import argparse
import sys
import time
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
from hf_pyao.plan.documents.bench import StepTimes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

SCHEMA_VERSION = 1
NUM_WARMUP = 3

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
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    tensors = _tensors(arguments.rows, arguments.columns, getattr(torch, arguments.dtype), device)
    rows = []
    for kind, tensor in tensors.items():
        for name in STUDY_CODECS:
            codec = study_codec(name)
            if name != "identity" and codec.accepts(tensor):
                row = {"tensor": kind, **_measure(codec, tensor, arguments.repeats)}
                rows.append(row)
                _print_row(row)
    if arguments.out:
        write_result(
            arguments.out,
            kind="codecs",
            schema_version=SCHEMA_VERSION,
            config={**vars(arguments), "out": None, "num_threads": torch.get_num_threads()},
            device=_describe(device),
            rows=rows,
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--rows", type=int, default=4096, help="tokens")
    parser.add_argument("--columns", type=int, default=2048, help="hidden size")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write JSON here")
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    return arguments


def _tensors(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return normal values with a few columns of outliers, as activations have; the same cast up;
    a dropout mask; and indices."""
    values = torch.randn(rows, columns, device=device)
    values[:, :: max(1, columns // 4)] *= 30
    return {
        "activation": values.to(dtype),
        "cast to float32": values.bfloat16().float(),
        "mask": torch.rand(rows, columns, device=device) < 0.9,
        "indices": torch.randint(32000, (rows, columns), device=device),
    }


def _measure(codec: BoundedCodec, tensor: torch.Tensor, repeats: int) -> dict[str, Any]:
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded.payload, encoded.spec)
    raw_bytes = tensor.numel() * tensor.element_size()
    encode = _time(lambda: codec.encode(tensor), tensor.device, repeats)
    decode = _time(lambda: codec.decode(encoded.payload, encoded.spec), tensor.device, repeats)
    return {
        "codec": codec.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "is_fused": kernels_for(tensor) is not None,
        "raw_bytes": raw_bytes,
        "payload_bytes": encoded.payload_bytes,
        "payload_ratio": encoded.payload_bytes / raw_bytes,
        "relative_rms_error": _relative_rms(tensor, decoded),
        "max_relative_error": codec.max_relative_error,
        "encode": encode,
        "decode": decode,
        "encode_gib_per_s": raw_bytes / 2**30 / (encode.median_ms / 1e3),
        "decode_gib_per_s": raw_bytes / 2**30 / (decode.median_ms / 1e3),
    }


def _relative_rms(tensor: torch.Tensor, decoded: torch.Tensor) -> float:
    error = (decoded.double() - tensor.double()).norm()
    return float(error / tensor.double().norm())


def _time(run: Callable[[], object], device: torch.device, repeats: int) -> StepTimes:
    times_ms = []
    for _ in range(NUM_WARMUP + repeats):
        _drain(device)
        start = time.perf_counter()
        run()
        _drain(device)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return StepTimes.of(times_ms[NUM_WARMUP:], NUM_WARMUP)


def _drain(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _describe(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


def _print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['tensor']:16} {row['dtype']:9} {row['codec']:12} "
        f"{row['payload_ratio']:6.3f} of the bytes  rms error {row['relative_rms_error']:.2e}  "
        f"encode {row['encode'].median_ms:8.3f} ms ({row['encode_gib_per_s']:6.1f} GiB/s)  "
        f"decode {row['decode'].median_ms:8.3f} ms ({row['decode_gib_per_s']:6.1f} GiB/s)"
    )


if __name__ == "__main__":
    main()
