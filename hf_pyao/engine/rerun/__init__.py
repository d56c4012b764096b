"""What code that runs a second time must find as it was the first time.

Three things run a second time: layers (segments, tiles, replayed operations), micro-batches after
an out-of-memory error, and steps that are only tried. All use this package: ``inventory`` notes
what modules and arguments hold, ``surroundings`` notes what an operation depends on beside its
inputs, ``generators`` and ``settings`` note random states and settings of torch, and ``modes`` says
which modes and hooks of others make a second run impossible.
"""
