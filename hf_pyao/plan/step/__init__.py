"""A training step as a program of plain numbers.

Recorded, stretched, scaled, with a plan carried out.
"""
