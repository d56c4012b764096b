"""Where the engine meets transformers, accelerate and TRL: layers, and the user's surface."""
