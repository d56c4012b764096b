"""torch's saved-tensor hooks, their stack, and what else of torch stands around a call."""
