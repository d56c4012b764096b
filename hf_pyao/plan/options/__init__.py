"""Chooses what changes the step itself: segments, tiles, groups of attention."""
