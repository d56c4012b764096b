"""Which tensors compiled code saves, on fake tensors: the same partition, and no code generated.

AOTAutograd traces a graph forward and backward, decomposes it, runs the backend's passes over both,
and divides them. What the forward half returns for backward is what autograd saves. Where the
backend is Inductor, that much of it runs here, and the halves are then called operation by
operation. Fused code makes fewer temporary tensors, and takes less time; what it saves is the same.
"""

from __future__ import annotations

from typing import Any

from hf_pyao.model.compiled.compiled_calls import Backend

_AS_THEY_ARE = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends of torch that generate no code, and run on fake tensors as they are."""


def fake_backend(backend: Backend) -> Backend | None:
    """Return a backend for fake tensors that divides graphs as *backend* does; None: not known."""
    if getattr(backend, "compiler_name", "") == "inductor":
        return InductorPartition()
    given = getattr(backend, "compiler_fn", backend)
    name = getattr(given, "__name__", "")
    is_of_torch = getattr(given, "__module__", "").startswith("torch._dynamo.backends")
    return given if is_of_torch and name in _AS_THEY_ARE else None


class InductorPartition:
    """Inductor's passes and partitioner, without its code generation."""

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        """Compile *graph*."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.decomposition import select_decomp_table

        def as_it_is(half: Any, _: Any) -> Any:
            return make_boxed_func(half.forward)

        compiler = aot_autograd(
            fw_compiler=as_it_is,
            bw_compiler=as_it_is,
            partition_fn=partition_fn,
            decompositions=select_decomp_table,
        )
        return compiler(graph, inputs)

    def __eq__(self, other: object) -> bool:
        """Say that all of them are alike."""
        return isinstance(other, InductorPartition)

    def __hash__(self) -> int:
        """Hash alike."""
        return hash(InductorPartition)
