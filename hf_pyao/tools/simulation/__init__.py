"""The real engine on fake tensors: the slowest link there could be, quantised bases, kept models.

The ledger is ``hf_pyao/plan/step/ledger.py``; the operations that CUDA would pick are in
``hf_pyao/model/fake_cuda/``. Ledgers count storages that tensors keep alive; workspaces inside
operations and fragmentation they do not see. No figure from here is a measurement. This package
imports torch alone.
"""
