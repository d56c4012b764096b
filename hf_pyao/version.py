"""The version of hf_pyao."""

__version__ = "0.1.0"
