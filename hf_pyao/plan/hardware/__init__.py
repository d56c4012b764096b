"""Speeds and sizes of devices, and what an operation costs: numbers for simulation and prediction.

``speeds`` (a device's and a link's), ``presets`` (those of cards that are common), ``device_speed``
and ``link_speed`` (measured ones), and ``operation_costs`` (arithmetic and memory traffic of an
operation). The simulation charges these costs to a virtual clock, the predictor adds them up; they
share this table and nothing else.
"""
