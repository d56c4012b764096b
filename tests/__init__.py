"""Tests of hf_pyao. README.md says which known trap is held by which test."""
