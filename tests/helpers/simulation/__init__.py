"""A device that is not there: its waits, its clock and its memory, the same on every machine."""
