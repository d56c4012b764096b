"""Chooses a Trainer's micro-batch before training begins."""
