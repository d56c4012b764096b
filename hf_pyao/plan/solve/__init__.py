"""Finds the fastest plan that fits: variants of layers, a search over them, plain ways."""
