"""Runs a micro-batch again under a tighter plan where it did not fit."""
