"""The JSON documents that hf_pyao writes and reads: data and checks alone.

Profiles, plans, predictions and reports are frozen dataclasses. ``schema.py`` reads and writes all
of them. Views, tables and plots of documents are in ``tools/report/``. Imports no torch.
"""
