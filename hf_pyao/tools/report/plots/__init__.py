"""Plots of documents, by matplotlib's object interface: no global state, no window."""
