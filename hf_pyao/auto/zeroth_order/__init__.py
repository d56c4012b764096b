"""Zeroth-order steps of a model: two forwards in lock-step, over weights that visit the device."""
