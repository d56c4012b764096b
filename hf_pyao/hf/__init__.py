"""Where users of transformers, accelerate and TRL come in."""
