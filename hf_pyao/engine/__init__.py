"""Moves bytes, and what autograd saves: hooks, copies, stores, codecs, recomputation."""
