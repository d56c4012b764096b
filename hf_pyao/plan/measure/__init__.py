"""Measures real steps: profiles, and the times between packs."""
