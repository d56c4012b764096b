"""Zeroth-order steps of a model: two forwards, over weights that visit the device."""
