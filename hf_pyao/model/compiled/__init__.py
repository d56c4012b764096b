"""Modules that were compiled: by what, and within which share of memory."""
