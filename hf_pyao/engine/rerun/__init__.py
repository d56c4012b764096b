"""What code that runs a second time must find as it was the first time.

Three things run a second time: layers (segments, tiles, replayed operations), micro-batches after
an out-of-memory error, and steps that are only tried. All use this package: ``guard`` notices what
a layer changes, which then does not run again; ``module_state`` has what a second run of a layer
finds in its modules, and what is put back for good; ``surroundings`` notes what an operation
depends on beside its inputs, ``generators`` and ``settings`` note random states and settings of
torch, and ``modes`` says which modes and hooks of others make a second run impossible.
"""
