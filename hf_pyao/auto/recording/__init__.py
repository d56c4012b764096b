"""Records steps of a model on fake tensors."""
