"""Shows documents as tables, Markdown, plots, traces, and one HTML page.

Imports no torch and no transformers, and matplotlib only when a plot is drawn.
"""
