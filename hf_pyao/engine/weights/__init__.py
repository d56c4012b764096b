"""Frozen weights that live on the host and come to the device block by block."""
