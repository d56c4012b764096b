"""Finds the fastest plan that fits: proposals, an integer program, the planner."""
