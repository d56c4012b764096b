"""Decides in a run which policy an attached model follows: the machine, and what it performs."""
