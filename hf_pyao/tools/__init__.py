"""Answers and judges.

Estimates, benchmarks, reports, simulated devices. Nothing below imports them.
"""
