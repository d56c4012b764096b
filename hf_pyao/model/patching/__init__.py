"""Exchanges methods of modules: for one call, or for as long as something is attached."""
