"""Which frozen weights are streamed: facts, the choice, and when uploads hide."""
