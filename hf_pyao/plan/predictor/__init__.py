"""Answers what a training comes to at any size and in any way, and which size is the largest."""
