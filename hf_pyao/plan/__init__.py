"""Turns numbers into plans.

A recorded step, a device, a link. README.md gives the reading order.
"""
