"""Computes the loss of a model's head without its logits."""
