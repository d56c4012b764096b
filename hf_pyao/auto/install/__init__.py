"""Puts engine, hooks and options on a model, and takes them off."""
