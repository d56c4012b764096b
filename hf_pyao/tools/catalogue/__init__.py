"""Every error and warning of hf_pyao by its key: cause and remedy.

The message itself says what came, what was expected, where, and what to do. The catalogue adds what
has no room in a line. A key stands for one cause with one remedy. Several messages share a key
where a user does the same about all of them: every value out of its range has ``setting-value``.
"""

from __future__ import annotations
