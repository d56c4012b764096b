"""Chooses a micro-batch or a sequence length from predicted steps."""
