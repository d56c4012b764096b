"""Settings: what a configuration field may hold, and what users are told about it."""
