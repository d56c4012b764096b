"""The benchmark harness: methods of saving activation memory, measured alike and side by side.

``harness`` runs each method in a process of its own (``processes``, ``worker``), which builds the
model (``models``), installs the method (``methods``), and measures it (``measure``). The results
are ``hf_pyao.plan.documents.bench.BenchReport``. Importing this package imports no torch.
"""
