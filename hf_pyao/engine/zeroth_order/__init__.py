"""Zeroth-order fine-tuning: noise that is drawn by a counter, and weights that visit the device."""
