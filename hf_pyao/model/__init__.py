"""What is known of a model, and what is changed in it: layers, head, tiles, attention."""
