"""``pyao advise``: which settings a training script should run with.

Start with ``command.py``.
"""
