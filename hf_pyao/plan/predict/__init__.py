"""Predicts time and memory of a step under a plan."""
