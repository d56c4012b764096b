"""The engine: one saved tensor's journey from pack to unpack. README.md gives the reading order."""
