"""A device that is not there: its waits, its clock and its memory, the same on every machine.

Reading order: ``transport`` (copies under a hostile schedule), ``virtual_link`` (a virtual clock),
``device`` (charges operations to clock and ledger), ``late_transport`` (the slowest link there
could be). The ledger is ``hf_pyao/plan/step/ledger.py``; the operations that CUDA would pick are in
``hf_pyao/model/fake_cuda/``.

What it promises: the engine under it is the one that trains, and cannot tell. The same program and
seed give the same schedule, times and bytes. A missing wait is an error or poison, never luck.
Ledgers count storages that tensors keep alive; workspaces inside operations and fragmentation they
do not see. No figure from here is a measurement. This package imports torch alone; nothing of what
it simulates imports it.
"""
