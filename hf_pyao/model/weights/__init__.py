"""Which weights of a model may be streamed; where the others are."""
