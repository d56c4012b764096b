"""Zeroth-order steps of a model: two forwards one after the other, over weights that visit the device."""
