"""Finds the layers of a model and the roles of their parts."""
