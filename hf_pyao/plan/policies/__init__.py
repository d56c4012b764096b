"""Policies that follow a budget or a plan, and all policies by name."""
